#!/usr/bin/env python3
"""tools/mutate.py, on a project of one file: a planted edit is found, what no test sees survives, what does not compile
or has a reason is not counted, a killed run goes on where it was. With PROGRAM's build also a kernel's PTX.

    mutate.py [BUILD]                the test
    mutate.py --run FOLDER ARGS...   tools/mutate.py over the project in FOLDER, for the test"""
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutate  # noqa: E402
import mutations  # noqa: E402

SOURCE = """\
struct pair {
    int a, b;
};

static int first(struct pair p, int n)
{
    return p.a - n;
}

int seen(int x)
{
    struct pair both = {x, x};
    /* x < 1 in a comment, "x < 2" in a string: */
    return x < 10 && first(both, x) == 0;
}

int unseen(int x)
{
    return x + 3;
}
"""
TEST = """\
int seen(int x);
int main(void)
{
    return !(seen(9) && !seen(10) && seen(-5));
}
"""
PROJECT = """\
cmake_minimum_required(VERSION 3.22)
project(tiny LANGUAGES C)
enable_testing()
add_executable(unit_tiny test.c src/core/tiny.c)
add_test(NAME unit_tiny COMMAND unit_tiny)
"""
TABLE = [("src/core/*", ["unit_tiny"])]
ALL = 1000  # more edits than there are


def place_of(folder):
    return mutate.Place(folder / "root", folder / "root/build", folder / "work", folder / "equivalent.jsonl")


def make_project(folder):
    root = folder / "root"
    (root / "src/core").mkdir(parents=True)
    (root / "build").mkdir()
    (root / "src/core/tiny.c").write_text(SOURCE)
    (root / "test.c").write_text(TEST)
    (root / "CMakeLists.txt").write_text(PROJECT)
    (root / "build/CMakeCache.txt").write_text("")
    return folder


def command(folder, *arguments):
    return [sys.executable, __file__, "--run", str(folder), "--host", str(ALL), "--device", "0", "--jobs", "1",
            *arguments]


def run(folder, *arguments):
    return subprocess.run(command(folder, *arguments), capture_output=True, text=True)


def records(folder):
    path = folder / "work/verdicts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Host(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = make_project(pathlib.Path(self.temporary.name))

    def tearDown(self):
        self.temporary.cleanup()

    def test_a_whole_run(self):
        done = run(self.folder, "--json")
        self.assertEqual(done.stderr, "")
        self.assertEqual(done.returncode, mutate.EXIT_MISSED, done.stdout)
        score, = json.loads(done.stdout)["scores"]
        verdicts = {(r["after"], r["verdict"]) for r in records(self.folder)}
        self.assertIn(("return x <= 10 && first(both, x) == 0;", "found"), verdicts)
        self.assertIn(("return x < 10 && first(x, both) == 0;", "does not compile"), verdicts)
        survivors = {r["after"]: r["key"] for r in score["survivors"]}
        self.assertEqual(set(survivors), {"return x - 3;", "return x + 4;", "return p.a + n;"} & set(survivors))
        self.assertLessEqual({"return x - 3;", "return x + 4;"}, set(survivors))
        self.assertEqual(score["judged"] + score["does_not_compile"], len(records(self.folder)))
        self.assertGreater(score["does_not_compile"], 0)
        self.assertFalse([r for r in records(self.folder) if "comment" in r["before"]])
        # With reasons the score is reached, from the store alone.
        reasons = [json.dumps({"key": key, "reason": "for the test"}) for key in survivors.values()]
        (self.folder / "equivalent.jsonl").write_text("\n".join(reasons) + "\n")
        judged = len(records(self.folder))
        again = run(self.folder)
        self.assertEqual(again.returncode, mutate.EXIT_REACHED, again.stdout + again.stderr)
        self.assertIn(f"{len(survivors)} equivalent", again.stdout)
        self.assertEqual(len(records(self.folder)), judged)
        self.assertEqual((self.folder / "root/src/core/tiny.c").read_text(), SOURCE)
        # Another seed draws in another order, the same one in the same.
        lists = [run(self.folder, "--list", "--seed", seed).stdout for seed in ("1", "1", "2")]
        self.assertEqual(lists[0], lists[1])
        self.assertNotEqual(lists[0], lists[2])

    def test_a_killed_run_goes_on(self):
        child = subprocess.Popen(command(self.folder), stdout=subprocess.DEVNULL)
        while len(records(self.folder)) < 2 and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        before = records(self.folder)
        with (self.folder / "work/verdicts.jsonl").open("a") as store:
            store.write('{"key": "half a li')  # as a kill in the middle of writing leaves it
        self.assertEqual(run(self.folder).returncode, mutate.EXIT_MISSED)
        text = (self.folder / "work/verdicts.jsonl").read_text()
        keys = [json.loads(line)["key"] for line in text.splitlines() if "half a li" not in line]
        self.assertEqual(keys[:len(before)], [r["key"] for r in before])
        self.assertEqual(len(keys), len(set(keys)), "an edit was judged twice")
        self.assertEqual((self.folder / "work/tree/src/core/tiny.c").read_text(), SOURCE)

    def test_it_stops_at_a_tree_that_fails_as_it_is(self):
        (self.folder / "root/test.c").write_text("int main(void) { return 1; }\n")
        done = run(self.folder)
        self.assertEqual(done.returncode, mutate.EXIT_BROKEN)
        self.assertIn("fails without any edit", done.stderr)


class Edits(unittest.TestCase):
    def test_of_a_kernels_file_only_the_hosts_part(self):
        text = ("#ifdef __CUDACC__\n#if A > 1\nint device = 1;\n#else\nint other = 2;\n#endif\n"
                "#else\nint host = 3;\n#endif\n")
        self.assertEqual([e.before for e in mutations.host_edits("k.cu", text)], ["int host = 3;"])

    def test_keys_hang_on_the_code_around(self):
        key = {e.key for e in mutations.host_edits("a.c", SOURCE)}
        moved = {e.key for e in mutations.host_edits("a.c", "\n\n" * 9 + SOURCE)}
        self.assertGreater(len(key & moved), len(key) / 2)
        self.assertFalse(key & {e.key for e in mutations.host_edits("b.c", SOURCE)})

    def test_no_edit_of_code_that_is_never_reached(self):
        text = (".entry k(\n\tadd.s32 \t%r1, %r2, 1;\n\tmov.pred \t%p1, -1;\n\t@%p1 bra \t$L1;\n\n"
                "\tadd.s32 \t%r3, %r1, 5;\n$L1:\n\tadd.s32 \t%r4, %r1, 7;\n")
        edited = {e.before.split()[-1] for e in mutations.device_edits("k", text) if e.operator == "constant"}
        self.assertNotIn("5;", edited)
        self.assertIn("7;", edited)

    def test_constants_that_float32_cannot_hold_made_larger(self):
        text = ".entry k(\n" + "".join(f"\tmov.f32 \t%f1, 0f{bits};\n" for bits in ("7F7FFFFF", "FF7FFFFF", "7F800000"))
        self.assertEqual({e.replacement for e in mutations.device_edits("k", text)}, {"0f00000000"})

    def test_every_family_of_the_device_has_its_turn(self):
        for folder in (ROOT / "src/cuda/kernels").iterdir():
            self.assertTrue(any(folder.name in kernel for kernel, _ in mutate.KERNELS), folder)

    def test_every_file_of_the_table_is_there(self):
        files = mutate.tracked(ROOT)
        for pattern, _ in mutate.HOST_TESTS:
            self.assertTrue(any(mutations.matching(name, [pattern]) for name in files), pattern)
        for name in files:
            if re.match(r"src/.*\.(?:c|h|cu)$", name) and mutations.host_edits(name, (ROOT / name).read_text()):
                self.assertTrue(mutate.tests_of(name, mutate.HOST_TESTS), name)
        self.assertRaises(mutate.Broken, mutate.tests_of, "src/core/other", mutate.HOST_TESTS)

    def test_the_file_of_equivalent_edits(self):
        mutate.read_equivalent(ROOT / "tools/mutate_equivalent.jsonl")


class Device(unittest.TestCase):
    build = None

    def test_a_kernels_ptx(self):
        if not self.build:
            self.skipTest("this build has no device code")
        kernel, arch = "fwd_ladder4_f16_d64_64x64_s3_sm80", 80
        with tempfile.TemporaryDirectory() as folder:
            place = mutate.Place(ROOT, self.build, pathlib.Path(folder), pathlib.Path(folder) / "none")
            judge = mutate.DeviceJudge(place, mutate.Processes(), [(kernel, arch)])
            text = judge.source(kernel).read_text()
            edits = mutations.device_edits(kernel, text)
            barrier = next(e for e in edits if e.operator == "dropped barrier" and "bar.sync" in e.before)
            self.assertEqual(judge.judge(barrier)[0], "found")
            end = text.index(";", text.index("bar.sync"))
            nonsense = mutations.make_edit("device", kernel, mutations.Lines(text), "planted", end, end,
                                           ";\n\tno.such.instruction %r1")
            self.assertEqual(judge.judge(nonsense), ("does not compile", None))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(mutate.main(sys.argv[3:], place_of(pathlib.Path(sys.argv[2])), TABLE, []))
    if len(sys.argv) > 1:
        Device.build = pathlib.Path(sys.argv.pop()).resolve()
    unittest.main()
