#!/usr/bin/env python3
"""What cmake refuses in kernels.def, and with which sentence: cmake/kernel_line.cmake, called alone on a small tree;
and that every family of this tree declares its parameters. The program's half of the rules: cli.py, unit_gates.c.

    kernel_lines.py [unittest arguments]        needs cmake
"""
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = {
    "src/cuda/kernels/fwd_new/fwd_new.cu":
        "/* A family.\n *\n * PARAMETERS: DIM STAGES V_DIM=DIM\n * BF16=0 REGS= */\n#define X 2\n",
    "src/cuda/kernels/ladder/fwd_ladder9.cu": "/* A rung. PARAMETERS: none */\n",
    "src/cpu/fwd_simd/fwd_simd.c": "/* PARAMETERS: DTYPE DIM */\n",
    "src/cpu/fwd_silent/fwd_silent.c": "/* Says nothing. */\n",
}
GOOD = (
    "KERNEL(fwd_new_a, fwd_new, 80, DIM=64 STAGES=2)",
    "KERNEL(fwd_new_b, fwd_new, 90a, STAGES=2 DIM=64 V_DIM=32 BF16=1 REGS=80)",
    "KERNEL(fwd_new_c, fwd_new, 89, DIM=64 STAGES=2 SPILLS_OK=reason)",
    "KERNEL(fwd_ladder9_a, fwd_ladder9, 80, )",
    "KERNEL(fwd_simd_a, fwd_simd, avx2, DTYPE=ACR_F32 DIM=64)",
)
BAD = (
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64 STAGES=2 TYPO=7)",
     "fwd_new has no parameter TYPO; it has DIM STAGES V_DIM BF16 REGS"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DTYPE=F16 DIM=64 STAGES=2)", "fwd_new has no parameter DTYPE"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64)", "STAGES is missing"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64 DIM=64 STAGES=2)", "DIM is given twice"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=wide STAGES=2)", "DIM=wide is not a whole number"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64 STAGES=)", "STAGES= is not a whole number"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64 STAGES=2 BF16=2)", "BF16=2 is not 0 or 1"),
    ("KERNEL(fwd_new_d, fwd_new, 80, DIM=64 STAGES)", "STAGES is not NAME=value"),
    ("KERNEL(fwd_simd_d, fwd_simd, avx2, DTYPE=F16 DIM=64)", "DTYPE=F16 is not ACR_F32, ACR_F16, ACR_BF16 or ACR_E4M3"),
    ("KERNEL(fwd_simd_d, fwd_simd, avx9, DTYPE=ACR_F16 DIM=64)", "arch avx9 is none of"),
    ("KERNEL(fwd_ladder9_d, fwd_ladder9, 80, DIM=64)", "fwd_ladder9 has no parameter DIM"),
    ("KERNEL(fwd_none_d, fwd_none, 80, DIM=64)", "no file for family fwd_none"),
    ("KERNEL(fwd_silent_d, fwd_silent, avx2, DIM=64)", "no PARAMETERS:"),
    (GOOD[0], "two kernels are called fwd_new_a"),
    ("KERNEL(fwd_new_d fwd_new 80)", "not KERNEL(name, family, arch, parameters)"),
)


class KernelLines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        for name, text in FAMILIES.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(text)

    def read(self, lines):
        calls = "".join(f'acr_read_kernel_line("{line}")\nmessage("${{name}} ${{source}}: ${{parameters}}")\n'
                        for line in lines)
        script = self.path / "read.cmake"
        script.write_text(f"cmake_minimum_required(VERSION 3.22)\ninclude({ROOT}/cmake/kernel_line.cmake)\n{calls}")
        done = subprocess.run(["cmake", "-P", script], cwd=self.path, capture_output=True, text=True)
        return done.returncode, re.sub(r"\s+", " ", done.stderr)

    def test_lines_as_they_should_be(self):
        code, said = self.read(GOOD)
        self.assertEqual(code, 0, said)
        self.assertIn("fwd_new_b src/cuda/kernels/fwd_new/fwd_new.cu: STAGES=2;DIM=64;V_DIM=32;BF16=1;REGS=80", said)
        self.assertIn("fwd_ladder9_a src/cuda/kernels/ladder/fwd_ladder9.cu: ", said)

    def test_others_are_refused_in_a_sentence(self):
        for line, sentence in BAD:
            with self.subTest(line):
                code, said = self.read((*GOOD, line))
                self.assertNotEqual(code, 0)
                self.assertIn(sentence, said)

    def test_every_family_declares_its_parameters_once(self):
        files = [file for direction in ("fwd", "bwd") for place in ("cpu/*/{}_*.c", "cuda/kernels/*/{}_*.cu")
                 for file in ROOT.glob("src/" + place.format(direction))]
        self.assertGreater(len(files), 10)
        for file in files:
            declared = re.findall(r"PARAMETERS:(.*?)\*/", file.read_text(), re.S)
            self.assertEqual(len(declared), 1, file)
            for word in declared[0].replace("\n *", " ").split():
                self.assertRegex(word, r"^([A-Z][A-Z0-9_]*(=\w*)?|none)$", file)


if __name__ == "__main__":
    unittest.main()
