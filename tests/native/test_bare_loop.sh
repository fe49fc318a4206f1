#!/bin/sh
# Does bare_loop answer every command with three numbers, and what it cannot do with `error` and status 1?
#
#     test_bare_loop.sh PROGRAM       in a folder whose file system takes O_DIRECT
set -eu

program=$1
file=$(mktemp ./bare-loop-XXXXXX)
trap 'rm -f "$file"' EXIT
dd if=/dev/zero of="$file" bs=65536 count=33 2>/dev/null

# Sizes that fill, cut and wrap round the file; a depth that does not divide; one direction that ends before the other.
answers=$(printf '%s\n' 'read 65536 4 2162688' 'write 65536 3 4325376' 'read 12288 5 20480' 'random 4096 64 1048576 7' \
  'mixed 65536 3 2097152 69632' 'mixed 4096 1 4096 4096' 'through 65536 3 2097152 69632' 'through 4096 1 4096 12288' \
  'spread 65536 3 2097152 69632' 'spread 12288 2 4325376 20480' 'write 1048576 2 1052672' quit 'read 1 1 1' | "$program" "$file")
[ "$(echo "$answers" | grep -c '^[0-9]*\.[0-9]* [0-9]*\.[0-9]* [0-9]*\.[0-9]*$')" = 11 ]
[ "$(echo "$answers" | wc -l)" = 11 ]
if cmp -s -n 65536 "$file" /dev/zero; then
  echo "nothing was written"
  exit 1
fi

for wrong in 'read 65536 4' 'copy 65536 4 65536' 'read 0 4 65536' 'read 4194304 4 4194304' 'read 65536 4 1000'; do
  if answer=$(echo "$wrong" | "$program" "$file"); then
    echo "not refused: $wrong"
    exit 1
  fi
  case $answer in
    "error "*) ;;
    *) echo "$wrong: $answer"; exit 1 ;;
  esac
done
