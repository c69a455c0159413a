#!/usr/bin/env python3
"""tools/gpu_day.py without a GPU: with a script in the program's place, what it does with steps that pass, fail, hang,
or lack a tool, with budgets and with folders of earlier runs; and its commands over the fake driver.

    gpu_day.py PROGRAM FAKE_DRIVER_FOLDER IMAGES [unittest arguments]"""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = DRIVER = IMAGES = ""
DONE, FAILED, USAGE, CANNOT_RUN, UNFINISHED = 0, 1, 2, 4, 7

# Plays acromion: prints what a command that went well would, or does what FAKE says of that command.
SCRIPT = r'''#!/usr/bin/env python3
import json, os, sys, time
command, arguments = sys.argv[1], sys.argv[2:]
does = json.loads(os.environ.get("FAKE", "{}")).get(command)
value = lambda name: arguments[arguments.index(name) + 1]
if does == "hang":
    time.sleep(600)
if does == "crash":
    print("acromion: device: lost", file=sys.stderr)
    sys.exit(6)
if does == "no device":
    print("acromion: device: no GPU", file=sys.stderr)
    sys.exit(4)
if command == "--version":
    print("acromion 0.1.0 (0123456789ab)")
if command == "check":
    bad = does == "wrong"
    kernel = value("-k") if does == "slow" else "fwd_x"
    print(json.dumps({"device": "fake", "reruns": 1, "kernels": [
        {"kernel": kernel, "passed": 9 - bad, "failed": int(bad), "worst_share": 0.5},
        {"kernel": "fwd_y", "passed": 0, "failed": 0, "worst_share": 0, "not_run": "not for this device"}],
        "records": [{"kernel": kernel, "pass": not bad, "failure": "max error 2 > 1"}]}), flush=True)
    time.sleep(2 * (does == "slow"))  # so that another check runs meanwhile
    sys.exit(int(bad))
if command == "why" and "--measure" in arguments:
    print("[" if does == "garbage" else json.dumps([{"problem": p} for p in arguments if p.startswith("b")][:5]))
if "-o" in arguments:
    made = [{"problem": arguments[-3], "kernel": "fwd_x", "mode": "stream", "p50_us": float(os.environ.get("US", "1"))}]
    open(value("-o"), "w").write("" if command == "wisdom" else json.dumps(made))
'''


class Day(unittest.TestCase):
    def setUp(self):
        self.path = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.path)
        self.bundle, self.out = self.path / "bundle", self.path / "out"
        for folder in ("src", "tools"):
            (self.bundle / folder).mkdir(parents=True)
        shutil.copy(ROOT / "tools/gpu_day.py", self.bundle)
        for name in ("planner_grid.txt", "planner_unseen.txt"):
            shutil.copy(ROOT / "tools" / name, self.bundle / "tools")
        self.write("tools/variants.txt", "# a remark\nfwd_x:A=1 b1:h1:s1:d8 # more\nfwd_x:B=1 b1:h1:s1:d8\n")
        self.script("acromion", SCRIPT)

    def write(self, name, text):
        path = self.bundle / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def script(self, name, text):
        path = self.write(name, text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def day(self, *arguments, out=None, fake=None, path=None, **environment):
        """Nothing of this machine's CUDA is on PATH."""
        tools = self.path / "bin"
        if not tools.is_dir():
            tools.mkdir()
            for name in ("sh", "bash", "python3", "env"):
                (tools / name).symlink_to(sys.executable if name == "python3" else shutil.which(name))
        full = {"PATH": f"{path}:{tools}" if path else str(tools), "CUDA_HOME": str(self.path / "none"),
                "FAKE": json.dumps(fake or {}), "ACR_NVCC": "", "HOME": str(self.path), **environment}
        return subprocess.run([sys.executable, self.bundle / "gpu_day.py", "-o", out or self.out, *arguments], env=full,
                              capture_output=True, text=True, check=False)

    def steps(self, out=None):
        return {r["step"]: r for r in json.loads(((out or self.out) / "day.json").read_text())}

    def test_steps_that_pass_leave_their_results_and_are_not_repeated(self):
        done = self.day("info", "check", "grid", "wisdom", "host-cost")
        self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
        self.assertEqual({step: r["status"] for step, r in self.steps().items()}, dict.fromkeys(
            ["info", "check.first", "check.second", "grid.1", "grid.2", "grid.unseen", "wisdom.1", "wisdom.2",
             "host-cost"], "passed"))
        self.assertEqual(len(json.loads((self.out / "grid.json").read_text())), 10)
        with tarfile.open(self.out / "more.tar.gz") as more:
            unseen = json.load(more.extractfile("unseen.json"))
        self.assertEqual(len(unseen), 5)
        self.assertEqual(len(json.loads((self.out / "bench.json").read_text())), 1)
        checks = json.loads((self.out / "check.json").read_text())
        self.assertEqual([c["kernels"] for c in checks], [[
            {"kernel": "fwd_x", "cases": 9, "failed": 0, "largest_share_of_tolerance": 0.5}]] * 2)
        again = self.day("check")
        self.assertEqual(again.returncode, DONE)
        self.assertIn("check.first          passed before", again.stdout)
        self.assertEqual(self.day("--again", "check.first").returncode, DONE)
        self.assertEqual(len(json.loads((self.out / "check.json").read_text())), 2)

    def test_steps_beside_each_other_keep_their_results_apart(self):
        done = self.day("check", fake={"check": "slow"})
        self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
        checks = json.loads((self.out / "check.json").read_text())
        for step, pattern in (("check.first", "fwd_[sw]*"), ("check.second", "fwd_[!sw]*")):
            record = next(c for c in checks if c["step"] == step)
            self.assertEqual([k["kernel"] for k in record["kernels"]], [pattern])
            self.assertEqual(record["asked"], f"-k {pattern}")

    def test_a_failure_is_told_and_the_others_run(self):
        done = self.day("info", "check.first", "host-cost", fake={"check": "wrong"})
        self.assertEqual(done.returncode, FAILED)
        steps = self.steps()
        self.assertEqual([steps[s]["status"] for s in ("info", "check.first", "host-cost")],
                         ["passed", "failed", "passed"])
        self.assertIn("1 kernels, 9 cases, 1 failed, the first: fwd_x: max error 2 > 1", steps["check.first"]["why"])
        self.assertEqual(json.loads((self.out / "check.json").read_text())[0]["failures"][0]["kernel"], "fwd_x")
        done = self.day("check.first", "grid.1", fake={"check": "crash", "why": "garbage"})
        self.assertEqual(done.returncode, FAILED)
        self.assertIn("exit code 6: acromion: device: lost", self.steps()["check.first"]["why"])
        self.assertIn("cannot be read", self.steps()["grid.1"]["why"])
        self.assertEqual(self.day("check.first").returncode, DONE)  # what failed is run again
        self.assertEqual(self.steps()["check.first"]["status"], "passed")

    def test_what_is_missing_is_said(self):
        done = self.day("sanitize", "peers.latency", "variants", "exploits", "profile", "python", "evolve", "controls")
        self.assertEqual(done.returncode, CANNOT_RUN)
        why = {step: r["why"] for step, r in self.steps().items()}
        for step, word in (("sanitize.racecheck", "compute-sanitizer"), ("peers.latency", "PyTorch"),
                           ("variants", "nvcc"), ("exploits", "nvcc"), ("profile", "ncu"), ("python", "PyTorch"),
                           ("evolve", "nvcc"), ("controls", "gpu_controls")):
            self.assertIn(word, why[step])
            self.assertEqual(self.steps()[step]["status"], "cannot run here")
        done = self.day("host-cost", fake={"bench": "no device"})
        self.assertEqual(done.returncode, CANNOT_RUN)
        self.assertIn("no GPU", self.steps()["host-cost"]["why"])

    def test_an_empty_list_of_variants_is_said(self):
        """It needs no nvcc, with or without the bundle's folder of compiled ones."""
        self.write("tools/variants.txt", "# a remark\n")
        for arguments in ([], ["--again"]):
            done = self.day("variants", *arguments)
            self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
            step = self.steps()["variants"]
            self.assertEqual((step["status"], step["why"]), ("passed", "nothing to run is listed"))
            self.assertIn("nothing to run is listed\n", (self.out / "day.log").read_text())
            (self.bundle / "variants").mkdir(exist_ok=True)

    def test_a_budget_leaves_steps_unrun_and_cuts_what_hangs(self):
        done = self.day("--budget", "1", "host-cost")
        self.assertEqual(done.returncode, UNFINISHED)
        self.assertFalse((self.out / "day.json").exists())
        done = self.day("--budget", "4", "info", fake={"info": "hang"})
        self.assertEqual(done.returncode, FAILED)
        self.assertIn("killed after", self.steps()["info"]["why"])
        done = self.day("--after", str(self.out), "--budget", "1", "info", out=self.path / "second")
        self.assertEqual(done.returncode, UNFINISHED)  # what failed there counts for nothing

    def test_folders_are_put_together_and_the_later_record_stays(self):
        first, second, both = (self.path / name for name in ("first", "second", "both"))
        self.assertEqual(self.day("host-cost", "check.first", out=first).returncode, DONE)
        done = self.day("--after", str(first), "host-cost", "check", out=second)
        self.assertEqual(done.returncode, DONE)
        self.assertEqual(list(self.steps(second)), ["check.second"])
        self.assertEqual(self.day("--again", "host-cost", out=second, US="2").returncode, DONE)
        self.assertEqual(self.day("--merge", str(first), str(second), out=both).returncode, DONE)
        self.assertEqual(set(self.steps(both)), {"host-cost", "check.first", "check.second"})
        self.assertEqual([r["p50_us"] for r in json.loads((both / "bench.json").read_text())], [2.0])
        self.assertEqual(self.day("--merge", str(self.path), out=both).returncode, FAILED)

    def test_tools_that_are_there_are_used(self):
        tools = self.path / "cuda"
        tools.mkdir()
        skip = "echo sanitizer; while [ \"$1\" != --error-exitcode ]; do shift; done; shift 2; exec \"$@\""
        for name, text in (("nvcc", "exit 0"), ("compute-sanitizer", skip)):
            (tools / name).write_text(f"#!/bin/sh\n{text}\n")
            (tools / name).chmod(0o755)
        built = self.bundle / "variants/fwd_x+A=1"
        built.mkdir(parents=True)
        self.script("tools/gpu-campaign.sh", "echo \"built from $ACR_GIT_SHA, dirty $ACR_GIT_DIRTY\"\n"
                    "for folder; do :; done\necho trial >>\"$folder/summary.json\"\n[ \"$TRIALS\" = all ] || exit 7\n")
        done = self.day("sanitize.racecheck", "variants", "evolve", path=str(tools))
        self.assertEqual(done.returncode, UNFINISHED, done.stdout + done.stderr)
        self.assertEqual(self.steps()["evolve"]["status"], "unfinished")
        log = (self.out / "day.log").read_text()
        self.assertEqual(log.count("\nsanitizer\n"), 7)  # a run for each of racecheck's patterns
        self.assertIn("\nbuilt from 0123456789ab, dirty 0\n", log)
        self.assertRegex(log, r"--variant \S+/variants/fwd_x\+A=1 --variant fwd_x:B=1 b1:h1:s1:d8 -o")
        with tarfile.open(self.out / "more.tar.gz") as archive:
            self.assertEqual({m.name for m in archive if m.isfile()}, {"variants.json", "evolve/summary.json"})
            self.assertEqual(archive.extractfile("evolve/summary.json").read(), b"trial\n")
        self.assertLessEqual(len(list(self.out.iterdir())), 8)
        second = self.path / "second"
        done = self.day("--after", str(self.out), "evolve", path=str(tools), out=second, TRIALS="all")
        self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
        with tarfile.open(second / "more.tar.gz") as archive:  # gone on with, not begun anew
            self.assertEqual(archive.extractfile("evolve/summary.json").read(), b"trial\ntrial\n")

    def test_command_line(self):
        self.assertEqual(self.day("nonsense").returncode, USAGE)
        self.assertEqual(self.day().returncode, USAGE)
        listed = self.day("--list")
        self.assertEqual(listed.returncode, DONE)
        self.assertIn("sanitize.racecheck", listed.stdout)
        dry = self.day("--dry-run", "all")
        self.assertEqual(dry.returncode, DONE, dry.stderr)
        self.assertIn("b300:h8:s1/7000:d128", dry.stdout)
        self.assertFalse(self.out.exists())
        os.remove(self.bundle / "acromion")
        self.assertEqual(self.day("info").returncode, CANNOT_RUN)

    def test_the_program_takes_its_commands(self):
        """The lists cut short, over the fake driver: conformance is executed by the PTX machine, the rest launches
        nothing."""
        environment = {**os.environ, "ACROMION": str(pathlib.Path(PROGRAM).resolve()), "LD_LIBRARY_PATH": DRIVER}
        for steps, execute in ((["info", "grid", "wisdom", "host-cost"], {}),
                               (["check", "reruns", "large"], {"FAKE_CUDA_EXECUTE": IMAGES})):
            done = subprocess.run([sys.executable, ROOT / "tools/gpu_day.py", "--tiny", "-o", self.out, *steps],
                                  env=environment | execute, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
        self.assertEqual([c["kernels"][0]["cases"] for c in json.loads((self.out / "check.json").read_text())], [1] * 6)
        dry = subprocess.run([sys.executable, ROOT / "tools/gpu_day.py", "--dry-run", "all"], env=environment,
                             capture_output=True, text=True, check=False).stdout
        seen = 0
        for line in dry.splitlines():
            words = line.split()
            if words[1:2] == ["check"] and "--variant" not in words:
                seen += 1
                listed = subprocess.run([*words, "--list"], env=environment, capture_output=True, text=True,
                                        check=False)
                self.assertEqual(listed.returncode, DONE, line + listed.stderr)
                self.assertTrue(listed.stdout, line)
        self.assertGreaterEqual(seen, 5)

    def test_beside_ends_what_it_began(self):
        """tools/beside.py with scripts in nvcc's place, and in that of the program that it compiles."""
        holds = self.path / "holds"
        compiler = ('#!/bin/sh\nprintf \'#!/bin/sh\\n%s\\nexec sleep 600\\n\' "$SAYS; echo $$ >>$HELD" >"$2"\n'
                    'chmod +x "$2"\n')
        self.script("nvcc", compiler)

        def beside(*command, says="echo running", nvcc=str(self.bundle / "nvcc"), limit="60"):
            holds.write_text("")
            environment = {"PATH": "/usr/bin:/bin", "SAYS": says, "HELD": str(holds)}
            done = subprocess.run([sys.executable, ROOT / "tools/beside.py", "-n", "2", "--nvcc", nvcc, "--limit",
                                   limit, "--", *command], env=environment, capture_output=True, text=True, check=False)
            left = [pid for pid in holds.read_text().split() if pathlib.Path("/proc", pid).exists()]
            self.assertEqual(left, [])
            return done

        self.assertEqual(beside("sh", "-c", f"test $(wc -l <{holds}) = 2").returncode, 0)
        self.assertEqual(beside("sh", "-c", "exit 3").returncode, 3)
        self.assertEqual(beside("sleep", "600", limit="0.2").returncode, 124)
        self.assertEqual(beside("true", says="echo no device").returncode, CANNOT_RUN)
        without = beside("true", nvcc=str(self.path / "none"))
        self.assertEqual(without.returncode, CANNOT_RUN)
        self.assertIn("no such compiler", without.stderr)

    def test_small_problems_reach_every_kernel(self):
        """What the sanitizers are given: a problem for each kernel that a GPU can have."""
        sys.path.insert(0, str(ROOT / "tools"))
        import gpu_day
        environment = {**os.environ, "LD_LIBRARY_PATH": DRIVER}

        def kernels(*problems):
            listed = subprocess.run([PROGRAM, "check", "--backend", "cuda", "--list", "-k", "fwd_*", *problems],
                                    env=environment, capture_output=True, text=True, check=True).stdout
            return {words[words.index("-k") + 1] for words in map(str.split, listed.splitlines())}

        self.assertEqual(kernels(*gpu_day.SMALL), kernels())
        self.assertGreater(len(kernels()), 100)


if __name__ == "__main__":
    PROGRAM, DRIVER, IMAGES = sys.argv[1:4]
    del sys.argv[1:4]
    unittest.main()
