#!/usr/bin/env bash
# Judging on several GPUs of this machine: a short search by --launcher, the same by --gpus, and one by --launcher of
# whose workers one is killed in the middle of a judgement. Says what of the three is as it must be.
#   gpu-launchers.sh [--seconds N] GPUS [FOLDER]
# --seconds: of each search (default 18). FOLDER (default gpu-launchers-out): the stores, summaries and logs. The
# program lies beside this script, in build/workbench, or is $ACROMION; $SEARCH replaces the search's arguments, $BESIDE
# --gpus.
# Exit code 0: all is as it must be.
set -uo pipefail
# shellcheck source=tools/gpu-program.sh
. "$(dirname "${BASH_SOURCE[0]}")/gpu-program.sh"
seconds=18 bad=0
if [[ ${1-} == --seconds ]]; then
    seconds=${2?--seconds needs a number}
    shift 2
fi
gpus=${1-} out=${2:-gpu-launchers-out}
[[ $gpus =~ ^[2-8]$ && $seconds =~ ^[0-9]+$ ]] || {
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
}
[[ -x $program ]] || {
    echo "gpu-launchers.sh: no program: ACROMION names it" >&2
    exit 2
}
mkdir -p "$out/notes" || exit 1
out=$(cd "$out" && pwd)
read -ra words <<<"${SEARCH:-b1:h4:s256:d64 --backend cuda --family fwd_mma --trials 8 --generation 8 --cases 4}"

# What a worker is: noted, so that it can be killed.
cat >"$out/worker.sh" <<'WORKER'
#!/bin/sh
notes=$1
shift
echo $$ >"$notes/$ACROMION_WORKER.now"
mv "$notes/$ACROMION_WORKER.now" "$notes/$ACROMION_WORKER"
exec env CUDA_VISIBLE_DEVICES="$ACROMION_WORKER" "$@"
WORKER
chmod +x "$out/worker.sh"

# search NAME OPTIONS...: leaves its exit code in `code`; 0 and 7 are what a search may end with.
search() {
    local name=$1 start=$SECONDS
    shift
    rm -f "$out/$name".*
    "$program" evolve "${words[@]}" --seed 3 --no-profile --store "$out/$name.db" --time "${seconds}s" "$@" \
        >"$out/$name.log" 2>&1
    code=$?
    "$program" trials summary --json --store "$out/$name.db" >"$out/$name.json" 2>>"$out/$name.log"
    "$program" trials export --store "$out/$name.db" >"$out/$name.jsonl" 2>>"$out/$name.log"
    echo "$name: exit code $code, $((SECONDS - start)) s, $(trials "$name" valid) valid, $(trials "$name" lost) lost," \
        "judged on $(judged "$name")"
}

trials() {
    grep -c "\"status\": *\"$2\"" "$out/$1.jsonl"
}

judged() {
    grep -o '"device": *[0-9][0-9]*' "$out/$1.jsonl" | sort -u | grep -o '[0-9]*$' | tr '\n' ' '
}

# Of the first round, which no result decides.
proposed() {
    grep '"round": *0' "$out/$1.jsonl" | grep -o '"kernel": *"[^"]*"' | sort
}

# check WHAT CONDITION...: of test.
check() {
    if test "${@:2}"; then
        echo "ok   $1"
    else
        echo "BAD  $1"
        bad=1
    fi
}

# Ends the second worker's first judgement of a candidate: what it does before are a probe and the control.
kill_one() {
    local until=$((SECONDS + seconds)) pid
    while ((SECONDS < until)) && ! "$program" trials list --store "$out/killed.db" 2>/dev/null | grep -q valid; do
        sleep 0.2
    done
    rm -f "$out/notes/1"
    while ((SECONDS < until)) && ! pid=$(cat "$out/notes/1" 2>/dev/null); do
        sleep 0.05
    done
    kill -KILL "${pid:-0}" && echo "killed worker 1, process $pid"
}

search launched --launcher "$out/worker.sh $out/notes" --workers "$gpus"
check "a search by --launcher ends" $((code % 7)) = 0
read -ra options <<<"${BESIDE:---gpus $gpus}"
search beside "${options[@]}"
check "a search by --gpus ends" $((code % 7)) = 0
for name in launched beside; do
    check "$name: something is valid" "$(trials $name valid)" -ge 2
    check "$name: nothing is lost" "$(trials $name lost)" = 0
    check "$name: every GPU has judged" "$(judged $name)" = "$(seq -s ' ' 0 $((gpus - 1))) "
done
check "both propose the same" "$(proposed launched)" = "$(proposed beside)"

kill_one &
killer=$!
search killed --launcher "$out/worker.sh $out/notes" --workers "$gpus"
check "a search that loses a worker's judgement ends" $((code % 7)) = 0
wait "$killer"
check "killed: one trial is lost, no more" "$(trials killed lost)" = 1
check "killed: others are valid" "$(trials killed valid)" -ge 2
check "killed: the run says so" "$(grep -c 'it answers again' "$out/killed.log")" = 1
grep -h 'noise floor' "$out"/*.log
exit $bad
