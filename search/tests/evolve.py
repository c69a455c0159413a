#!/usr/bin/env python3
"""The search as a user runs it, on the CPU with the model clock: kills and resumes, interrupts, proposers, the commands
over the store.

    evolve.py PROGRAM SCRATCH [--kills N] [--driver FOLDER] [TEST...]

Every run compiles real candidates, each once for all tests (cached_compiler.py), and passes them through the real
gates; only times are made up, so that two runs can be compared to the last bit. With the fake driver's folder the test
`device` runs a search on a GPU that is none: the PTX machine executes the candidates.
"""
import argparse
import contextlib
import html
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import cached_compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBLEM = "f32:b1:h2:s32:d32"
BASE = ["--backend", "cpu", "--clock", "model", "--cases", "1", "--threads", "2"]
UNFINISHED = 7
# A start, and what the model's clock tells from it.
SLOW = "fwd_row portable DTYPE=ACR_F32 DIM=1024 Q_TILE=1 KV_TILE=8"
QUICK = {"family": "fwd_simd", "arch": "portable", "rationale": "rows in lanes",
         "parameters": {"ROW_VECS": 2, "Q_TILE": 64, "KV_TILE": 64, "COLUMNS": 6, "UNROLL": 2}}
# What differs between two runs that found the same: when, how long, in which slice.
PASSING = {"proposed_in", "proposed_at", "finished_in", "finished_at", "wall_s", "gate_times", "at", "slice", "answer",
           "request", "request_text", "device"}


class Context:
    """The program under test and where its files go."""

    def __init__(self, program, scratch, kills, driver):
        self.program = pathlib.Path(program).resolve()
        self.driver = driver
        self.folder = pathlib.Path(scratch).resolve() / f"evolve.{os.getpid()}"
        self.kills = kills
        self.folder.mkdir(parents=True)

    def store(self, name):
        return str(self.folder / f"{name}.db")

    def run(self, *arguments, code=0):
        done = subprocess.run([self.program, *arguments], cwd=ROOT, capture_output=True, text=True)
        if code is not None and done.returncode != code:
            sys.exit(f"{' '.join(map(str, arguments))}: exit code {done.returncode}, not {code}\n"
                     f"{done.stdout}\n{done.stderr}")
        return done

    def evolve(self, name, *arguments, code=0):
        return self.run("evolve", *BASE, "--store", self.store(name), *arguments, code=code)

    def evolve_limited(self, name, *arguments, limit_s):
        """A run whose time is up before it is complete, on a quick machine, too: two compilations take longer."""
        os.environ["CACHED_PAUSE_S"] = str(0.6 * limit_s)
        done = self.evolve(name, *arguments, "--time", f"{limit_s}s", code=UNFINISHED)
        del os.environ["CACHED_PAUSE_S"]
        return done

    def resume(self, name, *arguments, code=0):
        return self.run("evolve", "--resume", "--threads", "2", "--store", self.store(name), *arguments, code=code)

    def start(self, *arguments):
        """A run that will be killed: its own process group, so that nothing of it can stay behind unseen."""
        return subprocess.Popen([self.program, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True, start_new_session=True)

    def archive(self, name):
        """All that a run found, without what may differ."""
        lines = self.run("trials", "export", "--store", self.store(name)).stdout.splitlines()
        return [strip(json.loads(line)) for line in lines]

    def summary(self, name):
        return json.loads(self.run("trials", "summary", "--json", "--store", self.store(name)).stdout)


def strip(value):
    if isinstance(value, dict):
        return {key: strip(inner) for key, inner in value.items() if key not in PASSING}
    if isinstance(value, list):
        return [strip(inner) for inner in value]
    return value


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def difference(a, b):
    """The first trial that differs, in words."""
    if len(a) != len(b):
        return f"{len(a)} and {len(b)} trials"
    for one, other in zip(a, b):
        for key in one:
            if one[key] != other.get(key):
                return f"trial {one['id']}: {key}: {str(one[key])[:200]} != {str(other.get(key))[:200]}"
    return None


def finished_ids(path):
    """Trials that the store holds as finished; None while it is locked or has no tables yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
            return {row[0] for row in store.execute("SELECT id FROM trial WHERE status IS NOT NULL")}
    except sqlite3.OperationalError:
        return None


def processes_naming(text):
    """Command lines of processes that name a file, this one's left out."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in words and entry.parent.name != str(os.getpid()):
            found.append(words)
    return found


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_kill(context):
    """kill -9 at random moments; what was finished stays, and the end is that of an uninterrupted run. With compilers
    that forget: half of the moments are theirs."""
    cached_compiler.forget()
    trials = max(4, min(16, context.kills))
    definition = [PROBLEM, "--trials", str(trials), "--seed", "3", "--generation", "4"]
    began = time.monotonic()
    context.evolve("whole", *definition)
    whole_s = time.monotonic() - began
    began = time.monotonic()
    context.resume("whole")  # nothing is left to do: what a start costs
    start_s = time.monotonic() - began
    trial_s = max(0.05, (whole_s - start_s) / (2 * trials))
    expected = context.archive("whole")
    dice = random.Random(20)
    begin = ["evolve", *BASE, "--store", context.store("killed"), *definition]
    go_on = ["evolve", "--resume", "--threads", "2", "--store", context.store("killed")]
    arguments, finished, kills, completed = begin, set(), 0, 0
    while kills < context.kills:
        process = context.start(*arguments)
        try:
            # Half of the kills come before the first trial has ended, the others some trials later.
            process.wait(timeout=dice.uniform(0.02, 1.2 * start_s + dice.choice([0, 1, 3]) * trial_s))
            message = process.stderr.read()
            if process.returncode == 0:
                completed += 1
                if completed == 1:
                    continue  # resuming a run that is complete can be killed as well
                break
            if "a store without a run" in message or "not a trial store" in message:
                # Killed between making the file and writing what the run is: nothing is lost but a second.
                for path in context.folder.glob("killed.db*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                arguments = begin
                continue
            sys.exit(f"FAILED: after {kills} kills: exit code {process.returncode}: {message}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        if pathlib.Path(context.store("killed")).exists():
            arguments = go_on
            now = finished_ids(context.store("killed"))
            check(now is None or finished <= now, f"kill {kills}: trials {sorted(finished - (now or set()))} were lost")
            finished = now or finished
    deadline = time.monotonic() + 600  # a compiler's own child may still finish its file, on a busy machine late
    while processes_naming(context.store("killed")):
        check(time.monotonic() < deadline, f"left behind: {processes_naming(context.store('killed'))}")
        time.sleep(0.2)
    context.run(*arguments)
    found = difference(expected, context.archive("killed"))
    check(found is None, f"after {kills} kills the run found something else: {found}")
    whole, killed = context.summary("whole"), context.summary("killed")
    check(whole["search"] == killed["search"] and whole["control"] == killed["control"], "the summaries differ")
    check(killed["finished"], "the run is not finished")
    print(f"{kills} kills, {len(killed['slices'])} slices, {len(expected)} trials: nothing lost, the same archive")


def test_interrupt(context):
    """Ctrl-C finishes the trial in flight and leaves a run that goes on; so does a time limit."""
    definition = [PROBLEM, "--trials", "5", "--generation", "3"]
    process = context.start("evolve", *BASE, "--store", context.store("interrupted"), *definition)
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    check(process.wait() in (UNFINISHED, 0), f"exit code {process.returncode} after an interrupt")
    done = context.evolve_limited("limited", *definition, limit_s=2)
    check("--resume" in done.stdout and "nothing is claimed" in done.stdout, "a slice says that it is not the end")
    limited = context.summary("limited")
    check(not limited["finished"] and limited["slices"][0]["reason"] == "time is up", "the slice's reason is kept")
    context.resume("limited")
    context.resume("interrupted")
    found = difference(context.archive("limited"), context.archive("interrupted"))
    check(found is None, f"two runs with the same seed differ: {found}")
    before = context.archive("limited")
    context.resume("limited")  # nothing is left to do
    check(before == context.archive("limited"), "resuming a finished run changes nothing")


def test_usage(context):
    """What is refused, and how."""
    context.evolve("usage", PROBLEM, "--trials", "1")
    context.evolve("usage", PROBLEM, code=5)
    context.run("evolve", "--resume", "--trials", "9", "--store", context.store("usage"), code=2)
    context.run("evolve", "--resume", "--backend", "cuda", "--store", context.store("usage"), code=4)
    context.run("evolve", "--resume", "--store", context.store("nowhere"), code=5)
    context.evolve("none", PROBLEM, "f32:b1:h1:s8:d64", code=2)
    told = context.evolve("none", PROBLEM, "bwd:" + PROBLEM, code=2).stderr
    check("pass is bwd in some and fwd in others" in told, f"two passes in one search are refused by name: {told}")
    told = context.evolve("none", "bwd:" + PROBLEM, "--family", "fwd_simd", code=4).stderr
    check("fwd_simd computes the forward pass" in told, f"a family of the other pass: {told}")
    context.evolve("other_pass", "bwd:" + PROBLEM, "--from", "fwd_simd_f32_d1024_64x64_avx2", code=4)
    for cache, name in [(":kvlens:page16", "page"), (":kv-e4m3", "kv_dtype"), (":v-in-k", "v-in-k")]:
        told = context.evolve("none", PROBLEM + cache, code=4).stderr
        check(f"{name} is given" in told, f"a cache is refused by name: {told}")
    context.evolve("none", PROBLEM, "--family", "fwd_none", code=4)
    context.evolve("none", PROBLEM, "--from", "fwd_none", code=3)
    told = context.evolve("none", PROBLEM, "--try", "fwd_simd portable Q_TILE=7", code=3).stderr
    check("Q_TILE=7 is not among" in told, f"a set that is no point: {told}")
    context.evolve("none", PROBLEM + "@x", code=2)
    context.evolve("none", PROBLEM, "--tree", str(context.folder), code=5)
    context.run("trials", "list", "--store", context.store("nowhere"), code=5)
    context.run("trials", "show", "99", "--store", context.store("usage"), code=2)
    context.run("trials", "frobnicate", "--store", context.store("usage"), code=2)
    context.run("promote", "1", "--store", context.store("usage"), code=1)
    bad = context.folder / "bad.db"
    bad.write_text("something else")
    context.run("trials", "list", "--store", str(bad), code=3)


def test_found(context):
    """What `why` and `info` say of kernels that a search came upon is what the runs hold."""
    lines = (ROOT / "src/kernels.def").read_text()
    listed = re.findall(r"^FOUND\((\w+), (\d+), \"([^\"]*)\", \"([^\"]*)\"\)$",
                        (ROOT / "workbench/kernels/found.def").read_text(), re.MULTILINE)
    check(len(listed) >= 3, f"kernels that were found: {listed}")
    for kernel, trial, how, run in listed:
        check(f"KERNEL({kernel}, " in lines, f"{kernel} is a line")
        name, *rest = run.split(", ")
        files = [ROOT / word for word in rest if word.startswith("results/")]
        for file in files:
            twin = kernel.replace("_bf16_", "_f16_") if "twin" in how else kernel
            trials = [json.loads(line) for line in file.read_text().splitlines()]
            trial_of_run = [t for t in trials if t["id"] == int(trial) and t.get("run", name) == name]
            check([t["kernel"] for t in trial_of_run] == [twin] and trial_of_run[0]["is_improved"], f"{kernel}: {run}")
            check((trial_of_run[0]["arm"] == "control") == (how == "random search"), f"{kernel}: {how}")
    told = context.run("why", "e4m3:b1:h8:s512:d128", "--gpu", "h200").stdout
    if "plan: fwd_short" in told:  # a build that has the line
        check("found by evolve, trial 12 (random search) of e4m3-d128, results/" in told, told)
        kernels = json.loads(context.run("info", "--json").stdout)["kernels"]
        check([k for k in kernels if "trial 12 (" in k.get("found", "")], "info names the trial")


def test_moved(context):
    """A run does not go on with other spaces than it began with; the refusal names them, the store stays readable."""
    tree = context.folder / "tree"
    tree.mkdir()
    for name in ("src", "include", "cmake", "search"):
        shutil.copytree(ROOT / name, tree / name)
    space = tree / "src/cpu/fwd_simd/fwd_simd.space"
    context.evolve_limited("moved", PROBLEM, "--trials", "3", "--tree", str(tree), limit_s=1)
    before, text = context.archive("moved"), space.read_text()
    resume = ["evolve", "--resume", "--threads", "2", "--store", context.store("moved"), "--tree", str(tree)]
    space.write_text(text.replace("UNROLL    1 2 4 8", "UNROLL    1 2 4"))
    told = context.run(*resume, code=3).stderr
    check("fwd_simd.space has changed" in told and "another --store" in told, f"a changed space: {told}")
    space.unlink()
    told = context.run(*resume, code=3).stderr
    check("fwd_simd.space is gone" in told, f"a space that is gone: {told}")
    space.write_text(text)
    (tree / "src/cpu/fwd_plain").mkdir()
    (tree / "src/cpu/fwd_plain/fwd_plain.space").write_text(text)
    (tree / "src/cpu/fwd_plain/fwd_plain.c").write_text((tree / "src/cpu/fwd_simd/fwd_simd.c").read_text())
    told = context.run(*resume, code=3).stderr
    check("fwd_plain.space is new" in told, f"a new space: {told}")
    (tree / "src/cpu/fwd_plain/fwd_plain.space").unlink()
    check(before == context.archive("moved"), "a refused resume changes nothing")
    context.run(*resume)


def add_winner(path, trial):
    """Makes a trial of the search the winner, and writes into the store what Nsight Compute could have said of it and
    of the incumbent."""
    with sqlite3.connect(path) as db:
        db.execute("UPDATE trial SET is_improved = 1, speedup = 1.5, speedup_low = 1.4, speedup_high = 1.6 "
                   "WHERE id = ?", (trial,))
        db.execute("INSERT INTO confirmation VALUES (?, 99, 1, '2026-01-01', 'valid', '', '', 1.5, 1.4, 1.6, 0.01, "
                   "'FASTER')", (trial,))
        row = "INSERT INTO profiled VALUES (?, ?, ?, ?, ?, 'Nsight Compute', ?, 1, '2026-01-01')"
        db.execute(row, (0, 0, PROBLEM, "OK", "", "Bound by tensor cores."))
        db.execute(row, (trial, 0, PROBLEM, "OK", "", "Bound by <latency>."))
        db.execute(row, (trial, 1, "b1:h1:s2:d1", "NO_PERMISSION", "ERR_NVGPUCTRPERM", ""))
        for of, name, value in ((0, "duration_us", 25), (0, "tensor_pct", 20), (trial, "duration_us", 12.5),
                                (trial, "tensor_pct", 41.5)):
            db.execute("INSERT INTO profile VALUES (?, 0, ?, ?, '')", (of, name, value))
    db.close()


def test_trials(context):
    """list, show, diff, export and summary tell the same."""
    wanted = "DTYPE=ACR_F32 DIM=1024 Q_TILE=64 KV_TILE=64 ROW_VECS=1 COLUMNS=4 UNROLL=2"
    context.evolve("told", PROBLEM + "@2", "f32:b1:h2:s64:d32:causal", "--trials", "5", "--generation", "4", "--try",
                   f"fwd_simd portable {wanted}")
    store = ["--store", context.store("told")]
    listed = json.loads(context.run("trials", "list", "--json", *store).stdout)
    exported = context.archive("told")
    began = [(t["arm"], set(t["parameters"].split())) for t in exported[:2]]
    check(began == [(arm, set(wanted.split())) for arm in ("search", "control")], f"both begin with --try: {began}")
    check([t["id"] for t in listed] == list(range(1, len(listed) + 1)), "ids count from 1")
    for a, b in zip(listed, exported):  # a list has 7 digits, an export all
        same = a["speedup"] == b["speedup"] or abs(a["speedup"] - b["speedup"]) < 1e-6 * b["speedup"]
        check(a["status"] == b["status"] and same, f"list and export agree: {a} {b}")
    timed = [t for t in exported if t["status"] == "valid"]
    check(timed and all(len(t["timings"]) == 2 for t in timed), "both problems are timed")
    check(all(len(x["candidate_us"]) == 8 * x["blocks"] for t in timed for x in t["timings"]), "raw samples are kept")
    check(all(len(t["cases"]) > 2 and any(c["hidden"] for c in t["cases"]) for t in timed), "every case is kept")
    shown = context.run("trials", "show", str(timed[0]["id"]), *store).stdout
    check(timed[0]["kernel"] in shown and "valid" in shown, "show names kernel and status")
    first, second = [str(t["id"]) for t in timed if t["arm"] == "search"][:2]  # arms begin with the same sets
    differing = context.run("trials", "diff", first, second, *store).stdout
    check("speed-up" in differing, "diff shows what differs")
    summary = context.summary("told")
    for arm in ("search", "control"):
        of_arm = [t for t in exported if t["arm"] == arm]
        distinct = sum(t["is_distinct"] for t in of_arm)
        check(summary[arm]["distinct"] == 5 == distinct, "the budget counts distinct trials")
        check(summary[arm]["proposed"] == len(of_arm), "all proposals are counted")
    check(summary["run"]["problems"][0]["weight"] == 2, "weights are kept")
    incumbents = [t for t in exported if t["status"] == "duplicate"]
    check(incumbents and all(t["original"] == 0 and not t["is_distinct"] for t in incumbents),
          "the incumbent proposed again is a duplicate and costs nothing")
    check("MODEL CLOCK" in context.run("trials", "summary", *store).stdout, "a model's figures are not passed off")
    if shutil.which("gnuplot"):
        page = pathlib.Path(context.store("told")).with_suffix(".html")
        context.run("report", context.store("told"), "-o", page)
        text = html.unescape(page.read_text())
        for said in (summary["conclusion"], *summary["alarms"]):
            check(said in text, f"the report says what the summary says: {said}")
        check("table-winners" not in text, "where nothing was profiled there is no table of it")
        add_winner(context.store("told"), next(t["id"] for t in timed if t["arm"] == "search"))
        context.run("report", context.store("told"), "-o", page)
        table = page.read_text().split('id="table-winners"')[1].split("</table>")[0]
        rows = [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<td.*?</td>", row, re.S)]
                for row in re.findall("<tr>.*?</tr>", table, re.S)[1:]]
        check([row[1] for row in rows] == [PROBLEM, PROBLEM, "b1:h1:s2:d1"], f"a row each: {rows}")
        check(rows[0][2].endswith(", the winner"), f"the winner is told: {rows}")
        check(rows[0][3:5] == ["12.50", "41.5"] and rows[1][3:5] == ["25.00", "20.0"],
              f"the winner's counters, then the incumbent's: {rows}")
        check(rows[0][-1] == "Bound by <latency>." and rows[1][2] == "the incumbent" and
              rows[2][-1] == "NO_PERMISSION ERR_NVGPUCTRPERM", f"what they say, or why there are none: {rows}")


class Model(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint of a few lines: answers in the ways that models answer."""
    seen = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][1]["content"]
        Model.seen.append({"path": self.path, "key": self.headers.get("Authorization"), "model": body["model"],
                           "prompt": prompt})
        number = len(Model.seen)
        answer = {"family": "fwd_simd", "arch": "portable", "rationale": f"idea {number}",
                  "parameters": {"ROW_VECS": 1, "Q_TILE": 8 * number, "KV_TILE": 32, "COLUMNS": 4, "UNROLL": 2}}
        words = [json.dumps(answer), "Sure! Here it is:\n```json\n" + json.dumps(answer) + "\n```\nGood luck.",
                 "I would rather not."][min(number - 1, 2) if number != 4 else 0]
        if number == 5:
            self.send_error(429, "slow down")
            return
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": words}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


def test_chat(context):
    """The chat proposer against a local endpoint: prompt, key, wrapped answers, refusals, errors."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(CHAT_URL=f"http://127.0.0.1:{server.server_address[1]}/v1", CHAT_MODEL="test-model",
                      CHAT_KEY="secret-key", no_proxy="127.0.0.1")
    notes = context.folder / "notes.txt"
    notes.write_text("Narrow tiles did well last week.")
    proposer = f"{sys.executable} {ROOT}/tools/proposers/chat.py --guidance task,elites,failures,history,notes"
    done = context.evolve("chat", PROBLEM, "--trials", "4", "--from", "fwd_simd_f32_d1024_64x64_portable",
                          "--proposer", proposer, "--insights", str(notes), code=1)  # 10 refusals in a row in the end
    server.shutdown()
    check("proposer failed" in done.stderr, "a proposer that only fails ends the run, and is named")
    search = [t for t in context.archive("chat") if t["arm"] == "search"]
    outcomes = [t["status"] for t in search]
    check(outcomes[:2] == ["valid", "valid"] and "proposer_crashed" in outcomes[2:], f"outcomes {outcomes}")
    check("429" in " ".join(t["detail"] or "" for t in search), "the endpoint's error is in the store")
    check("[model test-model, shown: task, elites, failures, history, notes]" in search[0]["rationale"],
          "the rationale says what was shown")
    first = Model.seen[0]
    check(first["path"] == "/v1/chat/completions" and first["key"] == "Bearer secret-key", "path and key")
    check("Narrow tiles" in first["prompt"] and "Source of" not in first["prompt"], "guidance is obeyed")
    check("Q_TILE=8" in Model.seen[1]["prompt"], "the second prompt knows of the first trial")
    raw = context.run("trials", "export", "--store", context.store("chat")).stdout
    check("secret-key" not in raw, "the key is nowhere in the store")
    requests = [json.loads(json.loads(line)["request_text"]) for line in raw.splitlines()
                if json.loads(line)["request_text"]]
    check(len(requests) == len([t for t in search if t["operation"] == "external"]), "every request is kept")
    hidden = str(context.summary("chat")["run"]["hidden_seed"])
    check(hidden not in json.dumps(requests), "no request holds the hidden seed")


def test_proposers(context):
    """The scripted proposer climbs; broken ones leave typed trials, and a whole source goes through the gates."""
    scripted = f"{sys.executable} {ROOT}/tools/proposers/scripted.py"
    start = "fwd_simd portable DTYPE=ACR_F32 DIM=1024 Q_TILE=64 KV_TILE=64 ROW_VECS=1 COLUMNS=2 UNROLL=2"
    context.evolve("scripted", PROBLEM, "--trials", "4", "--from", start, "--proposer", scripted)
    search = [t for t in context.archive("scripted") if t["arm"] == "search"]
    check(sum(t["status"] == "valid" for t in search) >= 3, f"outcomes {[t['status'] for t in search]}")
    check(all("one step" in t["rationale"] for t in search if t["status"] == "valid"), "rationales are kept")

    flags = context.folder / "turn"
    script = context.folder / "broken.sh"
    source = json.dumps({"name": "mine", "arch": "portable", "source": "int x = ;\n", "rationale": "a typing error",
                         "descriptor": {"dtype": "f32", "qk_dim": 64, "v_dim": 64, "q_tile": 1, "kv_tile": 1,
                                        "stages": 1}})
    script.write_text(f"""cat > /dev/null
turn=$(cat {flags} 2>/dev/null || echo 0)
echo $((turn + 1)) > {flags}
case $turn in
0) sleep 60 ;;
1) yes ;;
2) echo '{{' ;;
3) exit 9 ;;
4) echo '{{"family": "fwd_simd", "arch": "portable", "parameters": {{"Q_TILE": 7}}}}' ;;
5) cat << 'END'
{source}
END
;;
*) exec {scripted} ;;
esac
""")
    script.write_text(script.read_text().replace("cat > /dev/null\n", "request=$(cat)\n").replace(
        f"exec {scripted}", f"printf '%s' \"$request\" | {scripted}"))
    context.evolve("broken", PROBLEM, "--trials", "2", "--from", start, "--proposer", f"sh {script}",
                   "--proposer-timeout", "1s")
    search = [t for t in context.archive("broken") if t["arm"] == "search"]
    outcomes = [t["status"] for t in search]
    check(outcomes[:5] == ["proposer_timeout", "proposer_flood", "proposer_malformed", "proposer_crashed",
                           "proposal_illegal"], f"outcomes {outcomes}")
    check(outcomes[5] in ("compile_failed", "inadmissible"), f"a broken source ends as {outcomes[5]}")
    check(search[5]["source_text"] == "int x = ;\n", "the source is kept")
    check(not any(t["is_distinct"] for t in search[:5]) and search[5]["is_distinct"], "what costs budget")


def test_folder(context):
    """Candidates prepared beforehand: taken in order of name, each with its rationale; verdicts beside them; notes that
    grow; a folder that has no more waits, goes on when it has, and ends when it says so."""
    folder = context.folder / "prepared"
    folder.mkdir()
    exploits = ROOT / "tests/exploits"
    descriptor = json.loads((exploits / "attention.cpu.json").read_text())

    def verdict(name):
        return json.loads((folder / f"{name}.verdict.json").read_text())

    def prepare(file, text=None, **keys):
        (folder / f"{file}.json").write_text(text or json.dumps(keys))

    def names():
        answers = [json.loads(t["answer_text"]) for t in context.archive("prepared") if t["answer_text"]]
        return [a["file"] for a in answers]

    plain = {"name": "plain", "arch": "portable", "descriptor": descriptor}
    prepare("b-wrong", **plain, rationale="less work", insight="the scale costs", guidance="failures",
            source="#define CHEAT_SCALE 1\n" + (exploits / "attention.c").read_text())
    prepare("a-plain", **plain, insight="row by row is right", guidance="profile")
    (folder / "a-plain.c").write_text((exploits / "attention.c").read_text())
    (folder / "a-plain.md").write_text("The plainest kernel there is.")
    prepare("c-broken", text="{")
    prepare("d-bare", family="fwd_simd", arch="portable", parameters="Q_TILE=16")
    prepare("aa-quick", **QUICK)
    begin = [PROBLEM, "--trials", "5", "--from", SLOW]
    context.evolve("prepared", *begin, "--proposer-folder", str(folder), code=UNFINISHED)
    check(names() == ["a-plain.json", "aa-quick.json", "b-wrong.json", "c-broken.json", "d-bare.json"],
          f"the order: {names()}")
    check(context.summary("prepared")["slices"][0]["reason"] == "the folder has no further candidate", "why it ended")
    told = verdict("a-plain")
    check(told["status"] == "valid" and told["speedup"] > 0 and told["timings"], f"a verdict with times: {told}")
    check([verdict(n)["status"] for n in ("c-broken", "d-bare")] == ["proposer_malformed"] * 2, "what has no form")
    check("d-bare.md" in verdict("d-bare")["detail"], "a candidate without a rationale is told so")
    wrong = verdict("b-wrong")
    check(wrong["status"] == "wrong" and wrong["detail"], f"what failed: {wrong}")
    notes = told["insights"]["notes"]
    check("row by row is right" in notes and "the scale costs" in notes and "valid" in notes, f"notes grow: {notes}")
    request = json.loads((folder / "request.json").read_text())
    check(request["elites"] and request["sources"] and request["insights"]["notes"] == notes, "the next one's request")
    hidden = context.summary("prepared")["run"]["hidden_seed"]
    check(not any(hidden in p.read_text() for p in folder.iterdir()), "the hidden seed is in no file")
    first = next(t for t in context.archive("prepared") if t["operation"] == "folder")
    check(first["rationale"] == "The plainest kernel there is.", "the rationale beside it")

    before = context.archive("prepared")
    context.resume("prepared", code=UNFINISHED)  # nothing new: nothing is taken twice
    check(before == context.archive("prepared"), "a folder without a new candidate changes nothing")
    context.resume("prepared", "--confirm", code=UNFINISHED)
    summary = context.summary("prepared")
    check(summary["slices"][-1]["reason"] == "confirmed what there was" and len(before) == len(names()) +
          sum(t["arm"] == "control" for t in context.archive("prepared")), "nothing is proposed")
    check(summary["search"]["confirmed"] and "so far" in summary["conclusion"], f"what there was: {summary}")
    context.evolve("confirmed", PROBLEM, "--confirm", code=2)
    prepare("a-late", family="fwd_simd", arch="portable", rationale="narrow", guidance="profile",
            parameters={"ROW_VECS": 1, "Q_TILE": 16, "KV_TILE": 32, "COLUMNS": 4, "UNROLL": 2})
    (folder / "complete").touch()
    context.resume("prepared")
    check(names()[-1] == "a-late.json" and len(names()) == 6, "a late one is taken, whatever its name")
    check(verdict("a-late")["status"] == "valid", "and judged")
    summary = context.summary("prepared")
    check(summary["finished"], "`complete` ends the search")
    check(summary["guidance"]["profile"]["trials"] == 2 == summary["guidance"]["profile"]["valid"], "variants compare")
    check("guidance profile: 2 trials" in context.run("trials", "summary", "--store", context.store("prepared")).stdout,
          "and are printed")
    context.evolve("neither", *begin, "--proposer-folder", str(folder), "--proposer", "true", code=3)
    context.evolve("neither", *begin, "--proposer-folder", str(folder / "nowhere"), code=2)


def test_survey(context):
    """The survey's grid, its order, and a budget spent by rank."""
    survey = ["evolve", "--survey", "--backend", "cpu", "--threads", "2"]
    ranked = json.loads(context.run(*survey, "--json").stdout)
    problems = [item["problem"] for item in ranked]
    check(len(set(problems)) >= 60, f"{len(problems)} problems")
    readme = set(re.findall(r"(?:f32:|bf16:|e4m3:)?b\d+:h[\d/]+:s[\d/]+:d[\d/]+[:a-z0-9/]*",
                            (ROOT / "README.md").read_text()))
    check(readme and not readme & set(problems), f"rows of the README: {readme & set(problems)}")
    for what in ("bf16:", "e4m3:", ":packed", ":win", ":s1/", ":d40", ":d256", "b1:h1:", "h32/8"):
        check(any(what in p for p in problems), f"no problem with {what}")
    gains = [item["gain"] for item in ranked]
    check(gains == sorted(gains, reverse=True) and gains[-1] >= 1, "by gain")
    check([item["rank"] for item in ranked] == list(range(1, len(ranked) + 1)), "ranks count from 1")
    alike = [f"f32:b1:h2:s{length}:d32" for length in range(32, 44)]
    lines = context.run(*survey, *alike).stdout.splitlines()
    check(sum(line[:4].strip().isdigit() for line in lines) == 10 and "--all" in lines[-1], "ten lines first")
    lines = context.run(*survey, "--all", *alike).stdout.splitlines()
    check(sum(line[:4].strip().isdigit() for line in lines) == 12, "--all lists each")

    # Measured times and a peer's: what a peer does can be done.
    first, second = PROBLEM, "f32:b1:h2:s64:d32:causal"
    device = lines[0].removeprefix("expected gain on ").split(";")[0]
    results = context.folder / "results.json"

    def record(problem, us, **who):
        return {"problem": problem, "device": device, "mode": "stream", "p50_us": us, "floor_us": us / 2, **who}

    # Times below the floor: so the roofline promises nothing, however fast this machine is.
    results.write_text(json.dumps([record(first, 4e-4, kernel="k"), record(first, 2e-4, peer="torch"),
                                   record(first, 3e-4, peer="other"), record(second, 4e-4, kernel="k"),
                                   record(second, 1e-4, peer="torch"),
                                   record(second, 1e-5, peer="torch") | {"device": "another"}]))
    measured = json.loads(context.run(*survey, "--json", "--results", results, first, second).stdout)
    check([(m["problem"], m["to_peer"], m["peer"], m["measured"]) for m in measured] ==
          [(second, 4, "torch", True), (first, 2, "torch", True)], f"peers: {measured}")
    here = json.loads(context.run(*survey, "--json", "--measure", "60s", first, f"bwd:{first}").stdout)
    check(all(m["measured"] and m["time_us"] <= m["planned_us"] for m in here), f"measured here: {here}")
    done = context.run(*survey, "--json", "--measure", "0.000001s", first, second)
    check("the time is up" in done.stderr and not json.loads(done.stdout)[1]["measured"], f"cut: {done.stderr}")
    into = context.folder / "into"
    spend = [*survey, "--results", results, "--into", into, "--time", "3000s", "--clock", "model", "--cases", "1",
             "--trials", "1", "--generation", "1", first, second]
    done = context.run(*spend)
    order = [line.split()[3] for line in done.stderr.splitlines() if "survey:" in line]
    check(order == [second, first], f"searched by rank: {done.stderr}")
    stores = sorted(p.name for p in into.glob("*.db"))
    check(stores == ["f32-b1-h2-s32-d32.db", "f32-b1-h2-s64-d32-causal.db"], f"a store for each: {stores}")
    done = context.run(*spend, "--top", "1")  # again: goes on with what is there
    check("survey" in done.stderr and done.stdout.count("search against") == 1, f"{done.stdout}{done.stderr}")
    for wrong in (["--into", into], ["--time", "5s"], ["--measure", "5s", "--gpu", "h200"], ["--resume"],
                  ["--into", into, "--time", "5s", "--gpu", "h200"]):
        context.run(*survey, *wrong, code=2)
    context.run("evolve", *BASE, "--all", PROBLEM, "--store", context.store("all"), code=2)
    context.run(*survey, "--results", ROOT / "README.md", code=3)


def test_source(context):
    """A whole source passes every gate and is timed; a proposer that then only repeats itself ends the slice."""
    exploits = ROOT / "tests/exploits"
    answer = context.folder / "answer.json"
    answer.write_text(json.dumps({"name": "plain", "arch": "portable", "macro": "row by row",
                                  "source": (exploits / "attention.c").read_text(),
                                  "descriptor": json.loads((exploits / "attention.cpu.json").read_text())}))
    context.evolve("source", PROBLEM, "--trials", "2", "--from", "fwd_simd_f32_d1024_64x64_portable", "--proposer",
                   f"cat {answer}", code=1)
    search = [t for t in context.archive("source") if t["arm"] == "search"]
    check(search[0]["status"] == "valid" and search[0]["speedup"] > 0, f"the source ends as {search[0]['status']}")
    check(search[0]["cell"] == "source portable row by row", "its macro words name the cell")
    check([t["status"] for t in search[1:]] == ["duplicate"] * 10 and search[1]["original"] == search[0]["id"],
          "the same source again is a duplicate of it")
    context.run("promote", str(search[0]["id"]), "--store", context.store("source"), code=1)


def test_backward(context):
    """A search for gradients: stopped and resumed it finds what it finds in one go, its cases are gradients, and a
    source that forgets D is wrong."""
    problem = "bwd:" + PROBLEM
    definition = [problem + "@2", problem + ":causal", "--trials", "2", "--generation", "2", "--seed", "5"]
    context.evolve("gradients", *definition)
    context.evolve_limited("stopped", *definition, limit_s=1)
    context.resume("stopped")
    found = difference(context.archive("gradients"), context.archive("stopped"))
    check(found is None, f"stopped and resumed, the run found something else: {found}")
    trials = context.archive("gradients")
    check({t["family"] for t in trials} == {"bwd_simd"}, "families of the backward pass alone")
    valid = [t for t in trials if t["status"] == "valid"]
    check(valid and all(len(t["timings"]) == 2 for t in valid), "both problems are timed")
    cases = [c for t in valid for c in t["cases"]]
    check(all(c["problem"].startswith("bwd:") for c in cases) and any(c["hidden"] for c in cases) and
          {"normal", "large", "scaled"} <= {c["inputs"] for c in cases}, f"gradients of every kind of inputs: {cases}")
    exploits = ROOT / "tests/exploits"
    folder = context.folder / "gradients"
    folder.mkdir()
    for name, first_line in (("1_honest", ""), ("2_without_d", "#define CHEAT_NO_D 1\n")):
        (folder / f"{name}.c").write_text(first_line + (exploits / "gradients.c").read_text())
        (folder / f"{name}.json").write_text(json.dumps(
            {"name": "plain", "arch": "portable", "macro": name, "rationale": "a control",
             "descriptor": json.loads((exploits / "gradients.cpu.json").read_text())}))
    context.evolve("sources", problem, "--trials", "2", "--from", "bwd_simd_f32_d1024_64x64_portable",
                   "--proposer-folder", str(folder))
    ends = {t["cell"].split()[-1]: t for t in context.archive("sources") if t["arm"] == "search"}
    check(ends["1_honest"]["status"] == "valid", f"honest gradients end as {ends['1_honest']['status']}")
    flawed = ends["2_without_d"]
    check(flawed["status"] == "wrong" and "dq" in flawed["detail"], f"without D: {flawed['status']}")


# What is given to the profiler: runs the rest of its command line, then prints what Nsight Compute printed on an H200.
NCU = """#!/bin/sh
[ "$1" = --version ] && { echo 'Version 2025.3.1.0 (build 1)'; exit; }
while [ "${1#--}" != "$1" ]; do
    [ "$1" = --kernel-name ] && kernel=$2
    [ "$1" = --csv ] && shift || shift 2
done
"$@" || exit
sed "s/fwd_wgmma_f16_d64_128x128_s3_sm90a/$kernel/" DATA
"""


def test_device(context):
    """A search on a GPU from end to end: nvcc, the gates, correctness by the PTX machine, counters of elites, requests
    that tell of them; a tool that may not count; the model clock's times."""
    if not context.driver or not (shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()):
        print("skipped: the fake driver's folder (--driver) and nvcc are needed")
        sys.exit(77)
    tools = context.folder / "tools"
    tools.mkdir()
    ncu = tools / "ncu"
    ncu.write_text(NCU.replace("DATA", str(ROOT / "tests/data/ncu-2025.3-h200.csv")))
    ncu.chmod(0o755)
    before = dict(os.environ)
    os.environ.update(LD_LIBRARY_PATH=context.driver, FAKE_CUDA_SMS="2", KEEP_PTX="1",
                      FAKE_CUDA_EXECUTE=context.store("device") + ".work", PATH=f"{tools}:{os.environ['PATH']}")
    try:
        device_search(context, ncu)
    finally:
        os.environ.clear()
        os.environ.update(before)


def device_search(context, ncu):
    scripted = f"{sys.executable} {ROOT}/tools/proposers/scripted.py"
    begin = ["evolve", "--backend", "cuda", "--clock", "model", "--cases", "1", "--trials", "2", "--store",
             context.store("device"), "--from", "fwd_mma_f16_d32_64x64_s2_sm80", "--family", "fwd_mma"]
    context.run(*begin, "--proposer", scripted, "b1:h1:s33:d32")
    trials = context.archive("device")
    told = {t["status"] for t in trials if t["is_distinct"]}
    check("valid" in told and told <= {"valid", "resources"}, f"outcomes {told}")
    valid = [t for t in trials if t["status"] == "valid" and t["arm"] == "search"]
    check(valid and all(t["cases"] and all(c["pass"] for c in t["cases"]) for t in valid), "cases are executed")
    check(valid[0]["resources"], "resources are kept")
    for trial in valid:
        profile, = trial["profile"]
        check(profile["status"] == "OK" and profile["counters"]["registers"] == 168, f"counters: {profile}")
    requests = [json.loads(t["request_text"]) for t in map(json.loads, context.run(
        "trials", "export", "--store", context.store("device")).stdout.splitlines()) if t["request_text"]]
    check(requests[0]["task"]["incumbent"]["profile"][0]["diagnosis"], "the first request tells of the incumbent")
    check(any(e["profile"] and e["profile"][0]["diagnosis"] for e in requests[-1]["elites"]), "later ones, the elites")
    shown = context.run("trials", "show", str(valid[0]["id"]), "--store", context.store("device")).stdout
    check("profile of" in shown and "tensor_pct" in shown, f"show prints the profile: {shown}")
    ncu.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM: no permission'\nexit 1\n")
    pathlib.Path(context.store("device")).rename(context.store("first"))
    context.run(*begin, "b1:h1:s33:d32")
    profiles = [p for t in context.archive("device") for p in t["profile"]]
    check(not profiles, "the machine's refusal is met at the incumbent, and ends the profiles")
    with contextlib.closing(sqlite3.connect(context.store("device"))) as store:
        rows = list(store.execute("SELECT trial, status FROM profiled"))
        check(rows == [(0, "NO_PERMISSION")], f"what is stored instead: {rows}")
        check(not list(store.execute("SELECT * FROM profile")), "no number")


def test_gpus(context):
    """One run on two GPUs finds what it finds on one, and so do three judges on one, sets of the same machine code in
    one round included; a kill in between makes no difference. What both have judged is told."""
    if not context.driver or not (shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()):
        print("skipped: the fake driver's folder (--driver) and nvcc are needed")
        sys.exit(77)
    tree = context.folder / "gpus_tree"
    tree.mkdir()
    for name in ("src", "include", "cmake", "search"):
        shutil.copytree(ROOT / name, tree / name)
    space = tree / "src/cuda/kernels/fwd_split/fwd_split.space"
    text = space.read_text()
    few = dict(KV_GROUPS="4", Q_TILE="16", KV_TILE="32", STAGES="2 3\nmicro   SALT       1 2 3 4 5 6")
    for name, values in few.items():
        text, found = re.subn(rf"^((?:macro|micro) +{name} +)[\d ]*\d", rf"\g<1>{values}", text, flags=re.MULTILINE)
        check(found == 1, f"the space has {name} once")
    space.write_text(text)  # few sets, and a parameter that changes nothing
    family = space.with_suffix(".cu")
    text = family.read_text()
    check("PARAMETERS: DIM" in text, "the family declares its parameters")
    family.write_text(text.replace("PARAMETERS: DIM", "PARAMETERS: SALT=0 DIM"))
    begin = ["evolve", "--backend", "cuda", "--clock", "model", "--cases", "1", "--trials", "3", "--generation", "6",
             "--no-profile", "--tree", str(tree), "--family", "fwd_split", "--seed", "5",
             "--from", "fwd_split 80 DIM=64 Q_TILE=16 KV_TILE=32 STAGES=3 KV_GROUPS=4 SALT=1", "b1:h2:s5/40:d64"]

    def with_gpus(gpus, name, arguments, kill_after=None, code=0):
        environment = os.environ | dict(LD_LIBRARY_PATH=context.driver, FAKE_CUDA_SMS="2", KEEP_PTX="1",
                                        FAKE_CUDA_DEVICES="2", FAKE_CUDA_EXECUTE=context.store(name) + ".work")
        process = subprocess.Popen([context.program, *arguments, "--gpus", str(gpus), "--store", context.store(name)],
                                   cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        while kill_after and len(finished_ids(context.store(name)) or ()) < kill_after:
            check(process.poll() is None, "too few trials to kill it at")
            time.sleep(0.02)
        if kill_after:
            process.kill()
        told = process.communicate()
        check(kill_after or process.returncode == code, f"{arguments}: exit code {process.returncode}: {told}")
        return told[1]

    with_gpus(1, "one", begin)
    with_gpus(2, "two", begin)
    with_gpus(1, "beside", [*begin, "--judges", "3"])
    with_gpus(2, "killed", begin, kill_after=3)
    with_gpus(2, "killed", ["evolve", "--resume", "--no-profile", "--tree", str(tree)])
    trials = context.archive("one")
    for name in ("two", "killed", "beside"):
        found = difference(trials, context.archive(name))
        check(found is None, f"{name}: several judges found something else: {found}")
    twins = [t for t in trials if t["status"] == "duplicate" and t["original"] and
             trials[t["original"] - 1]["round"] == t["round"]]
    check(twins, "one round has sets of the same machine code")
    for name, devices in (("one", {0}), ("two", {0, 1}), ("beside", {0})):
        with contextlib.closing(sqlite3.connect(context.store(name))) as store:
            judged = {row[0] for row in store.execute("SELECT DISTINCT device FROM trial WHERE status = 'valid'")}
            check(judged == devices, f"{name}: judged on {judged}")
            rows = list(store.execute("SELECT device, control_verdict FROM slice_device WHERE slice = 1"))
            check(rows == [(d, "SAME") for d in sorted(devices)], f"{name}: controls {rows}")
            none = list(store.execute("SELECT id FROM trial WHERE status = 'duplicate' AND device IS NOT NULL"))
            check(not none, f"{name}: duplicates are judged on no device: {none}")
    told = with_gpus(3, "three", begin, code=4)
    check("device 2" in told, f"a GPU that is not there: {told}")
    told = context.run("evolve", *BASE, "--store", context.store("cpus"), "--gpus", "2", PROBLEM, code=2).stderr
    check("a CPU is one device" in told, told)
    check(not pathlib.Path(context.store("cpus")).exists(), "nothing is begun")


# A launcher: notes who was started with what, hands the job on, and loses it where the test's files say so.
LAUNCHER = """#!/usr/bin/env python3
import json, os, pathlib, stat, subprocess, sys
notes = pathlib.Path(sys.argv[1])
worker = os.environ["ACROMION_WORKER"]
mode = stat.S_IMODE(os.fstat(0).st_mode)
line = sys.stdin.readline()
job = json.loads(line)
stage = job["job"]["stage"]
with open(notes / "started", "a") as log:
    log.write(json.dumps([worker, stage, oct(mode), sys.argv[2:]]) + "\\n")
if (notes / f"dead{worker}").exists():
    sys.exit("no such node")
try:
    if stage == "performance" and job["candidate"] != job["incumbent"]:
        os.remove(notes / "lose")
        sys.exit("the node went away")
except FileNotFoundError:
    pass
print("a banner that is no answer", flush=True)
sys.exit(subprocess.run(sys.argv[2:], input=line, text=True).returncode)
"""


def test_workers(context):
    """Judging by a launcher's workers finds what judging here finds; a lost worker costs its trial in flight, one that
    is gone is given up, and the rest go on; secrets stay on the pipe; a candidate's crash is the candidate's."""
    notes, temporary = context.folder / "notes", context.folder / "temporary"
    notes.mkdir()
    temporary.mkdir()
    script = context.folder / "launch.py"
    script.write_text(LAUNCHER)
    script.chmod(0o755)
    launcher = ["--launcher", f"'{script}' '{notes}'"]
    definition = [PROBLEM, "--trials", "2", "--generation", "2", "--seed", "6"]
    context.evolve("here", *definition)
    expected = context.archive("here")
    started = notes / "started"

    def starts():
        return [json.loads(line) for line in started.read_text().splitlines()]

    os.environ["TMPDIR"] = str(temporary)
    done = context.evolve("three", *definition, *launcher, "--workers", "3")
    del os.environ["TMPDIR"]
    check(not done.stderr, f"nothing is lost: {done.stderr}")
    found = difference(expected, context.archive("three"))
    check(found is None, f"three workers found something else: {found}")
    check({s[0] for s in starts()} == {"0", "1", "2"}, "every worker is used")
    check(not list(temporary.iterdir()), f"judges leave nothing behind: {list(temporary.iterdir())}")
    hidden = str(context.summary("three")["run"]["hidden_seed"])
    as_signed = str(int(hidden) - 2**64) if int(hidden) >= 2**63 else hidden
    check(hidden not in started.read_text() and as_signed not in started.read_text(), "the hidden seed is not told")
    check({s[2] for s in starts()} == {"0o600"}, "only the user can read a job")

    (notes / "lose").touch()
    (notes / "dead1").touch()
    done = context.evolve("lost", *definition, *launcher, "--workers", "3")
    check("worker 1 is left out: worker 1 was lost: no answer: exit code 1; stderr: no such node" in done.stderr,
          done.stderr)
    check("was lost: no answer: exit code 1; stderr: the node went away; it answers again" in done.stderr, done.stderr)
    trials = context.archive("lost")
    lost = [t for t in trials if t["status"] == "lost"]
    check(len(lost) == 1 and not lost[0]["is_distinct"] and not lost[0]["identity"], f"one trial is lost: {lost}")
    summary = context.summary("lost")
    check(summary["finished"] and summary["search"]["distinct"] == 2 == summary["control"]["distinct"],
          "the rest goes on")
    check(any("1 trials were lost" in a for a in summary["alarms"]), "the summary says so")

    (notes / "dead0").touch()
    done = context.evolve("nobody", *definition, *launcher, "--workers", "2", code=5)
    check("no such node" in done.stderr, done.stderr)
    for name in ("dead0", "dead1"):
        (notes / name).unlink()

    # The only worker goes away behind the controls: its trial is lost, what is left stays in flight for --resume.
    (notes / "lose").touch()
    gone = context.folder / "gone.sh"
    gone.write_text(f"""if [ -e '{notes}/lose' ]; then "$@"; else exit 3; fi\n""")
    done = context.evolve("gone", *definition, "--launcher", f"sh '{gone}' '{script}' '{notes}'", code=4)
    check("does not answer any more" in done.stderr and "all 1 workers are lost" in done.stderr, done.stderr)
    before = [t for t in context.archive("gone") if t["status"]]
    check(before[-1]["status"] == "lost", f"the trial in flight is lost: {before[-1]}")
    context.resume("gone")  # here
    check(context.summary("gone")["finished"], "--resume goes on without workers")
    check([t for t in context.archive("gone")][:len(before)] == before, "what was finished stays")

    # The judge is trusted, the candidate is not.
    exploits = ROOT / "tests/exploits"
    answer = context.folder / "cheat.json"
    answer.write_text(json.dumps({"name": "cheat", "arch": "portable", "source":
                                  "#define CHEAT_BEYOND 1\n" + (exploits / "attention.c").read_text(),
                                  "descriptor": json.loads((exploits / "attention.cpu.json").read_text())}))
    context.evolve("cheat", PROBLEM, "--trials", "1", "--from", "fwd_simd_f32_d1024_64x64_portable", "--proposer",
                   f"cat {answer}", *launcher)
    ended = [t for t in context.archive("cheat") if t["arm"] == "search"]
    check([t["status"] for t in ended] == ["crashed"] and "signal 11" in ended[0]["detail"], f"{ended[0]['detail']}")

    judge = subprocess.run([context.program, "judge"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    check(judge.returncode == 3 and "mpirun -n 1" in judge.stderr, f"no job: {judge}")
    judge = subprocess.run([context.program, "judge"], input='{"acromion_job": 2}\n', capture_output=True, text=True)
    check(judge.returncode == 3 and "protocol" in judge.stderr, f"another protocol: {judge}")
    bad = {"acromion_job": 1, "timeout_s": 1, "timed": False, "job": {}, "candidate": {"../x": "00"}, "incumbent": {}}
    judge = subprocess.run([context.program, "judge"], input=json.dumps(bad) + "\n", capture_output=True, text=True)
    check("is no file of a trial" in judge.stdout, f"a name that leaves the folder: {judge}")
    context.run("evolve", *BASE, "--gpus", "2", "--workers", "2", PROBLEM, "--store", context.store("both"), code=2)


def test_mpirun(context):
    """Open MPI as the launcher, three at once."""
    mpirun = ["mpirun", "-n", "1", "--oversubscribe", "--bind-to", "none"]
    mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    try:
        works = shutil.which("mpirun") and subprocess.run([*mpirun, "true"], capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        works = None
    if not works or works.returncode != 0:
        print("skipped: Open MPI's mpirun is not installed (Debian: openmpi-bin)" if not works else
              f"skipped: mpirun cannot start a program here: {works.stderr.decode(errors='replace')}")
        sys.exit(77)
    definition = [PROBLEM, "--trials", "2", "--generation", "2", "--seed", "6"]
    context.evolve("plain", *definition)
    # Open MPI 4.1's mpirun crashes now and then while it hands its input on; evolve then loses the worker, rightly.
    for attempt in range(6):
        store = context.store(f"mpi-{attempt}")
        done = context.run("evolve", *BASE, "--store", store, *definition, "--launcher", " ".join(mpirun), "--workers",
                           "3", code=None)
        if "Segmentation fault" not in done.stderr:
            break
    check(done.returncode == 0 and not done.stderr, f"nothing is lost: {done.stderr}")
    found = difference(context.archive("plain"), context.archive(f"mpi-{attempt}"))
    check(found is None, f"Open MPI's workers found something else: {found}")
    # Three judges of one launch have one job between them: refused, with the way it is meant.
    words = " ".join(mpirun).replace("-n 1", "-n 3")
    done = context.evolve("mpi3", *definition, "--launcher", words, code=5)
    check("mpirun -n 1" in done.stderr and "--workers" in done.stderr, done.stderr)


def test_runs(context):
    """tools/gpu-campaign.sh: several runs, stopped and gone on with; seeds of a run beside each other, and their
    curves."""
    folder = context.folder / "runs"
    tiny = "--backend cpu --clock model --cases 1 --threads 2 --trials 5 --generation 3 "
    runs = ["--run", "plain", f"{tiny} --seed 4 {PROBLEM}", "--run", "causal", f"{tiny} --seed 4 {PROBLEM}:causal"]
    environment = os.environ | {"ACROMION": str(context.program)}
    script = [ROOT / "tools/gpu-campaign.sh", "--survey", "0", "--seconds", "900"]

    def call(*arguments, code):
        done = subprocess.run([*script, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        check(done.returncode == code, f"{arguments}: exit code {done.returncode}, not {code}: "
                                       f"{done.stdout}{done.stderr}")
        return done.stdout

    process = subprocess.Popen([*script, *runs, folder], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    work = folder.with_name("runs.work")
    while not finished_ids(work / "plain.db"):
        check(process.poll() is None, "no trial was finished")
        time.sleep(0.05)
    process.terminate()
    told = process.communicate()[0]
    check(process.returncode == UNFINISHED, f"a signal: {told}")
    check(not (work / "causal.db").exists(), "a run behind one that was stopped is not begun")
    check(not processes_naming(str(folder)), f"left behind: {processes_naming(str(folder))}")
    before = finished_ids(work / "plain.db")
    shutil.rmtree(work)
    call(*runs, folder, code=0)
    check(before and before < finished_ids(work / "plain.db"), "a packed run goes on, and finished trials stay")
    table = (folder / "runs.md").read_text()
    check("| plain |" in table and "## causal" in table and "MODEL CLOCK" in table, f"the table: {table}")
    summaries = {run["name"]: run["summary"] for run in json.loads((folder / "summaries.json").read_text())}
    check(all(s["finished"] and s["search"]["distinct"] == 5 == s["control"]["distinct"] for s in summaries.values()),
          f"the summaries: {summaries}")
    context.run("evolve", *f"{tiny} --seed 4 {PROBLEM}".split(), "--store", context.store("at_once"))
    lines = map(json.loads, (folder / "trials.jsonl").read_text().splitlines())
    found = difference(context.archive("at_once"), [{k: v for k, v in strip(line).items() if k != "run"}
                                                    for line in lines if line["run"] == "plain"])
    check(found is None, f"in slices it found something else: {found}")

    seeds = context.folder / "seeds"
    told = call("--seeds", "2", "--run", "of", f"{tiny} --trials 3 {PROBLEM} --from '{SLOW}'", seeds, code=0)
    curves, = json.loads((seeds / "curves.json").read_text())["search_curves"]
    check(curves["seeds"] == [1, 2] and curves["names"] == ["of-s1", "of-s2"] and curves["trials"] == 3 and
          len(curves["by_trial"]) == 3 and curves["clock"] == "model", f"the curves: {curves}")
    told = told.split("] done\n")[1]
    check("too few seeds" in told and told in (seeds / "runs.md").read_text(), f"the table of curves: {told}")
    lines = list(map(json.loads, (seeds / "trials.jsonl").read_text().splitlines()))
    check(all(line["operation"] != "seed" for line in lines), "from a start of the user's no line of the table is one")

    run, = [run for run in json.loads((seeds / "summaries.json").read_text()) if run["name"] == "of-s1"]
    made = [json.loads(json.dumps(run)) for _ in range(6)]  # curves with a known answer
    for seed, other in enumerate(made):
        summary = other["summary"]
        summary["run"]["seed"] = str(seed)
        summary["search"]["best_after_distinct_trials"] = [1.0, 1.1, 1.2 + 0.01 * seed, 1.3]
        summary["control"]["best_after_distinct_trials"] = [1.0, 1.0, 1.2]
    (seeds / "made.json").write_text(json.dumps(made))
    document = seeds / "document.md"
    document.write_text("before\n<!-- curves -->\nold\n<!-- /curves -->\nbehind\n")
    subprocess.run([ROOT / "tools/evolve_curves.py", seeds / "made.json", "-o", seeds / "made.curves.json", "--into",
                    document], check=True)
    curves, = json.loads((seeds / "made.curves.json").read_text())["search_curves"]
    last = curves["by_trial"][-1]["ratio"]
    check(curves["trials"] == 3 and abs(last["interval"][0] - 1.0) < 1e-9 and abs(last["most"] - 1.25 / 1.2) < 1e-9,
          f"from the least to the largest of six: {last}")
    check(curves["best"] == 1.3 and curves["until_near"]["search"] == [None] * 6, "what came later counts as the best")
    text = document.read_text()
    check(text.startswith("before\n") and text.endswith("<!-- /curves -->\nbehind\n") and "old" not in text and
          "**the search is better**" in text, f"the document: {text}")


def test_campaign(context):
    """tools/gpu-campaign.sh: slices within a time, what looks faster is confirmed, and few files are left."""
    folder, prepared = context.folder / "campaign", context.folder / "candidates"
    prepared.mkdir()
    (prepared / "quick.json").write_text(json.dumps(QUICK))
    run = f"{' '.join(BASE)} {PROBLEM} --trials 2 --generation 1 --from '{SLOW}' --proposer-folder {prepared}"

    def call(*arguments, code):
        done = subprocess.run([ROOT / "tools/gpu-campaign.sh", "--survey", "0", *arguments, folder], cwd=ROOT,
                              env=os.environ | {"ACROMION": str(context.program)}, capture_output=True, text=True)
        check(done.returncode == code, f"{arguments}: exit code {done.returncode}: {done.stdout}{done.stderr}")

    call("--seconds", "60", "--run", "one", run, code=1)
    check("no time is left" in (folder / "log.txt").read_text(), "a slice that would be too short is not begun")
    call("--seconds", "600", "--run", "one", run, "--run", "broken", "--backend cpu not-a-problem", code=1)
    check("broken: exit code 3" in (folder / "log.txt").read_text(), "what failed is named")
    files = sorted(p.name for p in folder.iterdir())
    check(files == ["log.txt", "runs.md", "stores.tar.gz", "summaries.json", "trials.jsonl"], f"files: {files}")
    summary, = json.loads((folder / "summaries.json").read_text())
    check(summary["name"] == "one" and not summary["summary"]["finished"], f"the run waits for candidates: {summary}")
    check(summary["summary"]["search"]["confirmed"], f"and what it found is confirmed: {summary}")
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    check(trials and all(t["run"] == "one" for t in trials), "each trial says of which run it is")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("scratch")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--driver")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_intermixed_args()
    tests = {name[len("test_"):]: function for name, function in globals().items() if name.startswith("test_")}
    context = Context(options.program, options.scratch, options.kills, options.driver)
    cached_compiler.use(pathlib.Path(options.scratch) / "compiled")
    try:
        for name in options.tests or tests:
            started = time.monotonic()
            tests[name](context)
            print(f"{name} ok, {time.monotonic() - started:.0f} s", flush=True)
    finally:
        shutil.rmtree(context.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
