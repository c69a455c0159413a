#!/usr/bin/env bash
# Runs the searches of results/evolve on this machine's GPUs within a given time, and goes on where the last call
# stopped: 45 distinct trials and 45 of the random control at the mission shape and at a large one, both masks each.
#   gpu-evolve.sh [--seconds N] [--gpus N] [--run NAME 'ARGUMENTS OF EVOLVE']... [FOLDER]
# --seconds: of this call (default 540); no trial is begun that would not end in it. --gpus: so many GPUs side by side,
# a run each, or several where there are fewer runs (default 1). --run: another run in place of the two; again:
# several. FOLDER (default: gpu-evolve-out)
# receives NAME.db, the store; NAME.log; and at the end of every call NAME.json (the summary), NAME.jsonl (every trial
# with its raw samples) and runs.md. The program lies beside this script, or is $ACROMION.
# Ctrl-C and SIGTERM let the trial in flight end. Exit code 0: every run is complete. 7: call it again. 1: a run failed;
# its log says why.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${ACROMION:-$here/acromion}
seconds=540 gpus=1 out=gpu-evolve-out
names=() arguments=()
readonly least_s=10  # a slice that could not judge a trial is not begun
readonly grace_s=120 # what a slice may take longer before it is interrupted: it never should
readonly unfinished=7

die() {
    echo "gpu-evolve.sh: $*" >&2
    exit 2
}

while (($#)); do
    case $1 in
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --seconds) seconds=${2:?--seconds needs a number}; shift 2 ;;
    --gpus) gpus=${2:?--gpus needs a number}; shift 2 ;;
    --run)
        (($# >= 3)) || die "--run needs a name and arguments"
        names+=("$2") arguments+=("$3")
        shift 3
        ;;
    -*) die "unknown option $1" ;;
    *) out=$1; shift ;;
    esac
done
[[ $seconds =~ ^[0-9]+$ && $gpus =~ ^[1-9]$ ]] || die "--seconds and --gpus are whole numbers"
[[ -x $program ]] || die "$program: no such program; ACROMION names it"
if ((${#names[@]} == 0)); then
    names=(mission large)
    arguments=('--backend cuda b2:h8:s512:d64 b2:h8:s512:d64:causal'
        '--backend cuda b4:h16:s2048:d64 b4:h16:s2048:d64:causal')
fi
mkdir -p "$out" || exit 1
left_s() {
    echo $((seconds - SECONDS))
}

# Runs side by side, and the GPUs of each.
lanes=$((gpus < ${#names[@]} ? gpus : ${#names[@]}))
share=$((gpus / lanes))

# run_slice I DEVICE: begins a run or goes on with it, for what is left of the time. Returns evolve's exit code.
run_slice() {
    local name=${names[$1]} left words=()
    left=$(left_s)
    ((left >= least_s)) || return $unfinished
    if [[ -e $out/$name.db ]]; then
        words=(--resume)
    else
        read -ra words <<<"${arguments[$1]}"
    fi
    # The program ends by itself. What neither that nor a signal ends is killed, and resumed as well.
    timeout --foreground --kill-after="$grace_s" $((left + grace_s)) \
        "$program" evolve "${words[@]}" --device "$2" --gpus "$share" --store "$out/$name.db" \
        --time "${left}s" >>"$out/$name.log" 2>&1 &
    slice=$!
    wait_for "$slice"
}

# wait_for PID: its exit code, whatever signals come meanwhile.
wait_for() {
    local code
    while :; do
        wait "$1"
        code=$?
        ((code <= 128)) || ! kill -0 "$1" 2>/dev/null || continue # a signal has ended the wait
        break
    done
    ((code <= 128)) || wait "$1" || code=$? # the shell remembers
    return "$code"
}

# run_lane LANE: every lanes-th run, one after another, until one is not finished. Writes their exit codes to files.
run_lane() {
    local i code=0 slice=
    trap '[[ -z $slice ]] || kill -TERM "$slice" 2>/dev/null' TERM
    for ((i = $1; i < ${#names[@]}; i += lanes)); do
        if ((code != unfinished)); then
            run_slice "$i" $(($1 * share))
            code=$?
        fi
        echo "$code" >"$out/${names[i]}.code"
    done
}

# Writes what results/evolve holds of a run; a store that was cut short as it began has nothing yet.
write_results() {
    "$program" trials summary --json --store "$out/$1.db" >"$out/$1.json" &&
        "$program" trials export --store "$out/$1.db" >"$out/$1.jsonl"
}

pids=()
trap : INT # the programs have it from the terminal
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for ((lane = 0; lane < lanes; lane++)); do
    run_lane "$lane" &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait_for "$pid"
done

worst=0 tables=()
for name in "${names[@]}"; do
    code=$(cat "$out/$name.code" 2>/dev/null || echo 1)
    rm -f "$out/$name.code"
    case $code in
    0) said=complete ;;
    "$unfinished") said="not finished: call this again" ;;
    *)
        said="FAILED with code $code, the end of $out/$name.log:"$'\n'$(tail -n 5 "$out/$name.log" | sed 's/^/    /')
        ;;
    esac
    echo "$name: $said"
    ((code == 0)) || { ((code == unfinished)) && ((worst != 1)) && worst=$unfinished; } || worst=1
    if [[ -e $out/$name.db ]] && write_results "$name" 2>>"$out/$name.log"; then
        tables+=("$out/$name.json")
    fi
done
if ((${#tables[@]} > 0)) && command -v python3 >/dev/null; then
    python3 "$here/evolve_table.py" "${tables[@]}" >"$out/runs.md" && sed -n '1,/^$/p' "$out/runs.md"
fi
exit $worst
