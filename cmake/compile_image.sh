#!/bin/sh
# Compiles one device image and checks its resources: spilled registers and serialised wgmma are errors.
#   compile_image.sh NVCC IMAGE ARCH PORTABLE_ARCHS SPILLS SOURCE FLAGS...
# With PORTABLE_ARCHS (separated by ; or space, rising) a fat binary, not compressed: of an ARCH without a letter (80,
# 89) PTX of ARCH and machine code for each of them that is no older, but of one generation (80, 89) the first alone,
# which the others run, too, unless the line reads pages (PAGED=1: from sm_89 on one instruction upcasts an 8-bit
# cache); of any other ARCH its machine code alone. Without, one cubin.
# SPILLS: SPILLS_OK=reason lets spills pass. Leaves IMAGE.d (dependencies) and IMAGE.ptxas (ptxas -v, which
# `./run resources` tabulates). With KEEP_PTX=1 in the environment also the PTX that nvcc made on the way, for the PTX
# machine of the tests: of a portable image NAME.<arch>.ptx beside NAME.bin for each target, else NAME.ptx.
set -u
nvcc=$1 image=$2 arch=$3 portable=$(echo "$4" | tr ';' ' ') spills=$5 source=$6
shift 6
fat="-fatbin --compress-mode=none" # pack_image.c packs better: all parts together, and one line beside another
if [ -z "$portable" ] || [ "${arch%[a-z]}" != "$arch" ]; then
    kind=${portable:+$fat}
    kind=${kind:--cubin}
    targets="-gencode=arch=compute_$arch,code=sm_$arch"
else
    kind=$fat
    targets="-gencode=arch=compute_$arch,code=compute_$arch"
    generation=
    for a in $portable; do
        if [ "$a" -lt "$arch" ] || [ "${a%?}" = "$generation" ]; then continue; fi
        case " $* " in *" -DPAGED=1 "*) ;; *) generation=${a%?} ;; esac
        targets="$targets -gencode=arch=compute_$a,code=sm_$a"
    done
fi
log=$image.ptxas
keep=
folder=$image.keep
if [ -n "${KEEP_PTX-}" ]; then
    mkdir -p "$folder"
    keep="--keep --keep-dir $folder"
fi
# shellcheck disable=SC2086  # kind, targets and keep are lists of words
"$nvcc" $kind $targets $keep -std=c++17 -O3 -Xptxas -v -MMD -MF "$image.d" -MT "$image" -o "$image.tmp" "$source" "$@" \
    >"$log" 2>&1 || {
    code=$?
    cat "$log" >&2
    rm -rf "$image.tmp" "$folder"
    [ $code -eq 127 ] && exit 127 # there is no such compiler, which says nothing about the source
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
    rm -rf "$image.tmp" "$folder"
    exit 1
fi
for ptx in "$folder"/*.ptx; do # SOURCE.compute_80.ptx, or with one target SOURCE.ptx
    [ -e "$ptx" ] || continue
    compiled_for=$(basename "$ptx" .ptx | sed -n 's/.*\.compute_\([0-9a-z]*\)$/.\1/p')
    [ -z "$portable" ] || [ "${arch%[a-z]}" != "$arch" ] || compiled_for=${compiled_for:-.$arch} # of one target alone
    mv "$ptx" "${image%.bin}$compiled_for.ptx"
done
rm -rf "$folder"
mv "$image.tmp" "$image"
