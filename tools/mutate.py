#!/usr/bin/env python3
"""Would the tests notice? Makes edits, one at a time, in the C code of src/ and in the PTX of kernels, in a copy of the
tree, and runs the tests that such an edit touches: `./run mutate`, docs/internals/mutations.md.

Each verdict is a line of the store (--store), so a run that was stopped goes on where it was. A run judges, in the
order that the seed gives, until so many edits have counted. Edits that do not compile and those of the file of
equivalent edits, which has the reason of each, do not count.

Exit codes: 0 both scores are reached; 1 one is not; 2 usage; 3 the tree does not build or pass as it is; 4 stopped
(--minutes) before all were judged; 130 interrupted."""
import argparse
import collections
import dataclasses
import fcntl
import fnmatch
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import mutations

ROOT = pathlib.Path(__file__).resolve().parent.parent
WANTED = {"host": 90.0, "device": 85.0}  # per cent found
EXIT_REACHED, EXIT_MISSED, EXIT_USAGE, EXIT_BROKEN, EXIT_UNFINISHED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
COUNTED = ("found", "hung", "survived")
TEST_SKIPPED = 77

# ---- which tests an edit touches: all patterns that the file's name matches, their tests in this order ----
QUICK = ["quick_simt", "quick_ladder", "quick_mma", "quick_mma8", "quick_split", "quick_decode", "quick_wgmma",
         "quick_short", "quick_short8", "quick_fp8"]
CPU_LINES = ["check_fwd_simd_f32_d1024_64x64_portable", "check_fwd_simd_f32_d1024_64x128_avx512",
             "check_fwd_simd_f16_d1024_128x64_avx2", "check_fwd_simd_bf16_d1024_64x64_avx512",
             "check_fwd_simd_bf16_d1024_64x64_portable", "check_fwd_simd_f16_d1024_64x64_portable",
             "check_fwd_simd_e4m3_d1024_64x64_portable"]
CPU_ROW_LINES = ["check_fwd_row_f32_d1024_8x64_portable", "check_fwd_row_f16_d1024_8x64_avx2",
                 "check_fwd_row_bf16_d1024_8x64_avx512"]
CPU_GRADIENTS = ["check_bwd_simd_f32_d1024_64x64_portable", "check_bwd_simd_f16_d1024_64x64_avx512",
                 "check_bwd_simd_bf16_d1024_64x64_avx2"]
OPS = ["unit_ops", "op_properties", "unit_caches", "quick_ops", "device_ops"]
API = ["unit_api", "unit_plan", "golden_plans", "fault_memory", "properties"]
HOST_TESTS = [
    ("src/core/problem.*", ["unit_problem", "golden_plans", "unit_api", "unit_cases", "properties", "fuzz_problem"]),
    ("src/core/wisdom.*", ["unit_wisdom", "unit_api", "fault_memory", "fuzz_wisdom"]),
    ("src/core/plan.*", [*API, "unit_estimates", "fault_cuda", "quick_simt", "quick_wgmma"]),
    ("src/core/acromion.c", [*API, "unit_paging", "unit_caches", "unit_no_driver", "unit_dlclose", "fault_cuda"]),
    ("src/core/backend.h", API),
    ("src/core/kernel.h", [*API, "quick_simt", "quick_wgmma"]),
    ("src/core/trace_points.h", ["unit_profile", "profile"]),
    ("src/core/buffers.*", ["unit_api", "unit_backward", "unit_paging", "unit_caches", *API]),
    ("src/core/extent.*", ["unit_api", "unit_backward", "unit_paging", "unit_ops", *API]),
    ("src/core/paging.*", ["unit_paging", "unit_caches", "unit_api", "properties", "golden_plans", "cpu_isolation",
                           CPU_LINES[-3]]),
    ("src/core/backward.*", ["unit_backward", "unit_api", "golden_plans", "properties", "fault_memory", *CPU_GRADIENTS,
                             "quick_bwd"]),
    ("src/core/op*", OPS),
    ("src/core/append.*", OPS),
    ("src/core/merge.*", OPS),
    ("src/core/forward_cache.*", ["unit_api", "fault_memory", "properties", "fault_cuda"]),
    ("src/core/dtype.*", ["unit_oracle", "unit_fwd_simd", "unit_problem", "unit_cases", "unit_api", "properties",
                          *CPU_LINES[-3:]]),
    ("src/core/error.*", ["unit_status", "unit_api", "unit_plan", "fault_memory"]),
    ("src/core/fwd_args.*", ["unit_api", "cpu_isolation", "quick_simt", "quick_wgmma", "device_simt"]),
    ("src/core/visible.*", ["unit_visible", "properties", "golden_plans", "cpu_isolation", *CPU_LINES[:2]]),
    ("src/core/packed_image.h", ["unit_image", "unit_wisdom", "unit_plan", "quick_wgmma"]),
    ("src/core/registry.c", ["unit_plan", "golden_plans", "unit_api"]),
    ("src/core/terms.*", ["unit_problem", "unit_visible", "golden_plans", "unit_api", "unit_cases", "properties"]),
    ("src/cpu/threads.*", ["unit_api", "fault_memory", "properties", CPU_LINES[0]]),
    ("src/cpu/backend.c", ["unit_api", "unit_plan", "fault_memory", "properties", "unit_timed_kernel", CPU_LINES[0]]),
    ("src/cpu/fwd_simd/*", ["unit_fwd_simd", "golden_plans", "cpu_isolation", "unit_api", "properties", *CPU_LINES]),
    ("src/cpu/fwd_row/*", ["unit_fwd_row", "unit_fwd_simd", "golden_plans", "cpu_isolation", *CPU_ROW_LINES]),
    ("src/cpu/entry.h", ["unit_fwd_row", "cpu_isolation", *CPU_ROW_LINES, *CPU_LINES, *CPU_GRADIENTS]),
    ("src/cpu/bwd_simd/*", ["unit_backward", "golden_plans", "unit_gradients", *CPU_GRADIENTS]),
    ("src/cpu/ops/*", OPS),
    ("src/cpu/block.h", ["unit_fwd_simd", "cpu_isolation", *CPU_LINES, *CPU_GRADIENTS]),
    ("src/cpu/simd.h", ["unit_fwd_simd", "cpu_isolation", *CPU_ROW_LINES, *CPU_LINES, *CPU_GRADIENTS]),
    ("src/cuda/ops/*", ["quick_ops", "device_ops", "device_caches", "fault_cuda"]),
    ("src/cuda/device/attention/*", ["quick_simt", "quick_mma", "quick_wgmma", "quick_bwd", "device_wgmma",
                                     "device_bwd"]),
    ("src/dist/*", ["unit_dist", "fault_dist", "example_ring", "symbols_nccl", "device_dist"]),
    ("src/cuda/backend.c", ["fault_cuda", "quick_wgmma", "unit_timed_kernel", "unit_cublas", "profile", "quick_split",
                            "quick_ops", "unit_gates_cuda", "device_caches"]),
    ("src/cuda/driver.c", ["unit_no_driver", "quick_simt", "fault_cuda"]),
    ("src/cuda/image.*", ["unit_image", "fault_cuda", "quick_simt", "quick_wgmma", "device_caches"]),
    ("src/cuda/tensormap.*", ["quick_wgmma", "quick_short", "quick_decode", "quick_fp8", "fault_cuda", "device_wgmma",
                              "device_decode"]),
    ("src/cuda/model/*", ["golden_plans", "unit_estimates", "unit_plan", "cost_model"]),
    ("src/cuda/kernels/*", ["golden_plans", "unit_plan", "unit_estimates", "fault_cuda", "cost_model"]),
    ("src/cuda/kernels/fwd_simt/*", ["quick_simt", "device_simt"]),
    ("src/cuda/kernels/ladder/*", ["quick_ladder", "device_ladder"]),
    ("src/cuda/kernels/fwd_mma/*", ["quick_mma", "device_mma"]),
    ("src/cuda/kernels/fwd_mma8/*", ["quick_mma8", "device_mma8"]),
    ("src/cuda/kernels/fwd_split/*", ["quick_split", "device_split"]),
    ("src/cuda/kernels/fwd_decode/*", ["quick_decode", "device_decode"]),
    ("src/cuda/kernels/fwd_wgmma/*", ["quick_wgmma", "device_wgmma"]),
    ("src/cuda/kernels/fwd_wide/*", ["quick_wide", "device_wide"]),
    ("src/cuda/kernels/fwd_short/*", ["quick_short", "quick_short8", "device_short", "device_short8"]),
    ("src/cuda/kernels/bwd_*", ["quick_bwd", "device_bwd", "device_isolation", "device_isolation_hopper"]),
    ("src/cuda/kernels/fwd_fp8/*", ["quick_fp8", "quick_scales", "device_fp8"]),
]

# A line of each family, with the architecture whose PTX is edited; what device.py asks of it judges.
KERNELS = [("fwd_simt_f16_d256_64x64_sm80", 80), ("fwd_ladder4_f16_d64_64x64_s3_sm80", 80),
           ("fwd_mma_f16_d64_64x64_s2_g2w32_sm80", 80), ("fwd_mma8_e4m3_d64_64x64_s3_r120_sm89", 89),
           ("fwd_split_f16_d64_16x32_s3_g4_sm80", 80), ("fwd_decode_f16_d64_8x64_s4_sm90a", 90),
           ("fwd_wgmma_f16_d64_128x128_s3_sm90a", 90), ("fwd_short_f16_d64_128x64_s6_ring_sm90a", 90),
           ("fwd_short_e4m3_d64_64x128_s4_ring_sm90a", 90), ("fwd_fp8_e4m3_d64_128x128_s2_sm90a", 90),
           ("fwd_wide_f16_d512_64x64_s4_sm90a", 90), ("bwd_mma_f16_d64_128x32_s2_w32_sm80", 80),
           ("bwd_wgmma_f16_d64_128x128_s2_sm90a", 90), ("bwd_short_f16_d64_128x64_s4_sm90a", 90)]


class Broken(Exception):
    """The tree does not build or pass without an edit, or something that the run needs is missing."""


@dataclasses.dataclass
class Place:
    """Where a run works: the tree that is judged, its build (images, CMake's answers), and the run's own folder."""
    root: pathlib.Path
    build: pathlib.Path
    folder: pathlib.Path
    equivalent: pathlib.Path

    @property
    def tree(self):
        return self.folder / "tree"

    @property
    def built(self):
        return self.folder / "build"


# ---- processes ------------------------------------------------------------------------------------------------------

class Processes:
    """Runs commands, each in a session of its own that ends with it; `stop` ends those under way."""

    def __init__(self):
        self.lock, self.running, self.stopped = threading.Lock(), set(), threading.Event()

    def run(self, command, limit_s=None, **options):
        """(exit code, what it printed); a code of None: it was stopped after limit_s."""
        with self.lock:
            if self.stopped.is_set():
                raise KeyboardInterrupt
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                     errors="replace", stdin=subprocess.DEVNULL, start_new_session=True, **options)
            self.running.add(child)
        try:
            try:
                text, _ = child.communicate(timeout=limit_s)
                code = child.returncode
            except subprocess.TimeoutExpired:
                self.end(child)
                text, _ = child.communicate()
                code = None
        finally:
            self.end(child)
            with self.lock:
                self.running.discard(child)
        if self.stopped.is_set():
            raise KeyboardInterrupt
        return code, text

    @staticmethod
    def end(child):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def stop(self):
        self.stopped.set()
        with self.lock:
            for child in self.running:
                self.end(child)


def limit_of(seconds):
    """What a test may take that took so long before, None: that has not run yet; beyond it the edit made it hang."""
    return 600 if seconds is None else 60 + 20 * seconds


# ---- the copy of the tree -------------------------------------------------------------------------------------------

def tracked(root):
    """Files that git tracks or would add; outside of git, all but what a build makes."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                            capture_output=True)
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
    else:
        names = [p.relative_to(root).as_posix() for p in root.rglob("*")]
        names = [name for name in names if not name.startswith(("build", "dist", "."))]
    return [name for name in names if name and (root / name).is_file()]


def copy_tree(root, tree):
    """Makes `tree` equal to the files of `root`. Equal files keep their times, so that little is compiled again; an
    edit that a killed run has left goes."""
    wanted = set(tracked(root))
    for old in tree.rglob("*"):
        if (old.is_file() or old.is_symlink()) and old.relative_to(tree).as_posix() not in wanted:
            old.unlink()
    for name in wanted:
        source, target = root / name, tree / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        shutil.copymode(source, target)


def cmake_answers(build):
    """What the main build was told of the compiler of device code; it makes the images."""
    cache = build / "CMakeCache.txt"
    if not cache.is_file():
        raise Broken(f"{build} has no build: ./run build")
    told = dict(re.findall(r"^(ACR_NVCC|ACR_CUDA_INCLUDE):\w+=(.*)$", cache.read_text(), re.M))
    return [f"-D{name}={value}" for name, value in told.items() if value]


# ---- edits of the host's code ---------------------------------------------------------------------------------------

def tests_of(file, table):
    found = []
    for pattern, tests in table:
        if fnmatch.fnmatchcase(file, pattern):
            found += [test for test in tests if test not in found]
    if not found:
        raise Broken(f"no pattern of HOST_TESTS matches {file}: which tests does an edit of it touch?")
    return found


class HostJudge:
    def __init__(self, place, processes, jobs, table):
        self.place, self.processes, self.jobs, self.table = place, processes, jobs, table
        self.tests, self.seconds = {}, {}  # by name; seconds: of tests that have passed

    def build(self, targets):
        return self.processes.run(["ninja", "-C", str(self.place.built), "-j", str(self.jobs), *targets])

    def configure(self):
        place = self.place
        copy_tree(place.root, place.tree)
        place.built.mkdir(exist_ok=True)
        code, text = self.processes.run(
            ["cmake", "-S", str(place.tree), "-B", str(place.built), "-G", "Ninja", "-DACR_WERROR=OFF",
             f"-DACR_IMAGES={place.build / 'images'}", *cmake_answers(place.build)])
        if code != 0:
            raise Broken(f"cmake failed:\n{text[-2000:]}")
        code, text = self.build([])
        if code != 0:
            raise Broken(f"the tree does not build as it is:\n{text[-2000:]}")
        self.read_tests()

    def targets(self, names):
        return list(dict.fromkeys(target for name in names for target in self.tests[name][3]))

    def read_tests(self):
        done = subprocess.run(["ctest", "--test-dir", str(self.place.built), "--show-only=json-v1"],
                              capture_output=True, text=True, check=True)
        for test in json.loads(done.stdout)["tests"]:
            properties = {p["name"]: p["value"] for p in test.get("properties", [])}
            targets = []
            for word in test["command"]:
                path = pathlib.Path(word)
                if path.is_absolute() and path.is_relative_to(self.place.built):
                    relative = path.relative_to(self.place.built).as_posix()
                    targets.append("fake_driver" if relative.endswith("/fake_driver") else relative)
            self.tests[test["name"]] = (test["command"], dict(
                line.split("=", 1) for line in properties.get("ENVIRONMENT", [])),
                properties.get("WORKING_DIRECTORY", str(self.place.tree)), targets)
        missing = {test for _, tests in self.table for test in tests} - set(self.tests)
        if missing:
            raise Broken("the build has no test " + ", ".join(sorted(missing)))

    def run_test(self, name, limit_s):
        command, environment, folder, _ = self.tests[name]
        return self.processes.run(command, limit_s, cwd=folder, env={**os.environ, **environment})

    def require_as_it_is(self, name):
        """Requires of a test that has failed with an edit, and never passed, that it passes without."""
        if self.build(self.tests[name][3])[0] != 0:
            raise Broken("the tree does not build any more as it is")
        code, text = self.run_test(name, None)
        if code not in (0, TEST_SKIPPED):
            raise Broken(f"{name} fails without any edit:\n{text[-2000:]}")

    def judge(self, edit):
        """(verdict, by which test)."""
        if not self.tests:
            self.configure()
        names = tests_of(edit.file, self.table)
        path = self.place.tree / edit.file
        text = path.read_text()
        failed, code = None, 0
        path.write_text(edit.apply(text))
        try:
            if self.build(self.targets(names))[0] != 0:
                return "does not compile", None
            for name in names:
                began = time.monotonic()
                code, _ = self.run_test(name, limit_of(self.seconds.get(name)))
                if code not in (0, TEST_SKIPPED):
                    failed = name
                    break
                self.seconds.setdefault(name, time.monotonic() - began)
        finally:
            path.write_text(text)
        if not failed:
            return "survived", None
        if failed not in self.seconds:
            began = time.monotonic()
            self.require_as_it_is(failed)
            self.seconds[failed] = time.monotonic() - began
        return "hung" if code is None else "found", failed


# ---- edits of the device's code -------------------------------------------------------------------------------------

def load_module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFUSED = "an image cannot be executed"  # the PTX machine does not load it, as ptxas would not assemble it


class DeviceJudge:
    """Runs what tests/device/device.py asks of a kernel, with the kernel's PTX edited."""

    def __init__(self, place, processes, kernels):
        self.place, self.processes = place, processes
        self.device = load_module(place.root / "tests/device/device.py", "device")
        self.images = place.build / "images"
        self.program = place.build / "workbench/acromion"
        self.isolation = place.build / "tests/isolation"
        self.driver = place.build / "ptxvm/fake_driver"
        self.limits, self.lock = {}, threading.Lock()  # by kernel and number of its command
        self.kernels = kernels
        for path in (self.program, self.isolation, self.driver):
            if not path.exists():
                raise Broken(f"{path} is not built: ./run build")

    def source(self, kernel):
        return self.device.ptx_of(self.images, kernel, dict(self.kernels)[kernel])

    def execute(self, folder, words, chosen, limit_s):
        environment = {**os.environ, **chosen, "FAKE_CUDA_EXECUTE": str(folder)}
        return self.processes.run(words, limit_s, cwd=self.place.root, env=environment)

    def asked(self, kernel, arch):
        """Commands: isolation.c, which is quick and strict, then each group that has the kernel on this architecture,
        in its orders."""
        d = self.device
        for of, sms, kernels, dtypes, *listed in d.ISOLATED:
            if of == arch and fnmatch.fnmatchcase(kernel, kernels):
                edges = listed[0] if listed else d.EDGES
                chosen = d.environment(str(self.driver), "", arch, sms, d.LATE_WITHOUT_RACES)
                problems = [f"{dtype}:{edge}" for dtype in dtypes for edge in edges]
                yield [self.isolation, "cuda", kernel, *problems], chosen
        for entry in (entry for group in d.GROUPS.values() for entry in group):
            of, sms, kernels, orders, problems, *inputs = entry
            if of == arch and fnmatch.fnmatchcase(kernel, kernels):
                for order in orders:
                    yield ([self.program, "check", "--backend", "cuda", "--threads", "1", "-k", kernel, "--inputs",
                            *(inputs or ["normal"]), *problems], d.environment(str(self.driver), "", arch, sms, order))

    def limit(self, kernel, number, words, chosen):
        """What a command may take, after it has passed without an edit; 0: it has nothing for this kernel."""
        with self.lock:
            if (kernel, number) not in self.limits:
                began = time.monotonic()
                code, text = self.execute(self.images, words, chosen, None)
                if code == 0:
                    self.limits[kernel, number] = limit_of(time.monotonic() - began)
                elif "nothing was checked" in text or re.search(r"^0 cases passed, 0 failed", text, re.M):
                    self.limits[kernel, number] = 0
                else:
                    raise Broken(f"{kernel} fails without any edit: {' '.join(words)}\n{text[-2000:]}")
            return self.limits[kernel, number]

    def judge(self, edit):
        kernel = edit.file
        source = self.source(kernel)
        folder = self.place.folder / "images" / edit.key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        judged = 0
        try:
            (folder / f"{kernel}.bin").symlink_to(self.images / f"{kernel}.bin")
            (folder / source.name).write_text(edit.apply(source.read_text()))
            for number, (words, chosen) in enumerate(self.asked(kernel, dict(self.kernels)[kernel])):
                words = [str(word) for word in words]
                limit_s = self.limit(kernel, number, words, chosen)
                if not limit_s:
                    continue
                judged += 1
                code, text = self.execute(folder, words, chosen, limit_s)
                if code is None:
                    return "hung", pathlib.Path(words[0]).name
                if code != 0:
                    return ("does not compile", None) if REFUSED in text else ("found", pathlib.Path(words[0]).name)
            if not judged:
                raise Broken(f"no case of tests/device/device.py runs {kernel}")
            return "survived", None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# ---- the store ------------------------------------------------------------------------------------------------------

class Store:
    """JSON lines, one a verdict, appended; the last line of a key counts, half a line of a killed run does not."""

    def __init__(self, path):
        self.path, self.lock, self.verdicts = path, threading.Lock(), {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                record = json.loads(line)
                self.verdicts[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                continue
        self.gap = "" if text.endswith("\n") or not text else "\n"

    def add(self, edit, verdict, by, seconds):
        record = {name: getattr(edit, name) for name in ("key", "kind", "file", "line", "operator", "before", "after")}
        record.update(verdict=verdict, by=by, seconds=round(seconds, 1))
        with self.lock:
            with self.path.open("a") as file:
                file.write(self.gap + json.dumps(record) + "\n")
            self.gap = ""
            self.verdicts[edit.key] = record


def read_equivalent(path):
    """key -> record with a reason."""
    known = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        record = json.loads(line)
        if not record.get("key") or not record.get("reason"):
            raise Broken(f"{path}:{number}: an equivalent edit needs its key and a reason")
        known[record["key"]] = record
    return known


# ---- a run ----------------------------------------------------------------------------------------------------------

class Campaign:
    """The edits of one kind, in their order, until `wanted` of them have counted."""

    def __init__(self, kind, edits, wanted, store, equivalent, again):
        self.kind, self.edits, self.wanted, self.store = kind, edits, wanted, store
        self.equivalent, self.again = equivalent, again
        self.lock, self.open, self.judged_now = threading.Lock(), set(), set()

    def verdict(self, edit):
        record = self.store.verdicts.get(edit.key)
        if not record or self.again and record["verdict"] == "survived" and edit.key not in self.judged_now:
            return None
        return record["verdict"]

    def next(self):
        """An edit that nobody judges yet; None when there is none."""
        with self.lock:
            counted = 0
            for edit in self.edits:
                if counted + len(self.open) >= self.wanted:
                    return None
                if edit.key in self.equivalent or edit.key in self.open:
                    continue
                verdict = self.verdict(edit)
                if verdict is None:
                    self.open.add(edit.key)
                    return edit
                counted += verdict in COUNTED
            return None

    def close(self, edit):
        with self.lock:
            self.judged_now.add(edit.key)
            self.open.discard(edit.key)

    def tally(self):
        counted, uncounted, known = [], 0, 0
        for edit in self.edits:
            if len(counted) >= self.wanted:
                break
            if edit.key in self.equivalent:
                known += 1
                continue
            record = self.store.verdicts.get(edit.key)
            if record:
                if record["verdict"] in COUNTED:
                    counted.append((edit, record))
                else:
                    uncounted += 1
        found = sum(record["verdict"] != "survived" for _, record in counted)
        return {"kind": self.kind, "wanted": self.wanted, "judged": len(counted), "found": found,
                "score": round(100 * found / len(counted), 1) if counted else None, "score_wanted": WANTED[self.kind],
                "hung": sum(record["verdict"] == "hung" for _, record in counted),
                "does_not_compile": uncounted, "equivalent": known,
                "by_operator": by_operator(counted),
                "survivors": [record for _, record in counted if record["verdict"] == "survived"]}


def by_operator(counted):
    tally = collections.defaultdict(lambda: [0, 0])
    for edit, record in counted:
        tally[edit.operator][0] += record["verdict"] != "survived"
        tally[edit.operator][1] += 1
    return {name: tally[name] for name in sorted(tally)}


class Progress:
    """One line on a terminal, kept up to date; nothing in a pipe."""

    def __init__(self):
        self.shown, self.lock, self.began = sys.stderr.isatty(), threading.Lock(), time.monotonic()

    def say(self, text):
        if self.shown:
            with self.lock:
                columns = shutil.get_terminal_size().columns
                print(f"\r\033[K{text[:columns - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def judged(self, campaigns, edit, verdict):
        tallies = [campaign.tally() for campaign in campaigns]
        done = ", ".join(f"{t['kind']} {t['found']} of {t['judged']} (of {t['wanted']})" for t in tallies)
        minutes = (time.monotonic() - self.began) / 60
        self.say(f"{minutes:.0f} min: found {done}; last: {edit.file}:{edit.line} {verdict}")


def judge_campaign(campaign, judge, store, until, processes, after):
    while time.monotonic() < until and not processes.stopped.is_set():
        edit = campaign.next()
        if not edit:
            return
        began = time.monotonic()
        try:
            verdict, by = judge.judge(edit)
            store.add(edit, verdict, by, time.monotonic() - began)
        finally:
            campaign.close(edit)
        after(edit, verdict)


def judge_all(campaigns, judges, store, options, processes, progress):
    """Host edits one after the other, since they share a build, those of the device beside them; with one job all in
    turn. Whether it was interrupted."""
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    failures = []

    def judge(names):
        try:
            for name in names:
                judge_campaign(campaigns[name], judges[name], store, until, processes,
                               lambda edit, verdict: progress.judged(campaigns.values(), edit, verdict))
        except KeyboardInterrupt:
            pass  # told to those that wait
        except Exception as error:
            failures.append(error)
            processes.stop()

    shares = [["host", "device"]] if options.jobs == 1 else [["host"], *[["device"]] * (options.jobs - 1)]
    threads = [threading.Thread(target=judge, args=([n for n in names if n in campaigns],)) for names in shares]
    for thread in threads:
        thread.start()
    interrupted = False
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                thread.join(0.2)
        except KeyboardInterrupt:
            interrupted = True
            processes.stop()
    progress.clear()
    if failures:
        raise failures[0]
    return interrupted


def print_report(tallies, tree, seed, out=sys.stdout):
    print(f"mutations of {tree}, seed {seed}", file=out)
    for t in tallies:
        score = "nothing judged" if t["score"] is None else f"{t['score']:.1f} %"
        print(f"{t['kind']:7} {t['found']} of {t['judged']} found, {score} (wanted {t['score_wanted']:.0f} %, "
              f"{t['wanted']} edits); {t['hung']} of them hung, {t['does_not_compile']} did not compile, "
              f"{t['equivalent']} equivalent", file=out)
        for name, (found, judged) in t["by_operator"].items():
            print(f"        {name:24} {found} of {judged}", file=out)
    for t in tallies:
        for s in t["survivors"]:
            print(f"\nsurvived {s['key']}  {s['file']}:{s['line']}, {s['operator']}\n  - {s['before']}\n"
                  f"  + {s['after']}", file=out)


def describe_tree(root):
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return said.stdout.strip() or "a tree without git"


def parse(argv, place):
    parser = argparse.ArgumentParser(prog="./run mutate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=int, default=70, metavar="N", help="edits in C that must count (default 70)")
    parser.add_argument("--device", type=int, default=60, metavar="N", help="edits in PTX that must count (60)")
    parser.add_argument("--seed", type=int, default=1, help="which edits are drawn (1)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processors to use (2)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="only edits of files or kernels of that name, say 'src/core/*' or 'fwd_mma_*'; repeatable")
    parser.add_argument("--again", action="store_true", help="judge again what survived")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no further edit after so long")
    parser.add_argument("--store", type=pathlib.Path, default=place.folder / "verdicts.jsonl",
                        help="verdicts, JSON lines (build/mutate/verdicts.jsonl)")
    parser.add_argument("--list", action="store_true", help="show the edits that would be judged; judge none")
    parser.add_argument("--report", action="store_true", help="report what the store holds; judge none")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(argv)
    if options.host < 0 or options.device < 0 or options.host + options.device == 0 or options.jobs < 1:
        parser.error("--host and --device must not both be 0 nor one be negative, and --jobs is at least 1")
    return options


def make_campaigns(options, place, device_judge, store):
    equivalent = read_equivalent(place.equivalent)
    campaigns = {}
    if options.host:
        edits = [edit for name in sorted(tracked(place.root))
                 if re.match(r"src/.*\.(?:c|h|cu)$", name) and mutations.matching(name, options.only)
                 for edit in mutations.host_edits(name, (place.root / name).read_text())]
        campaigns["host"] = Campaign("host", mutations.drawn(edits, options.seed, lambda e: e.operator), options.host,
                                     store, equivalent, options.again)
    if options.device:
        edits = [edit for kernel, _ in device_judge.kernels if mutations.matching(kernel, options.only)
                 for edit in mutations.device_edits(kernel, device_judge.source(kernel).read_text())]
        campaigns["device"] = Campaign("device", mutations.drawn(edits, options.seed, lambda e: (e.file, e.operator)),
                                       options.device, store, equivalent, options.again)
    return campaigns


def run(options, place, table, kernels):
    processes, progress, store = Processes(), Progress(), Store(options.store)
    judges = {"host": HostJudge(place, processes, options.jobs, table),
              "device": DeviceJudge(place, processes, kernels) if options.device else None}
    campaigns = make_campaigns(options, place, judges["device"], store)
    if options.list:
        for edit in (edit for c in campaigns.values() for edit in c.edits[:c.wanted]):
            print(f"{edit.key}  {edit.file}:{edit.line}, {edit.operator}\n  - {edit.before}\n  + {edit.after}")
        return EXIT_REACHED
    interrupted = not options.report and judge_all(campaigns, judges, store, options, processes, progress)
    tallies = [campaign.tally() for campaign in campaigns.values()]
    if options.json:
        print(json.dumps({"tree": describe_tree(place.root), "seed": options.seed, "scores": tallies}, indent=1))
    else:
        print_report(tallies, describe_tree(place.root), options.seed)
    if interrupted:
        return EXIT_INTERRUPTED
    if any(campaign.next() for campaign in campaigns.values()):
        return EXIT_UNFINISHED
    reached = all(t["judged"] > 0 and t["score"] >= t["score_wanted"] for t in tallies)
    return EXIT_REACHED if reached else EXIT_MISSED


def main(argv, place=None, table=None, kernels=None):
    place = place or Place(ROOT, ROOT / "build", ROOT / "build/mutate", ROOT / "tools/mutate_equivalent.jsonl")
    options = parse(argv, place)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for folder in (place.folder, options.store.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with (place.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return run(options, place, table or HOST_TESTS, kernels or KERNELS)
        except BlockingIOError:
            print(f"run: mutate: another run works in {place.folder}", file=sys.stderr)
        except Broken as error:
            print(f"run: mutate: {error}", file=sys.stderr)
    return EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
