#!/bin/sh
# The library without its CUDA backend compiles for aarch64: the core, the CPU backend, the portable CPU kernels.
# Compiles only.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
compiler=aarch64-linux-gnu-gcc
command -v $compiler >/dev/null || { echo "skipped: no $compiler here (Debian: gcc-aarch64-linux-gnu)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# xxHash is a header of this machine's; the cross compiler does not look there by itself.
for folder in /usr/include /usr/local/include; do
    [ ! -e $folder/xxhash.h ] || cp $folder/xxhash.h "$work/"
done
flags="-std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
flags="$flags -I$root/include -I$root/src -I$root/src/core -I$work"
compiled=0
: >"$work/kernels_built.def"
grep -E '^KERNEL\(.*, *portable,' "$root/src/kernels.def" >"$work/portable"
while IFS= read -r line; do
    echo "$line" >>"$work/kernels_built.def"
    name=$(echo "$line" | sed 's/KERNEL(\([a-z0-9_]*\),.*/\1/')
    family=$(echo "$line" | sed 's/KERNEL([a-z0-9_]*, *\([a-z0-9_]*\),.*/\1/')
    {
        echo "$line" | sed 's/.*portable, *//; s/)$//' | tr ' ' '\n' | sed 's/^/#define /; s/=/ /'
        echo "#define KERNEL_NAME $name"
        echo "#define KERNEL_TEXT \"$name\""
        echo "#define KERNEL_ARCH \"portable\""
        echo "#define KERNEL_ARCH_portable 1"
        echo "#define KERNEL_DESCRIPTION acr__kernel_$name"
        echo "#include \"kernel.h\""
        echo "extern const acr__kernel acr__kernel_$name;"
        echo "static const unsigned char build[] = \"cross\";"
        echo "#define KERNEL_IMAGE build"
        echo "#define KERNEL_IMAGE_END (build + sizeof build)"
        echo "#include \"cpu/$family/$family.c\""
    } >"$work/$name.c"
    # shellcheck disable=SC2086
    $compiler $flags -O3 -ffp-contract=fast -fno-math-errno -c -o "$work/$name.o" "$work/$name.c"
    compiled=$((compiled + 1))
done <"$work/portable"
for source in "$root"/src/core/*.c "$root"/src/cpu/backend.c "$root"/src/cpu/threads.c; do
    # shellcheck disable=SC2086
    $compiler $flags -c -o "$work/object.o" "$source"
    compiled=$((compiled + 1))
done
echo "$compiled files compiled for aarch64"
[ $compiled -gt 10 ]
