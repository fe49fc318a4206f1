#!/bin/sh
# Installs what building floor 0 needs from Debian or Ubuntu, where it may (root, or sudo without a
# password), and says what it could not. Never fails: the build itself has the last word, and without
# liburing or libaio tiermem still works through another engine.
#
#     system_packages.sh PYTHON
python=$1
missing=""
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
command -v make >/dev/null 2>&1 || missing="$missing make"
[ -e /usr/include/liburing.h ] || [ -e /usr/local/include/liburing.h ] || missing="$missing liburing-dev"
[ -e /usr/include/libaio.h ] || [ -e /usr/local/include/libaio.h ] || missing="$missing libaio-dev"
if ! "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
    missing="$missing $("$python" -c 'import sys; print(f"python{sys.version_info.major}.{sys.version_info.minor}-dev")')"
fi
[ -n "$missing" ] || exit 0

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "not installed (no root):$missing - to have them: sudo apt-get install$missing"
        exit 0
    fi
    as_root="sudo -n"
fi
echo "installing:$missing"
$as_root apt-get update -qq >/dev/null 2>&1
for package in $missing; do
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq "$package" >/dev/null 2>&1 ||
        echo "not installed: $package (apt-get install $package failed)"
done
