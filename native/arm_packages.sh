#!/bin/sh
# Puts what a build for aarch64 needs beside its cross compiler into a folder: liburing, libaio and Python's headers,
# unpacked from Debian's packages. apt keeps a state of its own there, so the machine's packages stay as they are.
# Fails where there is no apt, no cross compiler, or no such package.
#
#     arm_packages.sh FOLDER
set -e
command -v aarch64-linux-gnu-g++ >/dev/null || { echo "no aarch64-linux-gnu-g++ (apt-get install g++-aarch64-linux-gnu)"; exit 1; }
mkdir -p "$1/apt/state/lists/partial" "$1/apt/cache/archives/partial"
cd "$1"
python=python$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
apt="apt-get -qq -o Dir::State=$PWD/apt/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$PWD/apt/cache
     -o APT::Architectures::=$(dpkg --print-architecture) -o APT::Architectures::=arm64 -o APT::Sandbox::User=root"
$apt update
$apt download liburing-dev:arm64 libaio-dev:arm64 "lib$python-dev:arm64"
for package in *.deb; do
    dpkg -x "$package" .
done
rm -rf apt ./*.deb
