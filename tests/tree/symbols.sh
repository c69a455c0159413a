#!/bin/sh
# A shared library's face: it exports exactly the functions of its list of symbols, which are those that its header
# declares, and needs nothing but the C library and its parts, and what else is named.
#   symbols.sh LIBRARY HEADER SYMBOLS [NEEDED]
set -eu
library=$1 header=$2 symbols=$3 also=${4:-libc.so.6}
tests=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only "$library" | awk '{ print $3 }' | LC_ALL=C sort >"$work/exported"
grep -o "^ACR_API [^;(]*(" "$tests/../../include/$header" | sed 's/(//; s/.*[ *]//' | LC_ALL=C sort >"$work/declared"
failed=0
for list in exported declared; do
    diff -u "$tests/$symbols" "$work/$list" || {
        echo "what is $list differs from $symbols (above)"
        failed=1
    }
done

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
for name in $needed; do
    case $name in
    libc.so.6 | libm.so.6 | ld-linux*.so.* | "$also") ;;
    *)
        echo "$library needs $name: only libc, libm and the loader are allowed"
        failed=1
        ;;
    esac
done
readelf -d "$library" | grep -q "SONAME.*\[lib${symbols%.symbols}\.so\.0\]" || {
    echo "$library: the soname is not lib${symbols%.symbols}.so.0"
    failed=1
}
if readelf -d "$library" | grep -q TEXTREL; then
    echo "$library has text relocations"
    failed=1
fi
readelf -lW "$library" | grep 'GNU_STACK' | grep -q 'RWE' && {
    echo "$library asks for an executable stack"
    failed=1
}
# shellcheck disable=SC2086  # a list of names
[ $failed = 0 ] && echo "$(wc -l <"$work/exported") symbols; needs" $needed
exit $failed
