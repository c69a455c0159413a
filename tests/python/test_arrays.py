#!/usr/bin/env python3
"""acromion.sdpa on NumPy's arrays, and on objects that only speak DLPack: values, refusals, threads. Needs the
installed package and NumPy; PyTorch is not used."""
import os
import sys
import threading
import unittest

import numpy as np

import acromion
from cases import table

CASES = 120
# The largest error allowed, as a share of the largest value: float32 sums in another order; float16 rounds the output,
# and a row with few keys may round its weights.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3}


def bhsd(array, layout):
    return array if layout == "bhsd" else array.transpose(0, 2, 1, 3)


def make(case, rng, heads, length, dim, expands=False):
    """An array [batch, heads, length, dim] that lies in memory as the case's view says."""
    shape = (case.batch, heads, length, dim)
    if case.view == "transposed":
        return rng.standard_normal((case.batch, length, heads, dim)).astype(case.dtype).transpose(0, 2, 1, 3)
    if case.view == "sliced":
        return rng.standard_normal((*shape[:3], dim + 8)).astype(case.dtype)[..., :dim]
    if case.view == "expanded" and expands:
        return np.broadcast_to(rng.standard_normal((1, *shape[1:])).astype(case.dtype), shape)
    if case.view == "offset":
        return rng.standard_normal(int(np.prod(shape)) + 1).astype(case.dtype)[1:].reshape(shape)
    return rng.standard_normal(shape).astype(case.dtype)


def reference(case, q, k, v, lens):
    """Output and log-sum-exp in float64."""
    group = case.q_heads // case.kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scale = case.scale or 1 / np.sqrt(case.qk_dim)
    scores = scale * (q.astype(np.float64) @ k.swapaxes(2, 3))
    keys, rows = np.arange(case.kv_len), np.arange(case.q_len)[:, None]
    length = np.array(lens if lens is not None else [case.kv_len] * case.batch)[:, None, None, None]
    visible = np.broadcast_to(keys < length, scores.shape)
    if case.align:
        diagonal = 0 if case.align == "top_left" else length - case.q_len
        visible = visible & (keys <= rows + diagonal)
    scores = np.where(visible, scores, -np.inf)
    top = np.where(visible.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return (weights / np.where(total == 0, 1, total)) @ v, lse


class DlpackOnly:
    """What a library without any other protocol offers."""

    def __init__(self, array, knows_versions):
        self.array, self.knows_versions = array, knows_versions

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        if keywords and not self.knows_versions:
            raise TypeError("an unexpected keyword")
        return self.array.__dlpack__()


class Values(unittest.TestCase):
    def test_table(self):
        for case in table(CASES, ("float32", "float16")):
            with self.subTest(str(case)):
                rng = np.random.default_rng(case.seed)
                q = make(case, rng, case.q_heads, case.q_len, case.qk_dim)
                k = make(case, rng, case.kv_heads, case.kv_len, case.qk_dim, expands=True)
                v = make(case, rng, case.kv_heads, case.kv_len, case.v_dim, expands=True)
                # NumPy before version 2 exports no read-only arrays, and broadcast ones are read-only.
                q, k, v = (x if x.flags.writeable else np.lib.stride_tricks.as_strided(x, writeable=True)
                           for x in (q, k, v))
                lens = case.lens()
                out, lse = acromion.sdpa(
                    *(bhsd(x, case.layout) for x in (q, k, v)), **case.arguments(),
                    kv_lens=None if lens is None else np.array(lens, dtype=np.int32))
                expected, expected_lse = reference(case, q, k, v, lens)
                limit = TOLERANCE[case.dtype] * max(1, np.abs(expected).max())
                error = np.abs(bhsd(out, case.layout) - expected).max()
                self.assertTrue(error <= limit, f"error {error}, limit {limit}")
                np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)

    def test_out_is_written_and_returned(self):
        q = np.random.default_rng(1).standard_normal((1, 2, 9, 16)).astype(np.float32)
        out = np.full((1, 9, 2, 16), np.nan, np.float32).transpose(0, 2, 1, 3)
        self.assertIs(acromion.sdpa(q, q, q, out=out), out)
        np.testing.assert_array_equal(out, acromion.sdpa(q, q, q))

    def test_objects_that_only_speak_dlpack(self):
        q = np.random.default_rng(2).standard_normal((1, 2, 9, 16)).astype(np.float32)
        expected = acromion.sdpa(q, q, q)
        for knows_versions in (True, False):
            wrapped, out = DlpackOnly(q, knows_versions), np.empty_like(q)
            self.assertIsNotNone(acromion.sdpa(wrapped, wrapped, wrapped, out=out))
            np.testing.assert_array_equal(out, expected)
        with self.assertRaisesRegex(TypeError, "out is needed"):
            acromion.sdpa(wrapped, wrapped, wrapped)

    def test_names_and_places_of_pytorch_s_arguments(self):
        q, k = (np.random.default_rng(5).standard_normal((1, 2, 9, 16)).astype(np.float32) for _ in range(2))
        expected = acromion.sdpa(q, k, k, is_causal=True)
        for found in (acromion.sdpa(query=q, key=k, value=k, attn_mask=None, dropout_p=0.0, is_causal=True),
                      acromion.sdpa(q, k, k, None, 0.0, True), acromion.sdpa(q, key=k, value=k, is_causal=True)):
            np.testing.assert_array_equal(found, expected)

    def test_masks_and_sinks(self):
        rng = np.random.default_rng(6)
        q, k, v = (rng.standard_normal((2, 4, n, 16), dtype=np.float32) for n in (5, 7, 7))
        bias, sinks = rng.standard_normal((4, 5, 7), dtype=np.float32), rng.standard_normal(4, dtype=np.float32)
        hidden = np.where(bias > -0.5, 0, -np.inf)
        for mask, added in ((bias, bias), (bias.astype(np.float16), bias), (bias > -0.5, hidden)):
            scores = q.astype(np.float64) @ k.swapaxes(2, 3) / 4 + added
            weights = np.exp(scores)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
            found = acromion.sdpa(q, k, v, mask, sinks=sinks)  # in PyTorch's place
            np.testing.assert_allclose(found, weights @ v, rtol=2e-3 if mask.dtype == np.float16 else 1e-5, atol=1e-3
                                       if mask.dtype == np.float16 else 1e-6)

    def test_the_namespace_holds_what_is_documented(self):
        self.assertEqual(set(dir(acromion)), set(acromion.__all__))
        for name in ("Any", "List", "TYPE_CHECKING"):
            self.assertFalse(hasattr(acromion, name), name)

    def test_no_rows(self):
        q, k = np.zeros((2, 3, 0, 8), np.float32), np.zeros((2, 3, 5, 8), np.float32)
        self.assertEqual(acromion.sdpa(q, k, k).shape, (2, 3, 0, 8))

    def test_more_plans_than_are_kept(self):
        """Lengths that grow by one, as in decoding: the table of plans is emptied on the way."""
        q, k = np.ones((1, 1, 1, 8), np.float32), np.ones((1, 1, 1100, 8), np.float32)
        for length in range(1, 1100):
            out = acromion.sdpa(q, k[:, :, :length], k[:, :, :length])
            np.testing.assert_allclose(out, 1, rtol=1e-6)

    def test_threads(self):
        """Many threads at once, larger than what one thread does alone; each result is that of a call on its own."""
        rng = np.random.default_rng(3)
        inputs = [rng.standard_normal((2, 4, 100 + i, 64)).astype(np.float32) for i in range(8)]
        expected = [acromion.sdpa(x, x, x, is_causal=True) for x in inputs]
        wrong = []

        def work(i):
            for _ in range(10):
                if not np.array_equal(acromion.sdpa(inputs[i], inputs[i], inputs[i], is_causal=True), expected[i]):
                    wrong.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_child_process(self):
        """A child by fork() has no threads of its parent; it makes its own."""
        q = np.random.default_rng(4).standard_normal((2, 8, 200, 64)).astype(np.float32)
        expected = acromion.sdpa(q, q, q)
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(acromion.sdpa(q, q, q), expected) else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


class Refusals(unittest.TestCase):
    q = np.zeros((2, 4, 6, 16), np.float32)

    def check(self, kind, text, *changed, **arguments):
        tensors = dict(zip("qkv", changed or (self.q, self.q, self.q)))
        with self.assertRaisesRegex(kind, text):
            acromion.sdpa(*(tensors.get(name, self.q) for name in "qkv"), **arguments)

    def test_tensors(self):
        q = self.q
        self.check(TypeError, "q is a <class 'list'>, which has no __dlpack__", [1])
        self.check(TypeError, "q is float64, must be float16, bfloat16, float32 or float8_e4m3fn",
                   *[q.astype(np.float64)] * 3)
        self.check(TypeError, "q is bool, must be float16", *[q.astype(bool)] * 3)
        self.check(TypeError, "q is complex64, must be float16", *[q.astype(np.complex64)] * 3)
        self.check(TypeError, "k is float16, must be float32", q, q.astype(np.float16))
        self.check(ValueError, "q has 3 dimensions, must have 4", q[0])
        self.check(ValueError, "q has 5 dimensions, at most 4", q[None])
        self.check(ValueError, "k has extent 1 in dimension 0, must be 2, q's batch", q, q[:1], q[:1])
        self.check(ValueError, "k has extent 8 in dimension 3, must be 16", q, q[..., :8])
        self.check(ValueError, "v has extent 5 in dimension 2, must be 6, k's length", q, q, q[:, :, :5])
        self.check(ValueError, "k has a stride of 2 in its last dimension",
                   q, np.zeros((2, 4, 6, 32), np.float32)[..., ::2])
        self.check(ValueError, "k has a negative stride", q, q[:, :, ::-1])
        self.check(ValueError, "k repeats one row everywhere",
                   q, np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), q.shape, (0, 0, 0, 4)))

    def test_heads(self):
        q = self.q
        self.check(ValueError, "q has 4 heads and k 2: fewer key heads need enable_gqa=True", q, q[:, :2], q[:, :2])
        self.check(ValueError, "q has 4 heads, must be a multiple of k's 3", q, q[:, :3], q[:, :3], enable_gqa=True)

    def test_masks(self):
        q, short = self.q, self.q[:, :, :4]
        self.check(ValueError, "is_causal with q_len 4 and kv_len 6: say causal_align", short, q, q, is_causal=True)
        self.check(ValueError, "causal_align is 'top_left', but is_causal is not True", causal_align="top_left")
        self.check(ValueError, "causal_align is 'left', must be", is_causal=True, causal_align="left")
        self.check(ValueError, "is_causal with kv_lens: say causal_align", is_causal=True, kv_lens=np.ones(2, np.int32))
        self.check(TypeError, "kv_lens is int64, must be int32", kv_lens=np.ones(2, np.int64))
        self.check(ValueError, "kv_lens must have one dimension of q's batch, 2", kv_lens=np.ones(3, np.int32))
        self.check(TypeError, "is_causal is 1, must be True or False", is_causal=1)

    def test_other_arguments(self):
        self.check(ValueError, "scale is 0, must be positive and finite", scale=0)
        self.check(ValueError, "scale is nan, must be positive and finite", scale=float("nan"))
        self.check(ValueError, "layout is 'sbhd', must be 'bhsd' or 'bshd'", layout="sbhd")
        self.check(ValueError, "attn_mask has a stride of 2 between keys", attn_mask=np.ones((6, 12), bool)[:, ::2])
        self.check(ValueError, "attn_mask has one value for all keys, must have 6", attn_mask=np.ones((6, 1), bool))
        self.check(ValueError, "attn_mask has a negative stride", attn_mask=np.ones((6, 6), bool)[::-1])
        self.check(TypeError, "attn_mask is float64, must be bool", attn_mask=np.ones((6, 6)))
        self.check(NotImplementedError, "dropout_p is 0.1, must be 0", dropout_p=0.1)
        self.check(TypeError, "unexpected keyword argument 'causal'", causal=True)
        with self.assertRaisesRegex(TypeError, "takes up to 6 positional arguments"):
            acromion.sdpa(self.q, self.q, self.q, None, 0.0, True, 0.5)
        with self.assertRaisesRegex(TypeError, "multiple values for argument 'q'"):
            acromion.sdpa(self.q, self.q, self.q, query=self.q)
        with self.assertRaisesRegex(TypeError, "multiple values for argument 'q'"):
            acromion.sdpa(self.q, self.q, self.q, q=self.q)
        with self.assertRaisesRegex(TypeError, "missing the argument 'v'"):
            acromion.sdpa(self.q, self.q)

    def test_out(self):
        self.check(ValueError, "out has extent 5 in dimension 2, must be 6", out=self.q[:, :, :5].copy())
        self.check(TypeError, "out is float16, must be float32", out=self.q.astype(np.float16))
        frozen = self.q.copy()
        frozen.flags.writeable = False
        with self.assertRaises((ValueError, BufferError, TypeError)):  # ours, or NumPy's own before version 2
            acromion.sdpa(self.q, self.q, self.q, out=frozen)
        with self.assertRaises(acromion.InvalidError) as raised:
            acromion.sdpa(self.q, self.q, self.q, out=self.q)
        self.assertEqual(raised.exception.status, -11)
        self.assertEqual(str(raised.exception), "out overlaps q")

    def test_library_limits(self):
        wide = np.zeros((1, 1, 2, 5000), np.float32)
        with self.assertRaises(acromion.UnsupportedError) as raised:
            acromion.sdpa(wide, wide, wide)
        self.assertIsInstance(raised.exception, NotImplementedError)
        self.assertEqual(raised.exception.status, -2)

    def test_wisdom(self):
        with self.assertRaises(acromion.Error) as raised:
            acromion.import_wisdom("no-such-file", "cpu")
        self.assertEqual(raised.exception.status, -7)
        with self.assertRaisesRegex(acromion.Error, "cannot open no-such-file: No such file"):  # not: no driver
            acromion.import_wisdom("no-such-file")
        with self.assertRaisesRegex(ValueError, "device is 'tpu'"):
            acromion.import_wisdom("no-such-file", "tpu")

    def test_no_memory_is_kept(self):
        """Refused and served calls alike leave their arguments as referenced as before."""
        q, out = self.q.copy(), np.empty_like(self.q)
        before = sys.getrefcount(q), sys.getrefcount(out)
        for _ in range(50):
            acromion.sdpa(q, q, q, out=out, return_lse=True)
            with self.assertRaises(ValueError):
                acromion.sdpa(q, q, q, out=out, scale=-1)
        self.assertEqual((sys.getrefcount(q), sys.getrefcount(out)), before)


if __name__ == "__main__":
    unittest.main()
