#!/bin/sh
# Compiles one device image and checks its resources: spilled registers and serialised wgmma are errors.
#   compile_image.sh NVCC IMAGE ARCH PORTABLE_ARCHS SPILLS SOURCE FLAGS...
# ARCH 80 with PORTABLE_ARCHS (separated by ; or space): a fat binary with machine code for each of them and PTX;
# otherwise one cubin. SPILLS: SPILLS_OK=reason lets spills pass. Leaves IMAGE.d (dependencies) and IMAGE.ptxas (ptxas
# -v, which `./run resources` tabulates).
set -u
nvcc=$1 image=$2 arch=$3 portable=$(echo "$4" | tr ';' ' ') spills=$5 source=$6
shift 6
if [ "$arch" = 80 ] && [ -n "$portable" ]; then
    kind="-fatbin --compress-mode=size" # six targets in a fifth of their bytes; the driver unpacks the one it loads
    targets="-gencode=arch=compute_80,code=compute_80"
    for a in $portable; do targets="$targets -gencode=arch=compute_$a,code=sm_$a"; done
else
    kind=-cubin
    targets="-gencode=arch=compute_$arch,code=sm_$arch"
fi
log=$image.ptxas
# shellcheck disable=SC2086  # kind and targets are lists of words
"$nvcc" $kind $targets -std=c++17 -O3 -Xptxas -v -MMD -MF "$image.d" -MT "$image" -o "$image.tmp" "$source" "$@" \
    >"$log" 2>&1 || {
    cat "$log" >&2
    rm -f "$image.tmp"
    exit 1
}
bad=
if grep -q 'Potential Performance Loss' "$log"; then
    bad="wgmma is serialised"
elif [ -z "$spills" ] &&
    grep -E 'bytes spill stores' "$log" | grep -qvE ' 0 bytes spill stores, 0 bytes spill loads'; then
    bad="registers spill"
fi
if [ -n "$bad" ]; then
    grep -E 'Compiling|spill|Performance' "$log" >&2
    echo "$image: $bad" >&2
    rm -f "$image.tmp"
    exit 1
fi
mv "$image.tmp" "$image"
