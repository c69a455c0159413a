#!/usr/bin/env bash
# A campaign of short searches in one call that ends in time: a survey measures which problems promise most, slices of
# searches follow at the problems of --run and at the best of the survey, then what looked faster is confirmed in fresh
# processes.
#   gpu-campaign.sh [--seconds N] [--survey N] [--top N] [--device N] [--gpus N] [--judges N] [--trials N] [--seeds N]
#                   [--confirm N] [--run NAME 'ARGUMENTS']... [FOLDER]
# --seconds: of the whole call (default 530). --survey: of measuring (default 75; 0 = none). --confirm: that no slice
# takes from confirmations (default 80). --top: so many problems of the survey are searched (default 3). --trials: of
# each run (default 200). --gpus, --judges: as evolve's (default 1 and 3). --seeds: each run so many times, with seeds
# 1, 2, ..., side by side on the same GPU: does the search beat its control, and by how much? Then nothing is
# confirmed (default 1). --run: a search, in place of the known candidates below; again: several; none: --run none.
# FOLDER (default gpu-campaign-out) receives, at most seven files:
#   survey.json    every problem of the grid, by expected gain, with measured times
#   summaries.json the summary of each run       trials.jsonl[.gz] every trial of each run, with raw samples
#   runs.md        tables of runs and of curves  curves.json       of several seeds, for `acromion report`
#   log.txt        what the programs said        stores.tar.gz     the runs: a call with this FOLDER goes on with them
# The program lies beside this script, in build/workbench, or is $ACROMION. SIGTERM and Ctrl-C let the trials in flight
# end. Exit code 0: every run is complete; 7: call it again; 1: a run failed, which the log tells, or none was begun.
set -uo pipefail
# shellcheck source=tools/gpu-program.sh
. "$(dirname "${BASH_SOURCE[0]}")/gpu-program.sh"
seconds=530 survey=75 top=3 device=0 gpus=1 judges=3 trials=200 seeds=1 confirm=80 out=gpu-campaign-out
names=() arguments=()
readonly write_s=25       # at the end, for results
readonly least_s=20       # a slice that could judge hardly a trial is not begun
readonly generation=16    # proposals of an arm: so many that compiling keeps up with judging, few enough to learn
readonly unfinished=7
readonly limit=15000000   # bytes of a file

die() {
    echo "gpu-campaign.sh: $*" >&2
    exit 2
}

while (($#)); do
    case $1 in
    -h | --help) sed -n '2,21s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --seconds | --survey | --top | --device | --gpus | --judges | --trials | --seeds | --confirm)
        [[ ${2-} =~ ^[0-9]+$ ]] || die "$1 needs a whole number"
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
    --run)
        if [[ ${2-} == none ]]; then
            names=(none) arguments=('')
            shift 2
            continue
        fi
        (($# >= 3)) || die "--run needs a name and arguments"
        names+=("$2") arguments+=("$3")
        shift 3
        ;;
    -*) die "unknown option $1" ;;
    *) out=$1; shift ;;
    esac
done
[[ -x $program ]] || die "no program: ACROMION names it"
if ((${#names[@]} == 0)); then # candidates of the families' lab pages
    names=(e4m3-d128 win128-d128 win128-d64 d96 bwd-d128)
    arguments=(
        "e4m3:b1:h8:s512:d128 --family fwd_short
            --try 'fwd_short 90a E4M3=1 DIM=128 Q_TILE=32 RING=1 STAGES=2 LAG=200'
            --try 'fwd_short 90a E4M3=1 DIM=128 Q_TILE=32 RING=1 STAGES=2'
            --try 'fwd_short 90a E4M3=1 DIM=128 Q_TILE=128 RING=1 STAGES=4'"
        "b2:h8:s512:d128:causal:win128 --family fwd_short
            --try 'fwd_short 90a DIM=128 Q_TILE=32 RING=1 WINDOW=1 STAGES=2'
            --try 'fwd_short 90a DIM=128 Q_TILE=32 RING=1 WINDOW=1 STAGES=3'"
        "b1:h16/2:s512:d64:causal:win128 --family fwd_short
            --try 'fwd_short 90a DIM=64 Q_TILE=32 RING=1 WINDOW=1 STAGES=4'
            --try 'fwd_short 90a DIM=64 Q_TILE=32 RING=1 WINDOW=1 STAGES=2'"
        "b4:h16:s2048:d96 --family fwd_wgmma
            --try 'fwd_wgmma 90a DIM=96 Q_TILE=128 KV_TILE=128 STAGES=2'
            --try 'fwd_wgmma 90a DIM=96 Q_TILE=128 KV_TILE=128 STAGES=3'
            --try 'fwd_wgmma 90a DIM=96 Q_TILE=128 KV_TILE=176 STAGES=2'"
        "bwd:b2:h16:s1024:d128:causal --family bwd_wgmma
            --try 'bwd_wgmma 90a DIM=128 Q_TILE=64 HEADS_MEMORY=16384'
            --try 'bwd_wgmma 90a DIM=128 Q_TILE=64 HEADS_MEMORY=65536'")
elif [[ ${names[0]} == none ]]; then
    names=() arguments=()
fi
((seeds >= 1 && gpus >= 1 && judges >= 1)) || die "--seeds, --gpus and --judges are 1 at least"
work=$out.work
mkdir -p "$out" || exit 1
if [[ ! -e $work ]]; then
    mkdir "$work" || exit 1
    [[ ! -e $out/stores.tar.gz ]] || tar -xzf "$out/stores.tar.gz" -C "$work" || die "$out/stores.tar.gz: no stores"
fi
log=$out/log.txt
: >>"$log"

left_s() {
    echo $((seconds - write_s - SECONDS))
}

say() {
    echo "[$SECONDS s] $*" | tee -a "$log"
}

stopping=0
trap 'stopping=1' TERM INT

# within SECONDS COMMAND...: its exit code. It is asked to end when its time is up, then told to, then killed; asked as
# well where this script is told to stop.
within() {
    local pid code until=$((SECONDS + $1)) asked=0
    shift
    "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((asked == 0 && (SECONDS >= until || stopping))); then
            until=$SECONDS
            asked=1
            kill -TERM "$pid" 2>/dev/null
        elif ((asked == 1 && SECONDS >= until + 3)); then
            asked=2
            kill -TERM "$pid" 2>/dev/null
        elif ((asked == 2 && SECONDS >= until + 6)); then
            asked=3
            kill -KILL "$pid" 2>/dev/null
        fi
    done
    wait "$pid"
    code=$?
    return "$code"
}

# The survey, and its best problems as runs behind those that are given.
take_survey() {
    local problem count=0
    ((survey > 0)) || return 0
    say "survey for $survey s"
    within $((survey + 15)) "$program" evolve --survey --backend cuda --device "$device" --measure "${survey}s" --all \
        --json >"$out/survey.json" 2>>"$log" || say "the survey ended with code $?"
    while read -r problem && ((count < top)); do
        names+=("$(tr ':/' '-_' <<<"$problem")")
        arguments+=("$problem")
        ((++count))
    done < <(sed -n 's/.*"problem": *"\([^"]*\)".*/\1/p' "$out/survey.json")
}

# usual ARGUMENTS: options of a new run that its own do not name.
usual() {
    [[ $1 == *--backend* ]] || echo --backend cuda
    [[ $1 == *--trials* ]] || echo "--trials $trials"
    [[ $1 == *--generation* ]] || echo "--generation $generation"
}

# search NAME SECONDS WORDS...: a slice, output into the log of the run.
search() {
    local name=$1 share=$2
    shift 2
    within $((share + 10)) "$program" evolve "$@" --device "$device" --store "$work/$name.db" --time "${share}s" \
        --no-profile >>"$work/$name.log" 2>&1
}

# slice NAME SECONDS SEED ARGUMENTS: begins a run or goes on with it. Several seeds share the processors, and take turns
# on the GPU: while one compiles another is judged.
slice() {
    local name=$1 share=$2 code words=() now=()
    trap 'stopping=1' TERM INT # of a shell of its own
    if [[ -e $work/$name.db ]]; then
        words=(--resume)
    else
        mapfile -t words < <({ tr '\n' ' ' <<<"$4"; usual "$4"; } | xargs printf '%s\n')
        ((seeds == 1)) || words+=(--seed "$3")
    fi
    if [[ $4 != *"--backend cpu"* ]]; then
        ((gpus == 1)) || now+=(--gpus "$gpus")
        ((seeds > 1 || judges == 1)) || now+=(--judges "$judges")
    fi
    ((seeds == 1)) || [[ $4 == *--threads* ]] || now+=(--threads $(($(nproc) / seeds + 2)))
    say "$name: ${words[*]} ${now[*]} for $share s"
    search "$name" "$share" "${words[@]}" "${now[@]}"
    code=$?
    say "$name: exit code $code"
    ((code != 0)) || : >"$work/$name.complete"
    ((code == 0 || code == unfinished)) || : >"$work/$name.failed"
}

# seed_name I SEED: a run's name.
seed_name() {
    ((seeds == 1)) && echo "${names[$1]}" || echo "${names[$1]}-s$2"
}

run_slices() {
    local i k share pids
    for ((i = 0; i < ${#names[@]} && !stopping; i++)); do
        share=$((($(left_s) - (seeds == 1 ? confirm : 0)) / (${#names[@]} - i) - 2))
        if ((share < least_s)); then
            say "${names[i]}: no time is left"
            continue
        fi
        pids=()
        for ((k = 1; k <= seeds; k++)); do
            slice "$(seed_name "$i" "$k")" "$share" "$k" "${arguments[i]}" &
            pids+=($!)
        done
        wait_for "${pids[@]}"
    done
    for ((i = 0; i < ${#names[@]}; i++)); do # from here on each seed is a run of its own
        for ((k = 1; k <= seeds; k++)); do
            runs+=("$(seed_name "$i" "$k")")
        done
    done
}

# wait_for PID...: to their ends, and tells them to end where this script is told.
wait_for() {
    local pid told=0
    for pid; do
        while kill -0 "$pid" 2>/dev/null; do
            wait "$pid"
            ((stopping == 0 || told)) || { told=1 && kill -TERM "$@" 2>/dev/null; }
        done
    done
}

looks_faster() {
    [[ -e $work/$1.db ]] && "$program" trials list --store "$work/$1.db" 2>>"$log" | grep -q ' FASTER'
}

# What a run shows as faster than its incumbent is measured again, as long as there is time.
confirm_winners() {
    local name share
    ((seeds == 1)) || return 0
    for name in "${runs[@]}"; do
        ((stopping == 0)) || return 0
        share=$(left_s)
        [[ ! -e $work/$name.complete ]] || continue
        looks_faster "$name" || continue
        if ((share < least_s)); then
            say "$name: no time is left to confirm"
            continue
        fi
        say "$name: confirming, for $share s at most"
        search "$name" "$share" --resume --confirm
        say "$name: exit code $?"
    done
}

# Which run a trial is of stands before its keys.
export_trials() {
    local name
    for name in "${runs[@]}"; do
        [[ -e $work/$name.db ]] || continue
        "$program" trials export --store "$work/$name.db" | sed "s/^{/{\"run\": \"$name\", /"
    done
}

write_results() {
    local name separator='[' summaries=() complete=1 failed=0
    for name in "${runs[@]}"; do
        [[ ! -e $work/$name.log ]] || { echo "== $name" && cat "$work/$name.log"; } >>"$log"
        [[ ! -e $work/$name.failed ]] || failed=1
        rm -f "$work/$name".{log,failed,complete}
        if [[ -e $work/$name.db ]] &&
            timeout 5 "$program" trials summary --json --store "$work/$name.db" >"$work/$name.json" 2>>"$log"; then
            summaries+=("$work/$name.json")
            grep -q '"finished": true' "$work/$name.json" || complete=0
        else
            complete=0
        fi
    done
    for name in "${summaries[@]}"; do
        printf '%s\n{"name": "%s", "summary":\n' "$separator" "$(basename "$name" .json)"
        cat "$name"
        printf '}'
        separator=,
    done >"$out/summaries.json"
    [[ $separator == , ]] || printf '[' >"$out/summaries.json"
    printf '\n]\n' >>"$out/summaries.json"
    export_trials >"$out/trials.jsonl" 2>>"$log"
    if (($(wc -c <"$out/trials.jsonl") > limit)); then
        gzip -f "$out/trials.jsonl"
    fi
    if ((${#summaries[@]} > 0)) && command -v python3 >/dev/null && [[ -e $here/evolve_table.py ]]; then
        timeout 5 python3 "$here/evolve_table.py" "${summaries[@]}" >"$out/runs.md" 2>>"$log"
        ((seeds == 1)) || timeout 5 python3 "$here/evolve_curves.py" "$out/summaries.json" -o "$out/curves.json" \
            >"$work/curves.md" 2>>"$log"
        [[ ! -e $work/curves.md ]] || { cat "$work/curves.md" && echo && cat "$out/runs.md"; } >"$work/both.md"
        [[ ! -e $work/both.md ]] || mv "$work/both.md" "$out/runs.md"
    fi
    (cd "$work" && tar -cz -- *.db 2>/dev/null) >"$out/stores.tar.gz"
    for name in trials.jsonl.gz stores.tar.gz; do
        [[ ! -e $out/$name ]] || (($(wc -c <"$out/$name") <= limit)) || rm "$out/$name"
    done
    ((${#summaries[@]} > 0 && !failed)) || return 1
    ((complete)) || return $unfinished
}

runs=()
take_survey
run_slices
confirm_winners
write_results
code=$?
say "done"
if [[ -e $work/curves.md ]]; then
    cat "$work/curves.md"
elif [[ -e $out/runs.md ]]; then
    sed -n '1,/^$/p' "$out/runs.md"
fi
exit $code
