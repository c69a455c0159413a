#!/usr/bin/env python3
"""`acromion bench --peers torch` on machines without a GPU: every missing part is named, with exit code 4, and the way
from the program through Python into libacromion_bench.so and back is sound.

    peers.py PROGRAM LIBRARY [unittest arguments]

PyTorch is played by files of a few lines, so that a PyTorch that this machine may have changes nothing. And the records
that comparisons leave: tools/results.py must see what is wrong with one."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
sys.dont_write_bytecode = True
import results  # noqa: E402: from tools/

PROGRAM = LIBRARY = ""
DONE, FAILED, USAGE, BAD_INPUT, CANNOT_RUN = range(5)

NOT_LOADING = 'raise ImportError("a torch that does not load")\n'
VERSIONS = """
__version__ = "9.9"
class version: cuda = "13.0"
class backends:
    class cudnn: version = staticmethod(lambda: 91900)
class cuda:
    is_available = staticmethod(lambda: {available})
    class CUDAGraph: {graph}
"""
COMPLETE = VERSIONS.format(available=True, graph="raw_cuda_graph = None")
BACKENDS = "SDPBackend = type('SDPBackend', (), dict.fromkeys("
BACKENDS += "('FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'CUDNN_ATTENTION', 'MATH')))\nsdpa_kernel = None\n"


class Peers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def play_torch(self, text):
        (self.path / "torch/nn").mkdir(parents=True, exist_ok=True)
        (self.path / "torch/__init__.py").write_text(text)
        (self.path / "torch/nn/__init__.py").write_text("")
        (self.path / "torch/nn/attention.py").write_text(BACKENDS)

    def bench(self, *arguments, peers="torch", **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ACROMION"))}
        clean |= {"PYTHON": sys.executable, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1",
                  "ACROMION_BENCH_LIBRARY": LIBRARY} | environment
        command = [PROGRAM, "bench", "--peers", peers, "--python-path", str(ROOT / "python"), *arguments]
        return subprocess.run(command, env=clean, capture_output=True, text=True)

    def check_fails(self, code, fragment, *arguments, **environment):
        done = self.bench(*arguments, **environment)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(fragment, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_no_torch(self):
        self.play_torch(NOT_LOADING)
        self.check_fails(CANNOT_RUN, "--peers torch: no PyTorch: a torch that does not load")

    def test_torch_without_a_gpu(self):
        self.play_torch(VERSIONS.format(available=False, graph="pass"))
        self.check_fails(CANNOT_RUN, "PyTorch 9.9 sees no CUDA device")

    def test_torch_too_old(self):
        self.play_torch(VERSIONS.format(available=True, graph="pass"))
        self.check_fails(CANNOT_RUN, "PyTorch 9.9 has no CUDAGraph.raw_cuda_graph")

    def test_no_fa3(self):
        (self.path / "flash_attn3_jax.py").write_text('raise ImportError("a wheel that does not load")\n')
        done = self.bench(peers="fa3")
        self.assertEqual(done.returncode, CANNOT_RUN, done.stderr)
        self.assertIn("--peers fa3: no FlashAttention-3", done.stderr)
        self.assertIn("a wheel that does not load", done.stderr)
        self.assertEqual(self.bench(peers="torch,fa9").returncode, USAGE)

    def test_no_fa3_fwd(self):
        self.play_torch(COMPLETE)
        (self.path / "fa3_fwd_interface.py").write_text('raise OSError("undefined symbol")\n')
        done = self.bench(peers="torch-cudnn,fa3-fwd")
        self.assertEqual(done.returncode, CANNOT_RUN, done.stderr)
        self.assertIn("--peers fa3-fwd: no FlashAttention-3 (the wheel fa3-fwd): undefined symbol", done.stderr)

    def test_no_fa4(self):
        self.play_torch(COMPLETE)
        (self.path / "flash_attn").mkdir()
        (self.path / "flash_attn/cute.py").write_text('raise ImportError("no module named cutlass")\n')
        for peers in ("fa4", "torch,fa4"):
            done = self.bench(peers=peers)
            self.assertEqual(done.returncode, CANNOT_RUN, done.stderr)
            self.assertIn("--peers fa4: no FlashAttention-4", done.stderr)
            self.assertIn("no module named cutlass", done.stderr)

    def test_no_library(self):
        self.play_torch(COMPLETE)
        self.check_fails(CANNOT_RUN, "nowhere.so", ACROMION_BENCH_LIBRARY="nowhere.so")

    def test_no_python(self):
        self.check_fails(CANNOT_RUN, "cannot run no-such-python", PYTHON="no-such-python")

    def test_the_way_through_python_and_back(self):
        self.play_torch(COMPLETE)
        self.check_fails(CANNOT_RUN, "peers are met on a GPU", "--backend", "cpu", "f32:b1:h1:s16:d16")
        self.check_fails(BAD_INPUT, "b1:hx", "--backend", "cpu", "b1:hx:s16:d16")
        self.check_fails(USAGE, "--frobnicate", "--frobnicate")

    def test_unknown_peers(self):
        self.play_torch(COMPLETE)
        done = self.bench(peers="torch-frobnicate")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("--peers torch-frobnicate: there are torch-default, torch-flash", done.stderr)
        for peers in ("frobnicate", "torch,frobnicate", "torch,", "", "torchcublas", "tor"):
            done = self.bench(peers=peers)
            self.assertEqual(done.returncode, USAGE)
            self.assertIn(f"'{peers}' is unknown", done.stderr)

    def test_both_peers_come_through_python(self):
        self.play_torch(COMPLETE)
        for peers in ("torch,cublas", "cublas,torch"):
            done = self.bench("--backend", "cpu", "f32:b1:h1:s16:d16", peers=peers)
            self.assertEqual(done.returncode, CANNOT_RUN)
            self.assertIn("peers are met on a GPU", done.stderr)

    def test_cublas_needs_no_python(self):
        done = self.bench("--backend", "cpu", "f32:b1:h1:s16:d16", peers="cublas", PYTHON="no-such-python")
        self.assertEqual(done.returncode, CANNOT_RUN)
        self.assertIn("peers are met on a GPU", done.stderr)

    def test_single_peers_are_named(self):
        self.play_torch(COMPLETE)
        self.check_fails(CANNOT_RUN, "peers are met on a GPU", "--backend", "cpu", "f32:b1:h1:s16:d16",
                         peers="torch-cudnn,torch-flash-deterministic")

    def test_options_that_go_with_peers(self):
        done = subprocess.run([PROGRAM, "bench", "--publish"], capture_output=True, text=True)
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("goes with --peers", done.stderr)

    def test_several_gpus(self):
        done = subprocess.run([PROGRAM, "bench", "--gpus", "2", "--overlap", "b1:h1:s16:d16"], capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("--gpus goes with", done.stderr)
        (self.path / "empty").mkdir()
        done = subprocess.run([PROGRAM, "bench", "--gpus", "2", "b1:h1:s16:d16"], capture_output=True, text=True,
                              env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"},
                              cwd=self.path / "empty")
        self.assertEqual(done.returncode, CANNOT_RUN, done.stderr)
        self.assertIn("--gpus", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


class Records(unittest.TestCase):
    COMMON = {
        "problem": "b2:h8:s512:d64", "mode": "stream", "overlap": False, "p50_us": 8.2, "p90_us": 8.3, "p99_us": 8.4,
        "n": 400, "ci95_us": [8.1, 8.3], "err_max": 1e-4, "device": "a GPU", "driver": "580", "clocks": None,
        "git_sha": "0123456789ab", "dirty": False, "seeds": {"inputs": 1}, "date": "2026-01-31T12:00:00Z",
        "blocks": 50, "discarded": 0, "buffer_sets": 1,
    }
    PEER = COMMON | {"peer": "torch-flash", "peer_version": "PyTorch 9.9", "within_tolerance": True}
    OURS = COMMON | {
        "kernel": "k", "planned": True, "noise_floor": 0.01, "control": "SAME", "best_peer": "torch-flash",
        "ratio_to_best_peer": 1.5, "ratio_ci95": [1.4, 1.6], "verdict": "FASTER", "tier": "C",
        "default_peer": "torch-default", "ratio_to_default": 2.5, "ratio_to_default_ci95": [2.4, None],
        "tier_to_default": "B",
    }

    def test_sound_records(self):
        self.assertEqual(results.faults_of(self.OURS), [])
        self.assertEqual(results.faults_of(self.PEER), [])

    def test_records_of_gradients(self):
        step = {"problem": "bwd:bf16:b2:h8/2:s512:d64:causal", "with_forward": True}
        self.assertEqual(results.faults_of(self.OURS | step | {"forward_kernel": "f"}), [])
        self.assertEqual(results.faults_of(self.PEER | step | {"peer_note": "takes torch-flash"}), [])
        self.assertIn("with_forward", " ".join(results.faults_of(self.OURS | {"with_forward": 1})))
        self.assertIn("peer_note", " ".join(results.faults_of(self.PEER | {"peer_note": ""})))

    def test_faults_are_named(self):
        wrong = {"verdict": "BETTER", "tier": "D", "ratio_ci95": [1.6, 1.7], "noise_floor": 0.001, "control": "OK",
                 "ratio_to_default": 0, "blocks": 0, "discarded": -1, "planned": "yes"}
        for name, value in wrong.items():
            self.assertIn(name, " ".join(results.faults_of(self.OURS | {name: value})), name)
        self.assertIn("within_tolerance", " ".join(results.faults_of(self.PEER | {"within_tolerance": None})))

    def test_each_mode_has_its_fields(self):
        alone = {k: v for k, v in self.OURS.items() if k in self.COMMON and k != "blocks"} | {"kernel": "k"}
        self.assertEqual(results.faults_of(alone), [])
        more = {
            "rotating": ("buffer_sets", 80, 1), "cold": ("empty_us", 1.5, 0), "host": ("step", "acr_execute", "lunch")}
        for mode, (name, good, bad) in more.items():
            record = alone | {"mode": mode, name: good}
            self.assertEqual(results.faults_of(record), [], mode)
            self.assertIn(name, " ".join(results.faults_of(record | {name: bad})))
            del record[name]
            self.assertEqual(results.faults_of(record), [f"lacks {name}"])
        self.assertIn("mode", " ".join(results.faults_of(alone | {"mode": "warm"})))

    def test_clocks(self):
        state = {"sm_mhz": 1980, "reasons": ["power cap"]}
        clocks = {"nominal_mhz": 1980.0, "before": state, "after": None, "range": {"sm_mhz": [1900, 1980]}}
        self.assertEqual(results.faults_of(self.OURS | {"clocks": clocks}), [])
        for wrong in ({"before": 1}, {"nominal_mhz": 0}, {"range": {"sm_ghz": [1, 2]}}):
            self.assertIn("clocks", " ".join(results.faults_of(self.OURS | {"clocks": clocks | wrong})))

    def test_the_ladder(self):
        rung = {"rung": 1, "gain": 9.0, "gain_predicted": 6.0}
        self.assertEqual(results.faults_of(self.OURS | rung), [])
        self.assertEqual(results.faults_of(self.OURS | {"rung": 1, "gain": 9.0}), ["lacks gain_predicted"])

    def test_a_file_is_of_one_machine_and_day(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            path = folder / "2026-01-31-a-gpu.json"
            path.write_text(json.dumps([self.OURS, self.PEER]))
            self.assertEqual(len(results.load(folder)), 2)
            for wrong, words in (({"device": "another GPU"}, "several machines"),
                                 ({"date": "2026-02-01"}, "the one day")):
                path.write_text(json.dumps([self.OURS, self.PEER | wrong]))
                with self.assertRaisesRegex(ValueError, words):
                    results.load(folder)

    def test_a_comparison_is_whole(self):
        for name in ("ratio_ci95", "verdict", "tier", "best_peer", "tier_to_default", "control", "discarded"):
            part = {k: v for k, v in self.OURS.items() if k != name}
            self.assertEqual(results.faults_of(part), [f"lacks {name}"])


if __name__ == "__main__":
    PROGRAM, LIBRARY = (os.path.abspath(sys.argv.pop(1)) for _ in range(2))
    unittest.main(verbosity=1)
