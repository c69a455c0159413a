#!/usr/bin/env python3
"""The program as its users meet it: attention on real files against a plain reference, exit codes, JSON, wisdom files,
the man page.

    cli.py PROGRAM [unittest arguments]        needs nothing but Python's standard library; runs on the cpu backend
"""
import functools
import itertools
import json
import math
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ""
PORTABLE = "fwd_simd_f32_*_portable"  # one line
COMMANDS = ["run", "info", "why", "check", "bench", "roofline", "wisdom", "profile", "variant", "report"]
DONE, FAILED, USAGE, BAD_INPUT, CANNOT_RUN, FILE = range(6)  # exit codes, acromion(1)


# ---- .npy files ----

FORMATS = {"<f4": "f", "<f2": "e", "<i4": "i", "<i8": "q", "|b1": "?", "|u1": "B"}


def bfloat16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def write_npy(path, shape, values, descr="<f4"):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    if descr == "<V2":
        data = struct.pack(f"<{len(values)}H", *(bfloat16_bits(v) for v in values))
    else:
        data = struct.pack(f"<{len(values)}{FORMATS[descr]}", *values)
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data)


def read_npy(path):
    """(descr, shape, values)"""
    content = path.read_bytes()
    assert content[:6] == b"\x93NUMPY", content[:6]
    start = 10 if content[6] == 1 else 12
    length = int.from_bytes(content[8:start], "little")
    header = eval(content[start:start + length])  # a dict literal that the program under test wrote
    count = math.prod(header["shape"])
    data = content[start + length:]
    if header["descr"] in ("<V2", "|V2"):
        bits = struct.unpack(f"<{count}H", data)
        return header["descr"], header["shape"], [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in bits]
    return header["descr"], header["shape"], list(struct.unpack(f"<{count}{FORMATS[header['descr']]}", data))


# ---- the reference: attention as the header defines it, in plain Python ----

def attention(q, k, v, shape, mask=None, scale=None, kv_lens=None, window=(0, 0), shown=None, changed=None, sinks=None):
    """Lists in bhsd order; shape = (batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim). Returns o and lse.
    shown(b, h, i, at, j, seen): whether row i, that stands at key `at`, sees key j, which the masks show it or not.
    changed(score, b, h, i, at, j): what the softmax sees of a score. sinks: a score of each head."""
    batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim = shape
    scale = scale or 1 / math.sqrt(qk_dim)
    o, lse = [], []
    for b in range(batch):
        keys = kv_lens[b] if kv_lens else kv_len
        for h in range(q_heads):
            g = b * kv_heads + h // (q_heads // kv_heads)
            for i in range(q_len):
                query = q[((b * q_heads + h) * q_len + i) * qk_dim:][:qk_dim]
                seen = {None: keys, "br": min(keys, max(0, i + keys - q_len + 1)), "tl": min(keys, i + 1)}[mask]
                at = i if mask == "tl" else i + keys - q_len
                first = max(0, at - window[0] + 1) if window[0] else 0
                seen = min(seen, max(0, at + window[1] + 1)) if window[1] else seen
                seen = range(first, seen)
                if shown:
                    seen = [j for j in range(keys) if shown(b, h, i, at, j, j in seen)]
                rows = [k[(g * kv_len + j) * qk_dim:][:qk_dim] for j in seen]
                scores = [scale * sum(x * y for x, y in zip(query, key)) for key in rows]
                if changed:
                    scores = [changed(s, b, h, i, at, j) for s, j in zip(scores, seen)]
                sink = [sinks[h]] if sinks else []
                top = max(scores + sink, default=-math.inf)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights) + sum(math.exp(s - top) for s in sink)
                lse.append(top + math.log(total) if total else -math.inf)
                o += [sum(w * v[(g * kv_len + j) * v_dim + d] for j, w in zip(seen, weights)) / total if seen else 0.0
                      for d in range(v_dim)]
    return o, lse


def transposed(values, b, h, s, d):
    """bhsd to bshd, or, with h and s exchanged, back."""
    return [values[((x * h + y) * s + z) * d + w]
            for x in range(b) for z in range(s) for y in range(h) for w in range(d)]


# ---- running the program ----

def execute(*arguments, env=None):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, env=env)


def needs_cuda_kernels(test):
    """Skips a test where the build has no kernel for GPUs (-DACR_CUDA=OFF)."""
    @functools.wraps(test)
    def run(self):
        if not any(kernel["backend"] == "cuda" for kernel in self.json_of("info")["kernels"]):
            self.skipTest("this build has no CUDA kernels")
        test(self)
    return run


class Cli(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def run_ok(self, *arguments):
        done = execute(*arguments)
        self.assertEqual(done.returncode, DONE, f"{arguments}: {done.stderr}{done.stdout}")
        return done.stdout

    def run_fails(self, code, fragment, *arguments):
        done = execute(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stderr}{done.stdout}")
        self.assertIn(str(fragment), done.stderr + done.stdout, arguments)
        return done

    def json_of(self, *arguments):
        return json.loads(self.run_ok(*arguments, "--json"))


SHAPE = (2, 4, 2, 5, 7, 8, 6)  # batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim


class Run(Cli):
    """acromion run, on files."""

    def make_inputs(self, descr="<f4", layout="bhsd", shape=SHAPE):
        """Writes q, k and v and returns the values that the files hold, in bhsd order."""
        batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim = shape
        generator = random.Random(7)
        held = []
        for name, heads, length, dim in (("q", q_heads, q_len, qk_dim), ("k", kv_heads, kv_len, qk_dim),
                                         ("v", kv_heads, kv_len, v_dim)):
            values = [generator.gauss(0, 1) for _ in range(batch * heads * length * dim)]
            path = self.path / f"{name}.npy"
            if layout == "bhsd":
                write_npy(path, (batch, heads, length, dim), values, descr)
                held.append(read_npy(path)[2])
            else:
                write_npy(path, (batch, length, heads, dim), transposed(values, batch, heads, length, dim), descr)
                held.append(transposed(read_npy(path)[2], batch, length, heads, dim))
        return held

    def arguments(self, *more):
        return ["run", "--q", self.path / "q.npy", "--k", self.path / "k.npy", "--v", self.path / "v.npy",
                "-o", self.path / "o.npy", "--backend", "cpu", *more]

    def check_output(self, expected, tolerance, descr="<f4", name="o.npy"):
        got_descr, _, got = read_npy(self.path / name)
        self.assertEqual(got_descr, descr)
        self.assertEqual(len(got), len(expected))
        for index, (x, y) in enumerate(zip(got, expected)):
            self.assertTrue(x == y or abs(x - y) <= tolerance, f"{name}[{index}] = {x}, expected {y}")

    def test_masks(self):
        q, k, v = self.make_inputs()
        for option, mask in (([], None), (["--causal"], "br"), (["--causal=br"], "br"), (["--causal=tl"], "tl")):
            with self.subTest(option=option):
                self.run_ok(*self.arguments("--lse", self.path / "lse.npy", *option))
                o, lse = attention(q, k, v, SHAPE, mask)
                self.check_output(o, 1e-5)
                self.check_output(lse, 1e-5, name="lse.npy")
                self.assertEqual(read_npy(self.path / "o.npy")[1], (2, 4, 5, 6))
                self.assertEqual(read_npy(self.path / "lse.npy")[1], (2, 4, 5))

    def test_windows(self):
        q, k, v = self.make_inputs()
        for value, window in (("3", (3, 0)), ("2/1", (2, 1)), ("0/2", (0, 2))):
            for option, mask in (([], None), (["--causal=tl"], "tl"), (["--causal"], "br")):
                with self.subTest(value=value, mask=mask):
                    self.run_ok(*self.arguments("--lse", self.path / "lse.npy", "--window", value, *option))
                    o, lse = attention(q, k, v, SHAPE, mask, window=window)
                    self.check_output(o, 1e-5)
                    self.check_output(lse, 1e-5, name="lse.npy")
        for bad in ("0", "-1", "3/0", "3/", "x"):
            self.run_fails(USAGE, "--window", *self.arguments("--window", bad))

    def test_features(self):
        """SHAPE is (2, 4, ...) heads over 5 queries and 7 keys or so: files of every feature, each by itself."""
        q, k, v = self.make_inputs()
        batch, heads, _, q_len, kv_len = SHAPE[:5]
        generator = random.Random(8)
        slopes = [generator.random() for _ in range(heads)]
        sinks = [generator.gauss(0, 2) for _ in range(heads)]
        bias = [generator.gauss(0, 1) for _ in range(heads * q_len * kv_len)]
        hidden = [generator.random() < 0.3 for _ in range(batch * kv_len)]
        row_bytes = (q_len + 7) // 8
        tree = [generator.randrange(256) for _ in range(batch * q_len * row_bytes)]
        starts, ranges = [2, 0], [0, 3, 4, 6, 1, 2, 2, 5]
        files = {"slopes": ((heads,), slopes, "<f4"), "sinks": ((heads,), sinks, "<f4"),
                 "bias": ((heads, q_len, kv_len), bias, "<f4"), "tree": ((batch, q_len, row_bytes), tree, "|u1"),
                 "mask": ((batch, 1, 1, kv_len), [not h for h in hidden], "|b1"), "starts": ((batch,), starts, "<i8"),
                 "ranges": ((batch, 2, 2), ranges, "<i4")}
        for name, (shape, values, descr) in files.items():
            write_npy(self.path / f"{name}.npy", shape, values, descr)

        def in_range(b, i, j):
            return any(begin <= i < end and begin <= j < end
                       for begin, end in (ranges[4 * b:4 * b + 2], ranges[4 * b + 2:4 * b + 4]))

        def in_tree(b, i, j):
            bit = j - (kv_len - q_len)
            return bit < 0 or tree[(b * q_len + i) * row_bytes + bit // 8] >> bit % 8 & 1

        cases = {
            "--softcap 0.5": {"changed": lambda s, b, h, i, at, j: 0.5 * math.tanh(s / 0.5)},
            "--sinks sinks.npy": {"sinks": sinks},
            "--alibi slopes.npy": {"changed": lambda s, b, h, i, at, j: s - slopes[h] * abs(at - j)},
            "--mask bias.npy": {"changed": lambda s, b, h, i, at, j: s + bias[(h * q_len + i) * kv_len + j]},
            "--mask mask.npy": {"shown": lambda b, h, i, at, j, seen: seen and not hidden[b * kv_len + j]},
            "--chunk 3": {"shown": lambda b, h, i, at, j, seen: seen and j // 3 == at // 3},
            "--kv-starts starts.npy": {"shown": lambda b, h, i, at, j, seen: seen and j >= starts[b]},
            "--ranges ranges.npy": {"shown": lambda b, h, i, at, j, seen: seen or in_range(b, at, j)},
            "--tree tree.npy": {"shown": lambda b, h, i, at, j, seen: seen and in_tree(b, i, j)},
        }
        for option, terms in cases.items():
            with self.subTest(option=option):
                words = [self.path / word if word.endswith(".npy") else word for word in option.split()]
                self.run_ok(*self.arguments("--lse", self.path / "lse.npy", "--causal", *words))
                o, lse = attention(q, k, v, SHAPE, "br", **terms)
                self.check_output(o, 1e-5)
                self.check_output(lse, 1e-5, name="lse.npy")
        self.run_fails(BAD_INPUT, "has to broadcast", *self.arguments("--mask", self.path / "slopes.npy"))
        self.run_fails(BAD_INPUT, "the heads of q", *self.arguments("--sinks", self.write_numbers("two", [0.0, 1.0])))
        self.run_fails(BAD_INPUT, "1-D array of float32", *self.arguments("--sinks", self.path / "starts.npy"))
        self.run_fails(USAGE, "softcap", *self.arguments("--softcap", "-1"))

    def write_numbers(self, name, values):
        write_npy(self.path / f"{name}.npy", (len(values),), values)
        return self.path / f"{name}.npy"

    def test_rows_without_keys(self):
        shape = (1, 2, 1, 6, 3, 8, 4)
        q, k, v = self.make_inputs(shape=shape)
        self.run_ok(*self.arguments("--lse", self.path / "lse.npy", "--causal"))
        o, lse = attention(q, k, v, shape, "br")
        self.assertEqual(o[:12], [0.0] * 12)
        self.check_output(o, 1e-5)
        self.check_output(lse, 1e-5, name="lse.npy")

    def test_types(self):
        for descr, tolerance in (("<f4", 1e-5), ("<f2", 2e-3), ("<V2", 2e-2)):
            with self.subTest(descr=descr):
                q, k, v = self.make_inputs(descr)
                self.run_ok(*self.arguments())
                self.check_output(attention(q, k, v, SHAPE)[0], tolerance, descr)

    def test_layout(self):
        q, k, v = self.make_inputs(layout="bshd")
        self.run_ok(*self.arguments("--layout", "bshd"))
        self.check_output(transposed(attention(q, k, v, SHAPE)[0], 2, 4, 5, 6), 1e-5)
        self.assertEqual(read_npy(self.path / "o.npy")[1], (2, 5, 4, 6))

    def test_scale_and_key_lengths(self):
        q, k, v = self.make_inputs()
        for descr in ("<i4", "<i8"):
            write_npy(self.path / "lens.npy", (2,), [3, 0], descr)
            self.run_ok(*self.arguments("--scale", "0.7", "--kv-lens", self.path / "lens.npy"))
            self.check_output(attention(q, k, v, SHAPE, None, 0.7, [3, 0])[0], 1e-5)

    def test_fp8_scales(self):
        """A number for a tensor, or a file with one for each batch entry and key/value head. Inputs that e4m3 holds."""
        batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim = SHAPE
        generator, values = random.Random(11), {}
        for name, heads, length, dim in (("q", q_heads, q_len, qk_dim), ("k", kv_heads, kv_len, qk_dim),
                                         ("v", kv_heads, kv_len, v_dim)):
            values[name] = [generator.randrange(-8, 9) / 8 for _ in range(batch * heads * length * dim)]
            write_npy(self.path / f"{name}.npy", (batch, heads, length, dim), values[name])
        scales = {"q": [1, 2, 0.5, 4], "k": [1, 0.25, 2, 0.5], "v": [0.5, 1, 2, 0.25]}
        options = ["--dtype", "e4m3"]
        for name, of_head in scales.items():
            write_npy(self.path / f"{name}s.npy", (batch, kv_heads), of_head)
            options += [f"--{name}-scale", self.path / f"{name}s.npy"]
            each = len(values[name]) // (batch * kv_heads)
            values[name + "s"] = [x * of_head[i // each] for i, x in enumerate(values[name])]
        self.run_ok(*self.arguments(*options))
        self.check_output(attention(values["qs"], values["ks"], values["vs"], SHAPE)[0], 2e-3, "<f2")
        self.run_ok(*self.arguments("--dtype", "e4m3", "--q-scale", "3", "--v-scale", self.path / "vs.npy"))
        self.check_output(attention([3 * x for x in values["q"]], values["k"], values["vs"], SHAPE)[0], 2e-3, "<f2")
        self.run_fails(BAD_INPUT, "only e4m3", *self.arguments("--k-scale", self.path / "ks.npy"))
        write_npy(self.path / "ks.npy", (kv_heads * batch, 1), scales["k"])
        self.run_fails(BAD_INPUT, "k-scale has shape [4, 1], expected [2, 2]", *self.arguments(*options))
        write_npy(self.path / "ks.npy", (batch, kv_heads), [1, 1, -2, 1])
        self.run_fails(BAD_INPUT, "k_scales[1, 0] is -2", *self.arguments(*options))
        write_npy(self.path / "ks.npy", (batch, kv_heads), [1, 1, 1, 1], "<i4")
        self.run_fails(BAD_INPUT, "float32", *self.arguments(*options))
        self.run_fails(USAGE, "--v-scale", *self.arguments("--v-scale", "none"))

    def test_values_inside_keys(self):
        """As with a file of the first elements of each key; whole, packed, and in a pool of pages in another order."""
        batch, q_heads, kv_heads, q_len, kv_len, qk_dim, _ = SHAPE
        v_dim, page = qk_dim - 2, 2
        shape = (*SHAPE[:6], v_dim)
        q, k, _ = self.make_inputs()
        v = [x for i, x in enumerate(k) if i % qk_dim < v_dim]
        inside = ["--q", self.path / "q.npy", "--k", self.path / "k.npy", "-o", self.path / "o.npy", "--backend", "cpu",
                  "--v-dim", v_dim]
        self.run_ok("run", *inside, "--scale", "0.5", "--lse", self.path / "lse.npy")
        wanted, lse = attention(q, k, v, shape, None, 0.5)
        self.check_output(wanted, 1e-5)
        self.check_output(lse, 1e-5, name="lse.npy")
        self.run_fails(USAGE, "wants --scale", "run", *inside)
        self.run_fails(USAGE, "without --v:", "run", *inside, "--scale", "1", "--v", self.path / "v.npy")
        self.run_fails(USAGE, "without --v-scale", "run", *inside, "--scale", "1", "--v-scale", "2")
        self.run_fails(USAGE, "--v-dim", "run", *inside, "--scale", "1", "--v-dim", "0")
        self.run_fails(BAD_INPUT, "at most qk_dim", "run", *inside, "--scale", "1", "--v-dim", qk_dim + 1)
        lens, table, pool = [kv_len, 4], [[5, 0, 7, 2], [3, 6, 1, 4]], [0.0] * (8 * kv_heads * page * qk_dim)
        for b, h, j, d in itertools.product(range(batch), range(kv_heads), range(kv_len), range(qk_dim)):
            at = ((table[b][j // page] * kv_heads + h) * page + j % page) * qk_dim + d
            pool[at] = k[((b * kv_heads + h) * kv_len + j) * qk_dim + d]
        write_npy(self.path / "k.npy", (8, kv_heads, page, qk_dim), pool)
        write_npy(self.path / "lens.npy", (2,), lens, "<i4")
        write_npy(self.path / "table.npy", (2, 4), sum(table, []), "<i4")
        pages = ["--scale", "0.5", "--page-table", self.path / "table.npy", "--kv-lens", self.path / "lens.npy"]
        self.run_ok("run", *inside, *pages)
        self.check_output(attention(q, k, v, shape, None, 0.5, lens)[0], 1e-5)

    def test_pages(self):
        """Pages in no order, in both layouts, with a batch and with packed queries."""
        batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim = SHAPE
        q, k, v = self.make_inputs()
        lens, page, table = [7, 4], 2, [[5, 0, 7, 2], [3, 6, -1, 99]]
        files = {"table.npy": ((2, 4), sum(table, [])), "lens.npy": ((2,), lens),
                 "qo.npy": ((3,), [0, q_len, 2 * q_len])}
        for name, (shape, numbers) in files.items():
            write_npy(self.path / name, shape, numbers, "<i4")
        for layout in "bhsd", "bshd":
            for name, held, dim in (("k", k, qk_dim), ("v", v, v_dim)):
                pool = [0.0] * (8 * kv_heads * page * dim)
                for b, h, j, d in itertools.product(range(batch), range(kv_heads), range(kv_len), range(dim)):
                    if j < lens[b]:
                        inside = h * page + j % page if layout == "bhsd" else j % page * kv_heads + h
                        at = (table[b][j // page] * page * kv_heads + inside) * dim + d
                        pool[at] = held[((b * kv_heads + h) * kv_len + j) * dim + d]
                write_npy(self.path / f"{name}.npy",
                          (8, kv_heads, page, dim) if layout == "bhsd" else (8, page, kv_heads, dim), pool)
            by_rows = transposed(q, 2, q_heads, q_len, qk_dim)
            if layout == "bshd":
                write_npy(self.path / "q.npy", (batch, q_len, q_heads, qk_dim), by_rows)
            else:
                write_npy(self.path / "q.npy", (batch, q_heads, q_len, qk_dim), q)
            options = ["--causal", "--layout", layout, "--page-table", self.path / "table.npy"]
            wanted = attention(q, k, v, SHAPE, "br", None, lens)[0]
            rows = transposed(wanted, batch, q_heads, q_len, v_dim)
            self.run_ok(*self.arguments(*options, "--kv-lens", self.path / "lens.npy"))
            self.check_output(wanted if layout == "bhsd" else rows, 1e-5)
            write_npy(self.path / "q.npy", (batch * q_len, q_heads, qk_dim), by_rows)
            self.run_ok(*self.arguments(*options, "--kv-lens", self.path / "lens.npy", "--q-offsets",
                                        self.path / "qo.npy"))
            self.check_output(rows, 1e-5)
        self.run_fails(USAGE, "wants --kv-lens", *self.arguments(*options))
        options += ["--kv-lens", self.path / "lens.npy", "--q-offsets", self.path / "qo.npy"]
        self.run_fails(USAGE, "without --kv-offsets", *self.arguments(*options, "--kv-offsets", self.path / "qo.npy"))
        write_npy(self.path / "lens.npy", (2,), [7, 5], "<i4")
        self.run_fails(BAD_INPUT, "page-table[1, 2] is -1, allowed are 0 to 7", *self.arguments(*options))
        write_npy(self.path / "lens.npy", (2,), [9, 4], "<i4")
        self.run_fails(BAD_INPUT, "kv-lens[0] is 9, allowed are 0 to 8", *self.arguments(*options))
        write_npy(self.path / "table.npy", (1, 8), sum(table, []), "<i4")
        self.run_fails(BAD_INPUT, "rows of 1 entries", *self.arguments(*options))

    def test_8_bit_keys_and_values(self):
        """Files of e4m3 under queries of another type; the scales of k and v hold."""
        q, _, _ = self.make_inputs()
        batch, _, kv_heads, _, kv_len, qk_dim, v_dim = SHAPE
        generator, held = random.Random(5), {}
        for name, dim in (("k", qk_dim), ("v", v_dim)):
            codes = [generator.randrange(0x20, 0x40) + 128 * generator.randrange(2)
                     for _ in range(batch * kv_heads * kv_len * dim)]
            write_npy(self.path / f"{name}.npy", (batch, kv_heads, kv_len, dim), codes, "|u1")
            held[name] = [(-1) ** (code >> 7) * (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7) for code in codes]
        self.run_ok(*self.arguments("--k-scale", "0.5", "--v-scale", "3"))
        wanted = attention(q, [0.5 * x for x in held["k"]], [3 * x for x in held["v"]], SHAPE)[0]
        self.check_output(wanted, 1e-4)

    def test_packed(self):
        """Sequences of 3, 0 and 5 queries over 4, 2 and 6 keys, one after another, and a row of nobody at each end."""
        heads, kv_heads, qk_dim, v_dim = 4, 2, 8, 6
        q_lens, kv_lens = (3, 0, 5), (4, 2, 6)
        generator, tensors, expected = random.Random(3), {}, {"o": [0.0] * (heads * v_dim), "lse": []}
        for name, lens, count, dim in (("q", q_lens, heads, qk_dim), ("k", kv_lens, kv_heads, qk_dim),
                                       ("v", kv_lens, kv_heads, v_dim)):
            rows = sum(lens) + 2
            write_npy(self.path / f"{name}.npy", (rows, count, dim),
                      [generator.gauss(0, 1) for _ in range(rows * count * dim)])
            held, first = read_npy(self.path / f"{name}.npy")[2], 1
            tensors[name] = []
            for length in lens:  # each sequence by itself, in bhsd order
                part = held[first * count * dim:(first + length) * count * dim]
                tensors[name].append(transposed(part, 1, length, count, dim))
                first += length
        lse = [[0.0] for _ in range(heads)]
        for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
            o, part = attention(tensors["q"][b], tensors["k"][b], tensors["v"][b],
                                (1, heads, kv_heads, q_len, kv_len, qk_dim, v_dim), "br")
            expected["o"] += transposed(o, 1, heads, q_len, v_dim)
            for h in range(heads):
                lse[h] += part[h * q_len:(h + 1) * q_len]
        expected["o"] += [0.0] * (heads * v_dim)
        write_npy(self.path / "qo.npy", (4,), [1, 4, 4, 9], "<i4")
        write_npy(self.path / "ko.npy", (4,), [1, 5, 7, 13], "<i8")
        options = ["--q-offsets", self.path / "qo.npy", "--kv-offsets", self.path / "ko.npy", "--causal"]
        self.run_ok(*self.arguments("--lse", self.path / "lse.npy", *options))
        self.check_output(expected["o"], 1e-5)
        self.check_output([x for row in lse for x in row + [0.0]], 1e-5, name="lse.npy")
        self.assertEqual(read_npy(self.path / "o.npy")[1], (10, 4, 6))
        self.assertEqual(read_npy(self.path / "lse.npy")[1], (4, 10))
        self.run_fails(USAGE, "--layout", *self.arguments("--layout", "bshd", *options))
        self.run_fails(USAGE, "--q-offsets", *self.arguments("--kv-offsets", self.path / "ko.npy"))
        write_npy(self.path / "ko.npy", (4,), [1, 5, 4, 13], "<i8")
        self.run_fails(BAD_INPUT, "kv-offsets[2] is 4, allowed are 5 to 14", *self.arguments(*options))
        write_npy(self.path / "ko.npy", (3,), [1, 5, 14], "<i8")
        self.run_fails(BAD_INPUT, "batch + 1", *self.arguments(*options))

    def test_conversion(self):
        q, k, v = self.make_inputs()
        self.run_ok(*self.arguments("--dtype", "f16"))
        self.check_output(attention(q, k, v, SHAPE)[0], 5e-3, "<f2")
        self.run_ok(*self.arguments("--dtype", "f16", "--out-dtype", "f32"))
        self.check_output(attention(q, k, v, SHAPE)[0], 5e-3, "<f4")
        self.run_fails(BAD_INPUT, "out_dtype is 3 (bf16)", *self.arguments("--dtype", "f16", "--out-dtype", "bf16"))
        self.run_fails(USAGE, "--out-dtype: 'float'", *self.arguments("--out-dtype", "float"))

    def test_threads_agree(self):
        self.make_inputs(shape=(2, 4, 2, 70, 90, 32, 32))
        outputs = []
        for threads in (1, 2, 3):
            self.run_ok(*self.arguments("--threads", threads))
            outputs.append((self.path / "o.npy").read_bytes())
        self.assertEqual(outputs[0], outputs[1])
        self.assertEqual(outputs[0], outputs[2])

    def test_json(self):
        self.make_inputs()
        report = self.json_of(*self.arguments())
        self.assertIn("b2:h4/2:s5/7:d8/6", json.dumps(report))
        self.assertIn("fwd_", json.dumps(report))

    def test_missing_arguments(self):
        self.make_inputs()
        self.run_fails(USAGE, "--q", "run")
        self.run_fails(USAGE, "--causal", *self.arguments("--causal=sideways"))
        self.run_fails(USAGE, "--scale", *self.arguments("--scale", "none"))
        self.run_fails(USAGE, "--layout", *self.arguments("--layout", "sbhd"))

    def test_failures_leave_the_old_output(self):
        self.make_inputs()
        output = self.path / "o.npy"
        output.write_text("precious")

        def fails(code, fragment, *more):
            self.run_fails(code, fragment, *self.arguments(*more))
            self.assertEqual(output.read_text(), "precious")
            self.assertEqual(sorted(p.name for p in self.path.iterdir() if p.name.startswith("o.npy")), ["o.npy"])

        fails(FILE, "nowhere.npy", "--q", self.path / "nowhere.npy")
        fails(FILE, "nowhere", "-o", self.path / "nowhere" / "o.npy")
        (self.path / "bad.npy").write_bytes(b"not an array")
        fails(BAD_INPUT, "bad.npy", "--k", self.path / "bad.npy")
        truncated = (self.path / "v.npy").read_bytes()[:-1]
        (self.path / "bad.npy").write_bytes(truncated)
        fails(BAD_INPUT, "bad.npy", "--v", self.path / "bad.npy")
        (self.path / "bad.npy").write_bytes(b"")
        fails(BAD_INPUT, "bad.npy", "--v", self.path / "bad.npy")
        write_npy(self.path / "bad.npy", (2, 2, 7, 9), [0.0] * 252)
        fails(BAD_INPUT, "9", "--k", self.path / "bad.npy")  # another head dim
        write_npy(self.path / "bad.npy", (2, 3, 7, 8), [0.0] * 336)
        fails(BAD_INPUT, "head", "--k", self.path / "bad.npy")  # three heads do not divide four
        write_npy(self.path / "bad.npy", (2, 14, 8), [0.0] * 224)
        fails(BAD_INPUT, "4", "--k", self.path / "bad.npy")  # three dimensions
        write_npy(self.path / "bad.npy", (3,), [1, 2, 3], "<i4")
        fails(BAD_INPUT, "3", "--kv-lens", self.path / "bad.npy")
        write_npy(self.path / "bad.npy", (2, 2, 7, 8), [0.0] * 224, "<f2")
        fails(BAD_INPUT, "type", "--k", self.path / "bad.npy")

    def test_no_kernel(self):
        self.make_inputs(shape=(1, 1, 1, 1, 1, 5000, 4))
        self.run_fails(CANNOT_RUN, "qk_dim", *self.arguments())


class Commands(Cli):
    """Every command: help, usage errors, JSON."""

    def test_help(self):
        overview = self.run_ok("--help")
        for command in COMMANDS:
            self.assertIn(f"\n  {command} ", overview)
            text = self.run_ok(command, "--help")
            self.assertIn(f"usage: acromion {command}", text)
            self.assertIn("examples:", text)
            self.assertLessEqual(max(map(len, text.splitlines())), 130)

    def test_version(self):
        header = (ROOT / "include/acromion.h").read_text()
        numbers = [re.search(rf"#define ACR_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
        self.assertIn("acromion " + ".".join(numbers), self.run_ok("--version"))

    def test_usage_errors(self):
        self.run_fails(USAGE, "usage")
        self.run_fails(USAGE, "nonsense", "nonsense")
        self.run_fails(USAGE, "nonsense", "help", "nonsense")
        self.assertEqual(self.run_ok("help", "why"), self.run_ok("why", "--help"))
        for command in COMMANDS:
            self.run_fails(USAGE, "--bogus", command, "--bogus")
        self.run_fails(USAGE, "abacus", "why", "--backend", "abacus")
        self.run_fails(USAGE, "threads", "why", "--threads", "many")
        self.run_fails(USAGE, "nokernel", "check", "-k", "nokernel")
        self.run_fails(USAGE, "nogpu", "roofline", "--gpu", "nogpu")
        self.run_fails(USAGE, "target", "roofline", "--gpu", "l4", "--target", "soon")

    def test_malformed_problems(self):
        for command in ("why", "check", "bench", "roofline"):
            for text, fragment in (("b2", "missing"), ("b2:h8:s512:d64:quux", "unknown field"),
                                   ("", "expected a field"), ("b1:h8/3:s1:d8", "kv_heads"),
                                   ("b2:h8:s512:d64:causal:causal", "twice")):
                with self.subTest(command=command, text=text):
                    self.run_fails(BAD_INPUT, fragment, command, text, "--backend", "cpu")

    def test_other_names_are_answered_with_the_right_one(self):
        for other, right in (("fp16", "f16"), ("half", "f16"), ("bfloat16", "bf16"), ("FP8", "e4m3"), ("F32", "f32")):
            self.run_fails(BAD_INPUT, f"the element type is called {right}", "why", f"{other}:b1:h1:s8:d8")
            self.run_fails(USAGE, f"it is called {right}", "run", "--dtype", other)
        self.assertEqual(self.run_ok("roofline", "--gpu", "H100"), self.run_ok("roofline", "--gpu", "h100"))

    def test_files_that_need_a_hint_get_one(self):
        path = self.path / "x.npy"
        def run(shape, descr, *more):
            write_npy(path, shape, [0] * math.prod(shape), descr)
            return ["run", "--q", path, "--k", path, "--v", path, "-o", self.path / "o.npy", "--backend", "cpu", *more]
        FORMATS["<f8"] = "d"
        self.run_fails(BAD_INPUT, "save it with .astype('<f4')", *run((1, 1, 2, 4), "<f8"))
        self.run_fails(BAD_INPUT, "give --q-offsets", *run((2, 1, 4), "<f4"))
        self.run_fails(BAD_INPUT, f"{path}: holds integers", *run((1, 1, 2, 4), "<i4"))

    @needs_cuda_kernels
    def test_no_time_has_an_exponent(self):
        for command in (["roofline", "--gpu", "l4", "--target", "500us", "b4:h64:s32768:d128"],
                        ["roofline", "--gpu", "l4", "--target", "2s", "b4:h64:s32768:d128"],
                        ["why", "--gpu", "l4", "b4:h64:s32768:d128"]):
            self.assertNotRegex(self.run_ok(*command), r"\de[+-]\d+ us")

    def test_what_only_a_gpu_has_is_said(self):
        self.run_fails(CANNOT_RUN, "--overlap", "bench", "--overlap", "--backend", "cpu", "f32:b1:h1:s8:d8")
        cuda = [k["name"] for k in self.json_of("info")["kernels"] if k["backend"] == "cuda"]
        if cuda:
            self.run_fails(FAILED, "PTX machine", "check", "--backend", "cpu", "-k", cuda[0])

    def test_the_error_points_at_the_character(self):
        done = self.run_fails(BAD_INPUT, "character 15", "why", "b2:h8:s512:d64:quux")
        lines = done.stderr.splitlines()
        line = next(i for i, text in enumerate(lines) if text.strip() == "b2:h8:s512:d64:quux")
        self.assertEqual(lines[line + 1].index("^") - lines[line].index("b2"), 15)

    def test_missing_device(self):
        self.run_fails(CANNOT_RUN, "device 99", "why", "--backend", "cpu", "--device", "99")

    def test_info(self):
        report = self.json_of("info")
        names = [kernel["name"] for kernel in report["kernels"]]
        self.assertEqual(len(names), len(set(names)))
        listed = re.findall(r"^KERNEL\((\w+)", (ROOT / "src/kernels.def").read_text(), re.M)
        self.assertEqual(sorted(set(names) - set(listed)), [])
        self.assertTrue(any(kernel["here"] for kernel in report["kernels"]))
        self.assertTrue(any(device["backend"] == "cpu" for device in report["devices"]))
        everything, short = self.run_ok("info", "--all"), self.run_ok("info")
        for name in names:
            self.assertIn(name, everything)
        self.assertLessEqual(len(short.splitlines()), 10 + len(report["devices"]))
        self.assertIn(f"kernels: {len(names)}, of which {sum(k['here'] for k in report['kernels'])} run here", short)
        for family in {k["family"] for k in report["kernels"] if not k["never_planned"]}:
            self.assertIn(family, short)

    def test_why(self):
        report = self.json_of("why", "--backend", "cpu", "b1:h2:s64:d64", "f32:b1:h2:s64:d64")
        self.assertEqual([r["problem"] for r in report], ["b1:h2:s64:d64", "f32:b1:h2:s64:d64"])
        kernels = len(self.json_of("info")["kernels"])
        for result in report:
            self.assertEqual(len(result["kernels"]), kernels)
            chosen = [k for k in result["kernels"] if k["kernel"] == result["chosen"]]
            self.assertEqual(len(chosen), 1)
            for kernel in result["kernels"]:
                self.assertTrue(kernel["verdict"] != "no" or kernel["reason"])

    def test_why_in_ten_lines(self):
        for arguments in (["--backend", "cpu"], ["--gpu", "h200"], ["--gpu", "L4"]):
            for problem in ("b2:h8:s512:d64", "e4m3:b1:h2:s64:d64:causal", "b1:h1:s1:d5000"):
                short = execute("why", problem, *arguments).stdout
                whole = execute("why", "--all", problem, *arguments).stdout
                self.assertLessEqual(len(short.splitlines()), 10, short)
                for line in 0, 1:  # but for the estimate: the clock of a CPU is measured
                    self.assertEqual(*(text.splitlines()[line].split("(estimate")[0] for text in (short, whole)))
                rows = [line.split() for line in whole.splitlines()[2:]]
                could = [row for row in rows if row[0] == "could"]
                said = sum(int(n) for n in re.findall(r"^  (\d+) cannot", short, re.M))
                self.assertEqual(said, sum(row[0] == "no" for row in rows))
                shown, more = short.count("could run it: "), re.search(r"and (\d+) more could", short)
                self.assertEqual(shown + int(more[1] if more else 0), len(could))
                estimates = [float(e) for e in re.findall(r"could run it: \S+ +(\S+) us", short)]
                self.assertEqual(estimates, sorted(estimates))

    def test_why_measure(self):
        report = self.json_of("why", "--backend", "cpu", "--measure", "f32:b1:h2:s64:d64")[0]
        times = [k["measured_us"] for k in report["kernels"]]
        self.assertTrue(times and all(t > 0 for t in times), report)
        self.assertTrue(all(k["verdict"] != "no" and len(k["image"]) == 16 for k in report["kernels"]))
        self.assertIn("git_sha", report)
        text = self.run_ok("why", "--backend", "cpu", "--measure", "f32:b1:h2:s64:d64")
        self.assertEqual(text.count("(best)"), 1)
        self.run_fails(USAGE, "--measure", "why", "--measure", "--gpu", "l4")

    @needs_cuda_kernels
    def test_why_for_absent_gpus(self):
        for gpu in ("l4", "a100", "h100", "h200"):
            report = self.json_of("why", "--gpu", gpu, "b2:h8:s512:d64")
            self.assertRegex(report[0]["chosen"], r"_sm(80|89|90a)$")

    def test_why_without_kernel(self):
        self.run_fails(CANNOT_RUN, "qk_dim", "why", "--backend", "cpu", "b1:h1:s1:d5000")


class Roofline(Cli):
    def test_the_mission_on_an_l4(self):
        text = self.run_ok("roofline", "--gpu", "l4", "--target", "5us")
        self.assertIn("impossible", text)
        self.assertIn("8.862 us", text)
        report = self.json_of("roofline", "--gpu", "l4", "--target", "5us", "b2:h8:s512:d64")[0]
        self.assertEqual(report["verdict"], "impossible")
        # 4 * 16 heads * 512 * 512 * 64 multiply-adds as FLOP, at 121 dense TFLOP/s
        self.assertAlmostEqual(report["floor_warm_us"], 4 * 16 * 512 * 512 * 64 / 121e12 * 1e6, delta=0.1)
        self.assertTrue(report["source"])

    def test_of_this_machines_processors(self):
        report = self.json_of("roofline", "--gpu", "cpu", "f32:b1:h1:s64:d32")[0]
        self.assertGreater(report["cpu_share"], 0)

    def test_verdicts(self):
        verdicts = [self.json_of("roofline", "--gpu", "h200", "--target", target)[0]["verdict"]
                    for target in ("0.5us", "5us", "1ms")]
        self.assertEqual(verdicts[0], "impossible")
        self.assertNotEqual(verdicts[1], "impossible")
        self.assertEqual(verdicts[2], "open")

    def test_more_work_has_a_higher_floor(self):
        problems = ["b1:h8:s512:d64", "b2:h8:s512:d64", "b2:h8:s1024:d64", "b2:h8:s1024:d128", "f32:b2:h8:s1024:d128"]
        for gpu in ("l4", "a100", "h100", "h200"):
            floors = [r["floor_warm_us"] for r in self.json_of("roofline", "--gpu", gpu, *problems)]
            self.assertEqual(floors, sorted(floors), gpu)
            causal, full = self.json_of("roofline", "--gpu", gpu, "b2:h8:s1024:d64:causal", "b2:h8:s1024:d64")
            self.assertLess(causal["floor_warm_us"], full["floor_warm_us"])

    def test_over_several_gpus(self):
        def over(problem, gpus, *options):
            return self.json_of("roofline", "--gpu", "h200", "--gpus", str(gpus), *options, problem)[0]
        full, causal = "bf16:b1:h16:s32768:d128", "bf16:b1:h16:s32768:d128:causal"
        one = self.json_of("roofline", "--gpu", "h200", full)[0]
        four = over(full, 4)
        self.assertEqual(over(full, 1)["floor_warm_us"], one["floor_warm_us"])
        self.assertAlmostEqual(four["floor_warm_us"], one["floor_warm_us"] / 4, delta=0.01)
        # three quarters of K and of V, at 450 GB/s; partial results would be more
        self.assertAlmostEqual(four["link_bytes"], 3 / 4 * 2 * 16 * 32768 * 128 * 2, delta=10)
        self.assertAlmostEqual(four["link_us"], four["link_bytes"] / 450e9 * 1e6, delta=0.01)
        slow = over(causal, 4, "--link", "45")
        self.assertEqual((slow["warm_bound"], slow["cold_bound"], slow["link_gb_s"]), ("link", "link", 45))
        self.assertAlmostEqual(slow["floor_warm_us"], 10 * four["link_us"], delta=0.1)
        # one query: the others' partial results, each with its log-sum-exp
        self.assertEqual(over("bf16:b1:h32/8:s1/1048576:d128", 4)["link_bytes"], 3 * 32 * (128 * 2 + 4))
        self.assertIn("link, 201.3 MB received", self.run_ok("roofline", "--gpu", "h200", "--gpus", "4", full))
        for fragment, arguments in (("goes with --gpus", ["--link", "5"]), ("gpus", ["--gpus", "0"]),
                                    ("link", ["--gpus", "2", "--link", "fast"]),
                                    ("of windows and chunks", ["--gpus", "2", "b1:h1:s64:d64:causal:win8"]),
                                    ("without lengths", ["--gpus", "2", "b1:h1:s64:d64:kvlens"]),
                                    ("gradients", ["--gpus", "2", "bwd:b1:h1:s64:d64"])):
            self.run_fails(USAGE, fragment, "roofline", "--gpu", "h200", *arguments)
        self.run_fails(USAGE, "is a CPU", "roofline", "--gpu", "cpu", "--gpus", "2", "f32:b1:h1:s64:d32")

    def test_every_gpu_of_the_table(self):
        listed = self.run_ok("roofline", "--gpu", "help")
        names = re.findall(r"^ *([a-z0-9-]+) ", listed, re.M)
        self.assertGreaterEqual(len(names), 5)
        for name in names:
            for report in self.json_of("roofline", "--gpu", name, "b2:h8:s512:d64"):
                self.assertGreater(report["floor_cold_us"], 0)
                self.assertGreaterEqual(report["floor_cold_us"], report["floor_warm_us"])


class Judging(Cli):
    """check and bench on small problems."""

    def test_check(self):
        report = self.json_of("check", "--backend", "cpu", "-k", "*_f32_*", "f32:b1:h3:s65:d64:causal")
        run = [k for k in report["kernels"] if "not_run" not in k]
        self.assertGreaterEqual(len(run), 1)
        for kernel in run:
            self.assertEqual(kernel["failed"], 0)
            self.assertGreater(kernel["passed"], 0)
        self.assertGreaterEqual(len(report["records"]), len(run))

    def test_the_listed_commands_repeat_cases(self):
        listed = self.run_ok("check", "--backend", "cpu", "-k", PORTABLE, "--list")
        lines = [line for line in listed.splitlines() if "check" in line]
        self.assertGreater(len(lines), 20)
        for line in lines[:: len(lines) // 4]:
            words = line.split()
            self.run_ok(*words[words.index("check"):])

    def test_nothing_to_check_is_a_failure(self):
        self.run_fails(FAILED, "nothing was checked", "check", "--backend", "cpu", "-k", "*_f32_*", "b1:h1:s8:d8")

    def test_reruns(self):
        arguments = ("check", "--backend", "cpu", "-k", PORTABLE, "f32:b1:h1:s9:d8", "--inputs", "normal")
        self.assertEqual(self.json_of(*arguments, "--reruns", "5")["reruns"], 5)
        self.run_fails(USAGE, "reruns", *arguments, "--reruns", "0")

    def test_variants(self):
        if b"__tsan_init" in pathlib.Path(PROGRAM).read_bytes():
            self.skipTest("ThreadSanitizer's runtime has no room under the memory limit of compilers' processes")
        base, problem = "fwd_simd_f32_d1024_64x64_portable", "f32:b1:h2:s65:d64"
        variant = f"{base}:UNROLL=1"
        self.run_ok("variant", "-o", self.path, variant)
        for given in (variant, self.path):
            records = self.json_of("bench", "--backend", "cpu", "--quick", problem, "--variant", given)
            self.assertEqual([r["kernel"] for r in records], [base, f"{base}+UNROLL=1"])
            self.assertNotEqual(records[0]["image"], records[1]["image"])
        report = self.json_of("check", "--backend", "cpu", "-k", "*_f32_*_64x64_avx2", "--quick",
                              "--variant", self.path)
        self.assertEqual([k["failed"] for k in report["kernels"] if k["kernel"] == f"{base}+UNROLL=1"], [0])
        self.assertFalse([k for k in report["kernels"] if k["kernel"] == base])
        kept = sorted(p.name for p in self.path.iterdir())
        self.run_fails(FAILED, "compile_failed", "variant", "-o", self.path, f"{base}:ROW_VECS=7")
        for change, said in (("FOO=33", "fwd_simd has no parameter FOO; it has DTYPE DIM"),
                             ("DIM=nothing", "DIM=nothing is not a whole number"),
                             ("DTYPE=F16", "DTYPE=F16 is not ACR_F32, ACR_F16, ACR_BF16 or ACR_E4M3")):
            self.run_fails(BAD_INPUT, said, "variant", "-o", self.path, f"{base}:{change}")
            self.run_fails(BAD_INPUT, said, "bench", "--backend", "cpu", problem, "--variant", f"{base}:{change}")
        self.assertEqual(sorted(p.name for p in self.path.iterdir()), kept)  # a failure leaves nothing behind
        self.run_ok("variant", "-o", self.path, variant)
        self.assertEqual(sorted(p.name for p in self.path.iterdir()), kept)
        self.run_fails(BAD_INPUT, "kernels.def", "variant", "-o", self.path, "fwd_nothing:A=1")
        self.run_fails(BAD_INPUT, "NAME=value", "bench", "--backend", "cpu", problem, "--variant", f"{base}:lower=1")
        self.run_fails(FILE, "no variants", "check", "--backend", "cpu", "--variant", ROOT / "docs")
        self.run_fails(USAGE, "-o", "variant", variant)

    def test_bench_records(self):
        output = self.path / "bench.json"
        for _ in range(2):  # the second adds to the file
            self.run_ok("bench", "--backend", "cpu", "--quick", "-k", "*_f32_*", "f32:b1:h2:s64:d64", "-o", output)
        records = json.loads(output.read_text())
        records = records if isinstance(records, list) else records["records"]
        self.assertGreaterEqual(len(records), 2)
        for record in records:
            for key in ("problem", "kernel", "mode", "overlap", "p50_us", "p90_us", "p99_us", "n", "ci95_us", "err_max",
                        "device", "driver", "clocks", "git_sha", "dirty", "seeds", "date"):
                self.assertIn(key, record)
            self.assertEqual(record["problem"], "f32:b1:h2:s64:d64")
            self.assertEqual(record["mode"], "stream")
            self.assertGreater(record["p50_us"], 0)
            self.assertLessEqual(record["p50_us"], record["p90_us"])
            self.assertLessEqual(record["p90_us"], record["p99_us"])
            low, high = record["ci95_us"]
            self.assertTrue(low <= record["p50_us"] <= high)

    def test_several_kernels(self):
        """Every -k counts, not the last one alone."""
        problem = "f32:b1:h1:s16:d16"
        one, other = ("-k", PORTABLE), ("-k", "fwd_simd_f32_*_avx2")
        seen = [{r["kernel"] for r in self.json_of("bench", "--backend", "cpu", "--quick", problem, *asked)}
                for asked in (one, other, one + other)]
        self.assertEqual(seen[0] | seen[1], seen[2])
        self.assertGreater(len(seen[2]), len(seen[1]))

    def test_bench_modes(self):
        for mode, launches in ("stream", None), ("call", 200), ("call-single", 1):
            record, = self.json_of("bench", "--backend", "cpu", "--quick", "-k", PORTABLE, "--mode", mode,
                                   "f32:b1:h1:s16:d16")
            self.assertEqual(record["mode"], mode)
            self.assertEqual(record["discarded"], 0)
            self.assertEqual(record["buffer_sets"], 1)
            self.assertEqual(record["launches"], launches or record["launches"])
        self.run_fails(USAGE, "'warm' is unknown", "bench", "--mode", "warm")
        self.run_fails(USAGE, "--publish goes with --peers", "bench", "--publish")

    def test_bench_lengths(self):
        problem = "f32:b9:h1:s16/64:d16:kvlens"
        asked = ("bench", "--backend", "cpu", "--quick", "-k", PORTABLE, "--lengths")
        work = {}
        for pattern in ("full", "skewed", "one-long"):
            record, = self.json_of(*asked, pattern, problem)
            self.assertEqual(record.get("lengths", "full"), pattern)
            work[pattern] = record["tflops"] * record["p50_us"]
        self.assertGreater(work["full"], work["skewed"])
        self.assertGreater(work["skewed"], work["one-long"])
        self.run_fails(USAGE, "'mixed-up' is unknown", *asked, "mixed-up")
        for pattern, of, wanted in (("one-long", "f32:b9:h1:s16/64:d16", "kvlens or packed"),
                                    ("mixed", problem, "packed queries")):
            self.run_fails(CANNOT_RUN, f"--lengths {pattern} goes with {wanted}", *asked, pattern, of)

    def test_bench_rotating_and_cold(self):
        """Where the cache's size is known, these work; elsewhere, or with too small a problem, they say why not."""
        rotating = ("bench", "--backend", "cpu", "--mode", "rotating", "-k", PORTABLE, "f32:b1:h1:s16:d16")
        self.run_fails(CANNOT_RUN, "rotating mode: ", *rotating)
        cold = ("bench", "--backend", "cpu", "--quick", "--mode", "cold", "--json", "-k", PORTABLE,
                "f32:b1:h1:s16:d16")
        done = execute(*cold)
        if done.returncode == CANNOT_RUN:
            self.assertIn("cold mode: the size of the last-level cache is unknown", done.stderr)
        else:
            self.assertEqual(done.returncode, DONE, done.stderr)
            record, = json.loads(done.stdout)
            self.assertEqual((record["mode"], record["launches"]), ("cold", 1))
            self.assertGreater(record["empty_us"], 0)

    def test_bench_paced_modes_are_about_gpus(self):
        for mode in "sustained", "full-clock":
            self.run_fails(CANNOT_RUN, f"{mode} mode: it is about a GPU's clock", "bench", "--backend", "cpu", "--mode",
                           mode, "-k", PORTABLE, "f32:b1:h1:s16:d16")

    def test_host_cost(self):
        output = self.path / "host.json"
        table = self.run_ok("bench", "--backend", "cpu", "--host-cost", "f32:b1:h1:s16:d16", "-o", output)
        self.assertIn("no driver launches it", table)
        records = json.loads(output.read_text())
        steps = [record["step"] for record in records]
        self.assertEqual(steps, ["acr_execute", "acr_forward", "plan look-up", "first call, cold process"])
        for record in records:
            self.assertEqual(record["mode"], "host")
            self.assertGreater(record["p50_us"], 0)
        self.run_fails(USAGE, "--host-cost goes with", "bench", "--host-cost", "--mode", "cold")

    def test_bench_json(self):
        report = self.json_of("bench", "--backend", "cpu", "--quick", "-k", PORTABLE, "f32:b1:h1:s16:d16")
        self.assertTrue(report)


class Wisdom(Cli):
    def test_measure_verify_show_merge_use(self):
        first, second, both = self.path / "a.wisdom", self.path / "b.wisdom", self.path / "both.wisdom"
        self.run_ok("wisdom", "measure", "f32:b1:h1:s16:d16", "-o", first, "--backend", "cpu")
        self.run_ok("wisdom", "measure", "f32:b1:h1:s24:d16", "-o", second, "--backend", "cpu", "--patient")
        self.assertIn("1", self.run_ok("wisdom", "verify", first, "--backend", "cpu"))
        self.run_ok("wisdom", "merge", first, second, "-o", both)
        shown = self.run_ok("wisdom", "show", both)
        for problem in ("f32:b1:h1:s16:d16", "f32:b1:h1:s24:d16"):
            self.assertIn(problem, shown)
        self.assertEqual(len(re.findall(r" = ", both.read_text())), 2)
        used = self.json_of("why", "f32:b1:h1:s24:d16", "--wisdom", both, "--backend", "cpu")[0]
        self.assertIn("wisdom", used["plan"])
        json.loads(self.run_ok("wisdom", "show", both, "--json"))

    def test_shipped_files(self):
        """They are whole: one was damaged once, when digests were put anew without the checksum."""
        files = sorted((ROOT / "wisdom").glob("*.wisdom"))
        self.assertTrue(files)
        for path in files:
            facts = self.json_of("wisdom", "show", path)
            self.assertTrue(facts)
            self.assertIn("sound", self.run_ok("wisdom", "verify", path, "--backend", "cpu"))

    def test_damaged_files(self):
        path = self.path / "a.wisdom"
        self.run_ok("wisdom", "measure", "f32:b1:h1:s16:d16", "-o", path, "--backend", "cpu")
        whole = path.read_text()
        path.write_text(whole.replace("effort=", "effort:"))
        self.run_fails(BAD_INPUT, "line 3", "wisdom", "verify", path, "--backend", "cpu")
        self.run_fails(BAD_INPUT, "line 3", "why", "--wisdom", path, "--backend", "cpu")
        path.write_text(whole[:-10])
        self.run_fails(BAD_INPUT, "line 4", "wisdom", "show", path)
        good = self.path / "good.wisdom"
        good.write_text(whole)
        self.run_fails(BAD_INPUT, "line", "wisdom", "merge", good, path, "-o", self.path / "out.wisdom")
        self.assertFalse((self.path / "out.wisdom").exists())
        self.run_fails(FILE, "nowhere", "wisdom", "verify", self.path / "nowhere")


class Outputs(Cli):
    """What cannot be written is said before any work begins, and nothing but a file is ever replaced."""

    def setUp(self):
        super().setUp()
        for name in "qkv":
            write_npy(self.path / f"{name}.npy", (1, 1, 2, 8), [0.5] * 16)
        self.inputs = ["run", "--backend", "cpu"]
        for name in "qkv":
            self.inputs += [f"--{name}", self.path / f"{name}.npy"]
        self.fifo = self.path / "fifo"
        os.mkfifo(self.fifo)

    def test_two_outputs_are_two_files(self):
        out = self.path / "o.npy"
        (self.path / "link").symlink_to("o.npy")
        for other in (out, self.path / "." / "o.npy", self.path / ".." / self.path.name / "o.npy"):
            self.run_fails(USAGE, "one file", *self.inputs, "-o", out, "--lse", other)
        self.assertFalse(out.exists())
        out.write_text("old")
        self.run_fails(USAGE, "one file", *self.inputs, "-o", out, "--lse", self.path / "link")
        self.assertEqual(out.read_text(), "old")

    def test_a_dash_is_no_file(self):
        for command in (self.inputs, ["bench", "--backend", "cpu"], ["wisdom", "measure"], ["report"]):
            self.run_fails(USAGE, "'-' is no file", *command, "-o", "-")

    def test_nothing_is_measured_for_a_place_that_takes_nothing(self):
        text = self.path / "text"
        text.write_text("# no results, no wisdom")
        long_work = "b8:h32:s16384:d128"
        for code, output in ((FILE, self.path / "none" / "x"), (FILE, self.path), (BAD_INPUT, text)):
            for command in (["bench", "--backend", "cpu", long_work], ["wisdom", "measure", long_work]):
                failed = self.run_fails(code, output, *command, "-o", output)
                self.assertEqual(failed.stdout, "")
        self.assertEqual(text.read_text(), "# no results, no wisdom")
        self.run_fails(FILE, "none", *self.inputs, "-o", self.path / "none" / "x")
        self.run_fails(FILE, "none", "report", "-o", self.path / "none" / "x")
        self.assertEqual([p.name for p in self.path.glob("*.??????")], [])

    def test_devices_and_fifos_are_not_replaced(self):
        self.run_fails(FILE, "nobody reads", *self.inputs, "-o", self.fifo)
        reader = subprocess.Popen(["cat", self.fifo], stdout=subprocess.PIPE)
        plain = self.path / "o.npy"
        self.run_ok(*self.inputs, "-o", plain)
        while execute(*self.inputs, "-o", self.fifo).returncode == FILE:
            pass  # the reader has not opened it yet
        self.assertEqual(reader.communicate()[0], plain.read_bytes())
        self.assertTrue(self.fifo.is_fifo())
        self.run_fails(FILE, "a FIFO", "wisdom", "measure", "-o", self.fifo)
        null = self.path / "null"
        try:
            os.mknod(null, 0o20666, os.makedev(1, 3))
            null.open("wb").close()
        except OSError:
            return  # not root, or a file system without devices
        self.run_ok(*self.inputs, "-o", null, "--lse", null)
        self.run_ok("bench", "--backend", "cpu", "--quick", "-k", PORTABLE, "f32:b1:h1:s4:d8", "-o", null)
        self.run_fails(FILE, "a character device", "wisdom", "measure", "-o", null)
        self.assertTrue(null.is_char_device())

    def test_a_fifo_as_input_does_not_hang(self):
        self.run_fails(FILE, "a FIFO", "run", "--q", self.fifo, "--k", self.fifo, "--v", self.fifo,
                       "-o", self.path / "o.npy")
        for action in ("show", "verify"):
            self.run_fails(FILE, self.fifo, "wisdom", action, self.fifo)

    def test_a_link_stays_a_link(self):
        out, link = self.path / "o.npy", self.path / "link"
        link.symlink_to("o.npy")
        self.run_ok(*self.inputs, "-o", out)
        self.run_ok(*self.inputs, "-o", link)
        self.assertTrue(link.is_symlink())

    def test_what_cannot_be_printed_is_a_failure(self):
        for command in (["info"], ["help"], ["--version"], ["why", "--json", "f32:b1:h1:s4:d8"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, FILE, command)
            self.assertIn("standard output: ", done.stderr)

    def test_a_file_is_named_once(self):
        missing = self.path / "missing"
        for command in (["wisdom", "show"], ["wisdom", "verify"], ["why", "--wisdom"], ["report"]):
            failed = self.run_fails(FILE, missing, *command, missing)
            self.assertEqual(failed.stderr.count(str(missing)), 1, failed.stderr)


class Manual(Cli):
    """The man page and the help say the same."""

    def test_every_environment_variable_is_in_the_man_page(self):
        page = (ROOT / "docs/manual/acromion.1").read_text()
        environment = page[page.index(".Sh ENVIRONMENT"):page.index(".Sh EXIT STATUS")]
        read = {"ACROMION_BENCH_LIBRARY"}  # by the Python package
        for folder in ("cli", "workbench", "search", "src"):
            for source in (ROOT / folder).rglob("*.c"):
                if "tests" not in source.parts:
                    read |= set(re.findall(r'getenv\("(\w+)"\)', source.read_text()))
        self.assertGreater(len(read), 5)
        for name in read - {"PATH", "PYTHONPATH"}:
            self.assertRegex(environment, rf"\b{name}\b")

    def test_every_option_and_command_is_in_the_man_page(self):
        page = (ROOT / "docs/manual/acromion.1").read_text().replace("\\-", "-")
        for command in COMMANDS:
            self.assertRegex(page, rf"\b{command}\b")
            for short, long in re.findall(r"^ +(?:-(\w), )?--([a-z0-9-]+)", self.run_ok(command, "--help"), re.M):
                names = rf"-{long}\b" + (rf"|Fl {short}\b" if short else "")
                self.assertTrue(re.search(names, page), f"{command} --{long} is not in acromion.1")

    def test_the_exit_codes_are_documented(self):
        header = (ROOT / "workbench/base/exit_code.h").read_text()
        page = (ROOT / "docs/manual/acromion.1").read_text()
        for code in re.findall(r"EXIT_\w+ = (\d)", header):
            self.assertRegex(page, rf"(?m)^\.It {code}\b|^\.(?:TP|IP).*\n?\.?B? *{code}\b", f"exit code {code}")


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
