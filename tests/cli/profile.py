#!/usr/bin/env python3
"""`acromion profile` without a GPU: Nsight Compute is played by a script and the driver by ptxvm/driver. What
the tool says becomes a record, or a status with its exit code and no number.

    profile.py PROGRAM FAKE_DRIVER_FOLDER [unittest arguments]"""
import csv
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
sys.dont_write_bytecode = True
import results  # noqa: E402: from tools/

PROGRAM = DRIVER = ""
DONE, FAILED, USAGE, BAD_INPUT, CANNOT_RUN = range(5)
A, B = "fwd_wgmma_f16_d64_128x128_s3_sm90a", "fwd_mma_f16_d64_64x64_s2_g2w32_sm80"

# The script: notes its arguments, then does what FAKE says. {} is a Python literal: what to print for each kernel.
SCRIPT = """#!{python}
import os, subprocess, sys, time
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(repr(arguments) + "\\n")
{body}
"""


def field(arguments, name):
    return arguments[arguments.index(name) + 1]


def table(kernel, values, units=None, grouped=False):
    """What `ncu --csv --page raw` prints: headings, units, values."""
    head = {"ID": "0", "Process ID": "77", "Process Name": "acromion", "Host Name": "127.0.0.1",
            "Kernel Name": kernel, "Context": "1", "Stream": "7", "Block Size": "(384, 1, 1)",
            "Grid Size": "(128, 1, 1)", "Device": "0", "CC": "9.0"}
    shown = {k: f"{v:,}" if grouped and isinstance(v, (int, float)) else str(v) for k, v in values.items()}
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow([*head, *shown])
    writer.writerow([""] * len(head) + [(units or {}).get(name, "") for name in shown])
    writer.writerow([*head.values(), *shown.values()])
    return "==PROF== Connected to process 77 (acromion)\n==PROF== Profiling \"" + kernel + "\"\n" + out.getvalue()


BASE = {
    "gpu__time_duration.sum": 7904, "sm__cycles_elapsed.avg.per_second": 1980000000,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": 25.5,
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": 31.25,
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "n/a", "lts__t_bytes.sum": 17825792,
    "dram__bytes_read.sum": 4194304, "launch__registers_per_thread": 168,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 1000, "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 300,
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.48,
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": 0.5,
}
UNITS = {"gpu__time_duration.sum": "ns", "sm__cycles_elapsed.avg.per_second": "cycle/second",
         "lts__t_bytes.sum": "byte", "dram__bytes_read.sum": "byte", "launch__registers_per_thread": "register/thread"}
PRINT = "print({text!r}.replace('KERNEL', arguments[arguments.index('--kernel-name') + 1]))"
PERMISSION = ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
              "Counters on the target device 0. For instructions on enabling permissions see the web page.\n")


class Profile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.log = self.path / "log"

    def play(self, body, name="ncu"):
        script = self.path / name
        script.write_text(SCRIPT.format(python=sys.executable, log=str(self.log), body=body))
        script.chmod(0o755)

    def play_text(self, text):
        self.play(PRINT.format(text=text))

    def profile(self, *arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "ACR_NVCC")}
        clean |= {"PATH": str(self.path), "LD_LIBRARY_PATH": DRIVER} | environment
        return subprocess.run([PROGRAM, "profile", *map(str, arguments)], env=clean, capture_output=True, text=True)

    def records(self, *arguments, **environment):
        done = self.profile(*arguments, "--json", **environment)
        self.assertEqual(done.returncode, DONE, done.stderr)
        return json.loads(done.stdout)

    def check_refused(self, code, status, *arguments, **environment):
        """The status by name, its exit code, and nowhere a number."""
        done = self.profile(*arguments, "--json", **environment)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        self.assertIn(status, done.stderr)
        for record in json.loads(done.stdout):
            self.assertEqual(record["status"], status)
            self.assertEqual(set(record), {"problem", "kernel", "status", "detail"})
        return done

    def calls(self):
        return [eval(line) for line in self.log.read_text().splitlines()]  # lists that our script wrote

    # ---- what works ----

    def test_a_record(self):
        self.play_text(table("KERNEL", BASE, UNITS))
        output = self.path / "profile.json"
        record = self.records("-k", A, "b2:h8:s512:d64", "-o", output)[0]
        self.assertEqual(json.loads(output.read_text()), [record])
        self.assertEqual(results.profile_faults_of(record), [])
        self.assertEqual((record["kernel"], record["problem"]), (A, "b2:h8:s512:d64"))
        self.assertEqual(record["tool"], "Nsight Compute 2025.3.1.0")
        counters = record["counters"]
        self.assertAlmostEqual(counters["duration_us"], 7.904)
        self.assertEqual(counters["sm_clock_mhz"], 1980)
        self.assertEqual(counters["tensor_pct"], 25.5)
        self.assertEqual(counters["registers"], 168)
        self.assertEqual(counters["l2_bytes"], 17825792)
        self.assertIsNone(counters["l2_pct"])  # n/a
        self.assertIsNone(counters["dram_pct"])  # not in the table
        self.assertEqual(record["stalls"]["wait"], 1.48)
        self.assertEqual(record["bound"], "latency")
        self.assertAlmostEqual(record["floor_share"], record["floor_us"] / 7.904, places=6)
        for words in ("special function units", "fixed latency", "30 %", f"{100 * record['floor_share']:.0f} %"):
            self.assertIn(words, record["diagnosis"])

    def test_a_recorded_table(self):
        """What Nsight Compute 2025.3 printed on an H200, all of its 290 columns."""
        self.play_text((ROOT / "tests/data/ncu-2025.3-h200.csv").read_text())
        record = self.records("-k", A)[0]
        self.assertEqual(results.profile_faults_of(record), [])
        self.assertEqual(record["bound"], "latency")
        self.assertNotIn(None, [*record["counters"].values(), *record["stalls"].values()])
        counters = record["counters"]
        self.assertEqual((counters["registers"], counters["ctas"], counters["threads"]), (168, 64, 384))
        self.assertAlmostEqual(counters["duration_us"], 9.216, places=3)
        for words in ("64 CTAs for 132 SMs", "1758 MHz of 1980", "14 % of the time (tensor cores)"):
            self.assertIn(words, record["diagnosis"])

    def test_the_call(self):
        self.play_text(table("KERNEL", BASE, UNITS))
        self.records("-k", A, "b2:h8:s512:d64:causal")
        call, = self.calls()
        self.assertEqual(field(call, "--clock-control"), "none")
        self.assertEqual(field(call, "--cache-control"), "none")
        self.assertEqual(field(call, "--launch-count"), "1")
        self.assertEqual(field(call, "--kernel-name"), A)
        self.assertEqual(len(set(field(call, "--metrics").split(","))), 42)
        program = call.index(PROGRAM)
        self.assertEqual(call[program + 1:program + 3], ["profile", "--launch"])
        self.assertEqual(call[-1], "b2:h8:s512:d64:causal")

    def test_other_units_and_grouping(self):
        values = BASE | {"gpu__time_duration.sum": 1.2345, "lts__t_bytes.sum": 17.5,
                         "sm__cycles_elapsed.avg.per_second": 1.98, "dram__bytes_read.sum": 4194304}
        units = UNITS | {"gpu__time_duration.sum": "ms", "lts__t_bytes.sum": "Mbyte",
                         "sm__cycles_elapsed.avg.per_second": "cycle/nsecond"}
        self.play_text(table("void KERNEL(fwd_args, fwd_maps)", values, units, grouped=True))
        counters = self.records("-k", A)[0]["counters"]
        self.assertAlmostEqual(counters["duration_us"], 1234.5)
        self.assertEqual(counters["l2_bytes"], 17.5e6)
        self.assertEqual(counters["dram_read_bytes"], 4194304)
        self.assertAlmostEqual(counters["sm_clock_mhz"], 1980)

    def test_a_line_a_metric(self):
        lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
        lines += [f'"0","KERNEL","{name}","{UNITS.get(name, "")}","{value}"' for name, value in BASE.items()]
        self.play_text("==PROF== Connected\n" + "\n".join(lines) + "\n")
        counters = self.records("-k", A)[0]["counters"]
        self.assertEqual((counters["duration_us"], counters["registers"]), (7.904, 168))

    def test_the_planners_kernel_without_k(self):
        self.play_text(table("KERNEL", BASE, UNITS))
        self.assertTrue(self.records("b4:h16:s2048:d64")[0]["kernel"].startswith("fwd_"))

    def test_two_side_by_side(self):
        self.play(f"time = 8000 if {A!r} in arguments else 16000\n"
                  f"print({table('KERNEL', BASE | {'gpu__time_duration.sum': 'TIME'}, UNITS)!r}"
                  ".replace('KERNEL', arguments[arguments.index('--kernel-name') + 1]).replace('TIME', str(time)))")
        done = self.profile("-k", A, "-k", B, "b2:h8:s512:d64")
        self.assertEqual(done.returncode, DONE, done.stderr)
        self.assertRegex(done.stdout, r"duration_us +us +8\.00 +16\.00 +x2\.00")
        self.assertIn("A = " + A, done.stdout)
        self.assertIn("B = " + B, done.stdout)

    def test_a_busy_unit_binds(self):
        name = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
        self.play_text(table("KERNEL", BASE | {name: 81}, UNITS))
        record = self.records("-k", A)[0]
        self.assertEqual((record["bound"], record["busiest_pct"]), ("tensor cores", 81))

    def test_a_metric_that_the_tool_does_not_know(self):
        gone = "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"
        text = table("KERNEL", {k: v for k, v in BASE.items() if k != gone}, UNITS)
        self.play(f"if {gone!r} in arguments[arguments.index('--metrics') + 1]:\n"
                  f"    sys.exit('==ERROR== Failed to find metric {gone}')\n" + PRINT.format(text=text))
        record = self.records("-k", A)[0]
        self.assertEqual(len(self.calls()), 2)
        self.assertIsNone(record["stalls"]["gmma"])
        self.assertEqual(record["stalls"]["wait"], 1.48)

    # ---- what does not ----

    def test_no_permission(self):
        self.play(f"print({PERMISSION!r}); sys.exit(1)")
        done = self.check_refused(CANNOT_RUN, "NO_PERMISSION", "-k", A)
        self.assertIn("RestrictProfilingToAdminUsers", done.stderr)

    def test_no_permission_and_code_0(self):
        self.play(f"print({PERMISSION!r}, file=sys.stderr)")
        self.check_refused(CANNOT_RUN, "NO_PERMISSION", "-k", A)

    def test_a_driver_that_does_not_fit(self):
        self.play("sys.exit('==ERROR== Failed to initialize the profiler: LibraryNotLoaded')")
        self.check_refused(CANNOT_RUN, "DRIVER", "-k", A)
        self.play("print('==ERROR== Cuda driver is not compatible with Nsight Compute'); sys.exit(1)")
        self.check_refused(CANNOT_RUN, "DRIVER", "-k", A)

    def test_no_tool(self):
        if os.path.exists("/usr/local/cuda/bin/ncu") or os.path.exists("/opt/nvidia/nsight-compute"):
            self.skipTest("Nsight Compute is installed here")
        self.check_refused(CANNOT_RUN, "NO_TOOL", "-k", A)

    def test_garbage_and_nothing(self):
        for body in ("print('\\x00\\xff' * 1000)", "pass", "print('\"ID\",\"Kernel Name\"\\n' * 3)",
                     "print('ID,Kernel Name,gpu__time_duration.sum\\n0')", "sys.exit(3)",
                     PRINT.format(text=table("KERNEL", BASE | {"gpu__time_duration.sum": "n/a"}))):
            with self.subTest(body=body):
                self.play(body)
                status = "NO_KERNEL" if "ID" in body and "n/a" not in body else "BAD_OUTPUT"
                self.check_refused(FAILED, status, "-k", A)

    def test_another_kernel(self):
        self.play_text(table("KERNEL_2", BASE, UNITS))
        self.check_refused(FAILED, "NO_KERNEL", "-k", A)
        self.play("print('==WARNING== No kernels were profiled.')")
        self.check_refused(FAILED, "NO_KERNEL", "-k", A)

    def test_a_hang(self):
        self.play("subprocess.Popen(['/bin/sleep', '3000'])\ntime.sleep(3000)")  # a child of it holds the pipe as well
        started = time.monotonic()
        self.check_refused(FAILED, "TIMEOUT", "-k", A, "--timeout", "1s")
        self.assertLess(time.monotonic() - started, 1500)

    def test_a_launch_that_fails(self):
        """The fake driver launches nothing, so the output stays unwritten: the profiled process says so."""
        self.play("done = subprocess.run(arguments[arguments.index(%r):])\n" % PROGRAM +
                  "if done.returncode: print('==ERROR== The application returned an error code (1).')")
        done = self.check_refused(FAILED, "LAUNCH_FAILED", "-k", A, "b1:h1:s64:d64")
        self.assertIn("is wrong", done.stderr)

    def test_the_cpu_has_no_counters(self):
        self.assertEqual(self.profile("--backend", "cpu").returncode, CANNOT_RUN)

    def test_a_kernel_that_cannot_run_the_problem(self):
        self.assertEqual(self.profile("-k", A, "b1:h1:s64:d256").returncode, CANNOT_RUN)

    # ---- timelines ----

    def timeline(self, *arguments, **environment):
        return "--timeline", "-k", A, "b1:h1:s64:d64", "--source", ROOT / "src", *arguments

    def test_no_compiler(self):
        if os.path.exists("/usr/local/cuda/bin/nvcc"):
            self.check_refused(CANNOT_RUN, "NO_TOOL", *self.timeline(), ACR_NVCC=str(self.path / "nvcc"))
        else:
            self.check_refused(CANNOT_RUN, "NO_TOOL", *self.timeline())

    def test_the_compiler_is_given_the_kernels_parameters(self):
        self.play("open(arguments[arguments.index('-o') + 1], 'w').write('no machine code')", "nvcc")
        done = self.profile(*self.timeline(), ACR_NVCC=str(self.path / "nvcc"))
        self.assertNotEqual(done.returncode, DONE)  # the fake driver's launch leaves no stamps
        call, = self.calls()
        for word in ("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-DDIM=64", "-DQ_TILE=128", "-DKV_TILE=128",
                     "-DSTAGES=3", f"-DKERNEL_NAME={A}", "-DACR_TRACE_AT=0"):
            self.assertIn(word, call)

    def test_a_compiler_that_fails_or_hangs(self):
        self.play("sys.exit('fwd_wgmma.cu(1): error: no such thing')", "nvcc")
        done = self.check_refused(FAILED, "COMPILE_FAILED", *self.timeline(), ACR_NVCC=str(self.path / "nvcc"))
        self.assertIn("no such thing", done.stderr)
        self.play("time.sleep(60)", "nvcc")
        self.check_refused(FAILED, "TIMEOUT", *self.timeline("--timeout", "1s"), ACR_NVCC=str(self.path / "nvcc"))

    def test_no_source_and_no_trace_points(self):
        self.check_refused(CANNOT_RUN, "NO_SOURCE", "--timeline", "-k", A, "--source", self.path)
        self.check_refused(CANNOT_RUN, "NO_MARKS", "--timeline", "-k", "fwd_simt_f16*", "--source", ROOT / "src")

    def test_kernels_with_trace_points_compile(self):
        nvcc = os.environ.get("ACR_NVCC") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        toolchain = ROOT / "build/toolchain/bin/nvcc"
        nvcc = nvcc if os.path.exists(nvcc) else str(toolchain)
        if not os.path.exists(nvcc):
            self.skipTest("no nvcc here")
        for kernel in (A, B):
            done = self.profile("--timeline", "-k", kernel, "b1:h1:s64:d64", "--source", ROOT / "src", ACR_NVCC=nvcc,
                                PATH=os.environ["PATH"])
            self.assertIn("left no stamp", done.stderr)  # compiled, loaded, launched; the fake driver runs nothing


if __name__ == "__main__":
    PROGRAM, DRIVER = os.path.abspath(sys.argv.pop(1)), os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
