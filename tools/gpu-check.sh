#!/usr/bin/env bash
# Checks and measures every kernel on this machine's GPU, with the program that lies beside this script (or $ACROMION),
# and the controls beside it (or $GPU_CONTROLS).
#   gpu-check.sh [FOLDER]      FOLDER (default: gpu-check-out) receives the logs and bench.json
# Exit code 0: every kernel is right, compute-sanitizer (where there is one) clean, kernels that cheat were refused, an
# injected slowdown was found, and the mission shape was measured in every mode.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${ACROMION:-$here/acromion}
controls=${GPU_CONTROLS:-$here/gpu_controls}
out=${1:-gpu-check-out}
case $out in
-h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
esac

# Small, since the tools slow a kernel down a thousandfold, and ragged, since that is where faults hide.
small_cases=(b1:h2:s65:d64 b1:h4/2:s33/70:d64:causal:lse bf16:b2:h2:s17/40:d128:kvlens f32:b1:h1:s20:d40:align4
    b6:h2/1:s40/70:d64:causal:bshd:packed:lse)
# More than 2^31 elements of q and o, and of k and v: 256 rows of each are compared. Needs 40 GB of host memory.
large_cases=(b1:h64/1:s262500/100:d128:bshd b300:h8:s1/7000:d128)
# racecheck does not follow every order made by mbarriers and named barriers, so it is not run on kernels that hand
# things over by them: fwd_wgmma and fwd_ladder5 (a tile's index, written after the consumers' arrivals), and fwd_mma
# with key groups (partial results, published before the barrier of all threads).
racecheck_kernels=('fwd_simt*' 'fwd_short*' 'fwd_mma_*_s2_[sw]*' 'fwd_ladder[0-4]*')
bench_problems=(b2:h8:s512:d64 b2:h8:s512:d64:causal b4:h16:s2048:d64 b4:h16:s2048:d128:causal
    b8:h32/8:s1024:d128:causal)

mkdir -p "$out" || exit
passed=0 failed=0

# run_step NAME COMMAND...: runs a step into its own log and counts it.
run_step() {
    local name=$1 started=$SECONDS
    shift
    printf '%-12s ' "$name"
    if "$@" >"$out/$name.log" 2>&1; then
        passed=$((passed + 1))
        printf 'ok      %4d s\n' $((SECONDS - started))
    else
        failed=$((failed + 1))
        printf 'FAILED  %4d s  the end of %s:\n' $((SECONDS - started)) "$out/$name.log"
        tail -n 20 "$out/$name.log" | sed 's/^/    /'
    fi
}

find_sanitizer() {
    local candidate
    for candidate in "$(command -v compute-sanitizer)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
        [[ -x $candidate ]] && { echo "$candidate"; return; }
    done
}

run_step info "$program" info
run_step check "$program" check --backend cuda
run_step large "$program" check --backend cuda -k 'fwd_[mw]*_f16_d128_*' --inputs normal "${large_cases[@]}"
sanitizer=$(find_sanitizer)
if [[ -n $sanitizer ]]; then
    for tool in memcheck initcheck synccheck; do
        run_step "$tool" "$sanitizer" --tool "$tool" --error-exitcode 86 \
            "$program" check --backend cuda "${small_cases[@]}"
    done
    for i in "${!racecheck_kernels[@]}"; do
        run_step "racecheck-$i" "$sanitizer" --tool racecheck --error-exitcode 86 \
            "$program" check --backend cuda -k "${racecheck_kernels[i]}" "${small_cases[@]}"
    done
else
    echo "compute-sanitizer  not found: skipped"
fi
run_step controls "$controls"
rm -f "$out/bench.json" # bench adds to a file
run_step bench "$program" bench --backend cuda -o "$out/bench.json" "${bench_problems[@]}"
for mode in rotating cold call call-single; do
    run_step "$mode" "$program" bench --backend cuda --quick --mode "$mode" -o "$out/bench.json" "${bench_problems[0]}"
done
run_step ladder "$program" bench --backend cuda --quick -k 'fwd_ladder*' -o "$out/bench.json" "${bench_problems[0]}"
run_step host-cost "$program" bench --backend cuda --host-cost -o "$out/bench.json" "${bench_problems[@]}"
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    peers=torch,cublas
else
    echo "peers        no PyTorch that sees a GPU: cuBLAS alone"
    peers=cublas
fi
run_step peers "$program" bench --peers "$peers" -o "$out/bench.json" "${bench_problems[@]}"
run_step why "$program" why --backend cuda b2:h8:s512:d64
run_step roofline "$program" roofline b2:h8:s512:d64
echo "$passed passed, $failed failed; logs in $out/"
((failed == 0))
