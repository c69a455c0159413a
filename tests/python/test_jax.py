#!/usr/bin/env python3
"""acromion.jax.sdpa on the CPU against the definition in float64 and jax.nn.dot_product_attention: values, jit, vmap,
several devices, threads, refusals. Needs the installed package and JAX; PyTorch is not used."""
import functools
import itertools
import os
import subprocess
import sys
import threading
import unittest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402: after what it reads from the environment
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import acromion  # noqa: E402
import acromion.jax  # noqa: E402
import definition  # noqa: E402
from cases import table  # noqa: E402

sdpa = acromion.jax.sdpa
CASES = 24
# The largest error allowed, as a share of the largest value: float32 sums in another order; the others round the
# output, and a row with few keys may round its weights.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
LSE_TOLERANCE = 2e-4


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def int32(*values):
    return jnp.array(values, jnp.int32)


def double(x):
    """What the definition takes: float64, or the integers and truths as they are."""
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def swap(x, layout):
    return x if layout == "bhsd" else x.swapaxes(1, 2)


class Case(unittest.TestCase):
    def near(self, found, expected, tolerance):
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        self.assertEqual(found.shape, expected.shape)
        with np.errstate(invalid="ignore"):
            error = np.where(found == expected, 0, np.abs(found - expected))  # infinities that are equal
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=1e-30)
        self.assertLessEqual(error.max(initial=0), tolerance * largest)

    def check(self, q, k, v, layout="bhsd", **given):
        """Output and log-sum-exp are those of the definition."""
        out, lse = sdpa(q, k, v, layout=layout, enable_gqa=True, return_lse=True, **given)
        plain = {name: double(x) for name, x in given.items()}
        expected, expected_lse = definition.attention(*(swap(double(x), layout) for x in (q, k, v)), **plain)
        self.assertEqual(out.dtype, q.dtype)
        self.near(out, swap(expected, layout), TOLERANCE[q.dtype.name])
        self.near(lse, expected_lse, LSE_TOLERANCE)
        return out


class Values(Case):
    BATCH, HEADS, Q, KV = 3, 4, 20, 53

    def tensors(self, dtype=jnp.float32):
        return (normal(1, 3, 4, 20, 64, dtype=dtype), normal(2, 3, 2, 53, 64, dtype=dtype),
                normal(3, 3, 2, 53, 64, dtype=dtype))

    @staticmethod
    def arguments():
        """Every argument alone, most with a causal mask as well, and all that can stand together."""
        causal = {"is_causal": True, "causal_align": "bottom_right"}
        tree = np.random.default_rng(5).integers(0, 256, (3, 20, 3), np.uint8)
        terms = {
            "scale": {"scale": 0.3}, "softcap": {"softcap": 0.7}, "sinks": {"sinks": normal(6, 4)},
            "window": {"window": 9}, "both sides": {"window": (9, 4)}, "chunk": {"chunk": 16},
            "lens": {"kv_lens": int32(53, 0, 17)}, "starts": {"kv_starts": int32(0, 50, 7)},
            "alibi": {"alibi_slopes": jnp.array([0.5, 0.25, 0.1, 0.01], jnp.float32)},
            "ranges": {"ranges": int32(20, 41, 5, 5, 30, 50, 16, 30, 0, 53, 4, 60).reshape(3, 2, 2)},
            "tree": {"tree": jnp.asarray(tree)}, "mask": {"attn_mask": normal(7, 3, 1, 20, 53) > 0},
            "bias": {"attn_mask": normal(8, 4, 20, 53)}, "bias16": {"attn_mask": normal(8, 20, 53, dtype=jnp.bfloat16)},
            "one value": {"attn_mask": normal(9, 20, 1) > -1},
        }
        found = {"plain": {}, "causal": causal, "top left": {"is_causal": True, "causal_align": "top_left"}, **terms}
        found |= {f"causal {name}": {**causal, **given} for name, given in terms.items()}
        found["together"] = {**causal, **terms["softcap"], **terms["sinks"], **terms["alibi"], **terms["bias"],
                             **terms["starts"], "window": 20, "kv_lens": int32(53, 40, 50)}
        return found

    def test_every_argument(self):
        for name, given in self.arguments().items():
            for dtype in (jnp.float32, jnp.bfloat16):
                with self.subTest(f"{name} {dtype.__name__}"):
                    self.check(*self.tensors(dtype), **given)

    def test_the_table(self):
        for case in table(CASES, ("float32", "float16", "bfloat16")):
            with self.subTest(str(case)):
                shapes = ((case.q_heads, case.q_len, case.qk_dim), (case.kv_heads, case.kv_len, case.qk_dim),
                          (case.kv_heads, case.kv_len, case.v_dim))
                q, k, v = (swap(normal(case.seed * 3 + i, case.batch, *shape, dtype=case.dtype), case.layout)
                           for i, shape in enumerate(shapes))
                lens = case.lens()
                given = {"causal_align": case.align, "is_causal": case.align is not None, "scale": case.scale}
                self.check(q, k, v, case.layout, kv_lens=None if lens is None else int32(*lens), **given)

    def test_beside_jax(self):
        q, k, v = (normal(i, 2, 24, heads, 32) for i, heads in ((1, 4), (2, 2), (3, 2)))
        lens, bias = int32(24, 11), normal(4, 2, 4, 24, 24)
        for ours, theirs in (({}, {}), ({"is_causal": True}, {"is_causal": True}), ({"scale": 0.2}, {"scale": 0.2}),
                             ({"attn_mask": bias}, {"bias": bias}), ({"attn_mask": bias > 0}, {"mask": bias > 0}),
                             ({"kv_lens": lens}, {"key_value_seq_lengths": lens}),
                             ({"is_causal": True, "window": 5}, {"is_causal": True, "local_window_size": (4, 0)})):
            with self.subTest(str(list(ours))):
                found = sdpa(q, k, v, layout="bshd", enable_gqa=True, **ours)
                self.near(found, jax.nn.dot_product_attention(q, k, v, **theirs), 1e-5)

    def test_8_bit_floats(self):
        q, k, v = (normal(i, 2, heads, 40, 32, dtype=jnp.float8_e4m3fn) for i, heads in ((1, 4), (2, 2), (3, 2)))
        each = jnp.array([[0.5, 2], [1, 0.25]], jnp.float32)
        for scales in ({}, {"q_scale": 0.5, "v_scale": 2}, {"k_scale": each, "v_scale": each}):
            for dtype in (None, jnp.bfloat16):
                with self.subTest(f"{list(scales)} {dtype}"):
                    by = {name: np.broadcast_to(double(scales.get(f"{name}_scale", 1.0)), (2, 2))[..., None, None]
                          for name in "qkv"}
                    by["q"] = np.repeat(by["q"], 2, axis=1)
                    expected, _ = definition.attention(*(double(x) * by[name] for x, name in zip((q, k, v), "qkv")))
                    out = sdpa(q, k, v, enable_gqa=True, out_dtype=dtype, **scales)
                    self.assertEqual(out.dtype, dtype or jnp.float16)
                    self.near(out, expected, 6e-2)
        traced = jax.jit(lambda s: sdpa(q, k, v, enable_gqa=True, k_scale=s))(0.5)
        np.testing.assert_array_equal(traced, sdpa(q, k, v, enable_gqa=True, k_scale=0.5))

    def test_packed(self):
        lengths = ((5, 9), (12, 12), (30, 41))
        q_offsets, kv_offsets = (int32(0, *itertools.accumulate(n)) for n in zip(*lengths))
        q, k, v = normal(1, 47, 4, 32), normal(2, 62, 2, 32), normal(3, 62, 2, 32)
        bias = normal(4, 3, 1, 30, 41)
        out, lse = sdpa(q, k, v, bias, is_causal=True, causal_align="bottom_right", enable_gqa=True, return_lse=True,
                        q_offsets=q_offsets, kv_offsets=kv_offsets, max_q_len=30, max_kv_len=41)
        self.assertEqual(lse.shape, (4, 47))
        for b, (rows, keys) in enumerate(lengths):
            at = slice(int(q_offsets[b]), int(q_offsets[b + 1]))
            own = slice(int(kv_offsets[b]), int(kv_offsets[b + 1]))
            alone = (double(x).swapaxes(0, 1)[None] for x in (q[at], k[own], v[own]))
            expected, expected_lse = definition.attention(*alone, attn_mask=double(bias[b, :, :rows, :keys]),
                                                          is_causal=True, causal_align="bottom_right")
            self.near(out[at], expected[0].swapaxes(0, 1), TOLERANCE["float32"])
            self.near(lse[:, at], expected_lse[0], LSE_TOLERANCE)

    def test_no_rows(self):
        q, k = jnp.zeros((2, 3, 0, 8)), jnp.zeros((2, 3, 5, 4))
        out, lse = sdpa(q, jnp.zeros((2, 3, 5, 8)), k, return_lse=True)
        self.assertEqual((out.shape, lse.shape), ((2, 3, 0, 4), (2, 3, 0)))

    def test_arrays_of_numpy(self):
        q = np.random.default_rng(1).standard_normal((1, 2, 5, 8), np.float32)
        np.testing.assert_array_equal(sdpa(q, q, q), acromion.sdpa(q, q, q))


class Jit(Case):
    def test_as_the_call_alone(self):
        q, k, v = Values().tensors()
        for name, given in Values.arguments().items():
            if name.startswith("causal "):
                continue
            traced = {key: x for key, x in given.items() if isinstance(x, jax.Array)}
            known = {key: x for key, x in given.items() if key not in traced}
            with self.subTest(name):
                call = functools.partial(sdpa, enable_gqa=True, return_lse=True, **known)
                for found, expected in zip(jax.jit(call)(q, k, v, **traced), call(q, k, v, **traced)):
                    np.testing.assert_array_equal(found, expected)

    def test_once_traced_for_all_values(self):
        traces = []

        @jax.jit
        def call(q, lens):
            traces.append(1)
            return sdpa(q, q, q, kv_lens=lens)
        q = normal(1, 2, 2, 9, 8)
        for lens in (int32(9, 3), int32(1, 5)):
            np.testing.assert_array_equal(call(q, lens), sdpa(q, q, q, kv_lens=lens))
        self.assertEqual(len(traces), 1)

    def test_inside_of_loops(self):
        q = normal(1, 1, 2, 9, 8)
        found = jax.jit(lambda q: jax.lax.fori_loop(0, 3, lambda i, x: sdpa(x, q, q), q))(q)
        expected = q
        for _ in range(3):
            expected = sdpa(expected, q, q)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    def test_lowers_for_cuda(self):
        """Without a GPU: what XLA would be given."""
        q = normal(1, 2, 4, 64, 64, dtype=jnp.float16)
        lowered = jax.jit(lambda q: sdpa(q, q, q, is_causal=True)).trace(q).lower(lowering_platforms=("cuda",))
        self.assertIn('@acromion_sdpa(%arg0, %arg0, %arg0)', lowered.as_text())
        self.assertIn('operands = "q k v"', lowered.as_text())

    def test_explain(self):
        q = jax.ShapeDtypeStruct((1, 2, 5, 8), jnp.float32)
        arrays = [jnp.zeros(q.shape)] * 3
        self.assertIn("f32:b1:h2:s5:d8", acromion.jax.explain(*arrays))
        self.assertIn(":causal", acromion.jax.explain(*arrays, is_causal=True, window=3, device=jax.devices()[1]))
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'causal'"):
            acromion.jax.explain(*arrays, causal=True)


class Vmap(Case):
    def compare(self, axes, named_axes, tensors, named, **known):
        """vmap gives what calls one after another give."""
        size = 3

        def call(q, k, v, named):
            return sdpa(q, k, v, enable_gqa=True, return_lse=True, **known, **named)

        tensors, named = [np.asarray(x) for x in tensors], {name: np.asarray(x) for name, x in named.items()}

        def at(x, axis, i):
            return x if axis is None else np.take(x, i, axis)
        found = jax.vmap(call, in_axes=(*axes, named_axes))(*tensors, named)
        for i in range(size):
            alone = call(*(at(x, axis, i) for x, axis in zip(tensors, axes)),
                         {name: at(x, named_axes[name], i) for name, x in named.items()})
            for part, expected in zip(found, alone):
                self.near(part[i], expected, 1e-5)

    def operand(self, seed, axis, shape, make=normal):
        return make(seed, *shape) if axis is None else make(seed, *shape[:axis], 3, *shape[axis:])

    def test_axes_of_q_k_v(self):
        for batch, layout in itertools.product((1, 2), ("bhsd", "bshd")):
            shapes = [(batch, 4, 7, 16), (batch, 2, 9, 16), (batch, 2, 9, 8)]
            if layout == "bshd":
                shapes = [(b, s, h, d) for b, h, s, d in shapes]
            for axes in itertools.product((None, 0, 2) if batch == 1 and layout == "bhsd" else (None, 1), repeat=3):
                if axes == (None, None, None):
                    continue
                with self.subTest(f"batch {batch}, {layout}, {axes}"):
                    tensors = [self.operand(i, axis, shape) for i, (axis, shape) in enumerate(zip(axes, shapes))]
                    self.compare(axes, {}, tensors, {}, layout=layout)

    @staticmethod
    def lens(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).integers(0, 10, shape), jnp.int32)

    @staticmethod
    def bits(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).integers(0, 256, shape), jnp.uint8)

    def test_axes_of_the_others(self):
        for batch in (1, 2):
            shapes = {"kv_lens": ((batch,), self.lens), "kv_starts": ((batch,), self.lens), "sinks": ((4,), normal),
                      "alibi_slopes": ((4,), normal), "tree": ((batch, 7, 1), self.bits),
                      "ranges": ((batch, 3, 2), self.lens)}
            for ones in ((False, False, False), (True, False, False), (False, True, False), (True, True, True)):
                own = [1 if one else extent for one, extent in zip(ones, (batch, 4, 7))]
                shapes[f"attn_mask {own}"] = ((*own, 9), normal)
            for name, (shape, make) in shapes.items():
                mains = ((0, 0, 0), (1, None, None), (None,) * 3)
                for axis, main in [*((len(shape), main) for main in mains), (None, mains[batch - 1])]:
                    with self.subTest(f"{name} at {axis}, q, k, v at {main}, batch {batch}"):
                        tensors = [self.operand(i, a, x) for i, (a, x) in enumerate(zip(
                            main, ((batch, 4, 7, 16), (batch, 2, 9, 16), (batch, 2, 9, 8))))]
                        argument = name.split()[0]
                        self.compare(main, {argument: axis}, tensors, {argument: self.operand(9, axis, shape, make)})

    def test_together(self):
        """Sinks that differ make heads of the mapped dimension, with everything that heads may have."""
        tensors = [normal(i, *shape) for i, shape in enumerate(((3, 2, 7, 4, 16), (2, 9, 2, 16), (3, 2, 9, 2, 8)))]
        named = {"sinks": normal(4, 3, 4), "alibi_slopes": normal(5, 4), "attn_mask": normal(6, 2, 1, 7, 9),
                 "kv_lens": int32(9, 4)}
        axes = {"sinks": 0, "alibi_slopes": None, "attn_mask": None, "kv_lens": None}
        self.compare((0, None, 0), axes, tensors, named, layout="bshd")
        axes["attn_mask"], named["attn_mask"] = 0, normal(7, 3, 2, 1, 7, 9)
        self.compare((0, None, 0), axes, tensors, named, layout="bshd")

    def test_nested(self):
        q, k, v = normal(1, 2, 3, 1, 4, 7, 16), normal(2, 3, 1, 2, 9, 16), normal(3, 2, 1, 2, 9, 16)
        call = functools.partial(sdpa, enable_gqa=True)
        found = jax.jit(jax.vmap(jax.vmap(call, (0, 0, None)), (0, None, 0)))(q, k, v)
        for i, j in itertools.product(range(2), range(3)):
            self.near(found[i, j], call(q[i, j], k[j], v[i]), 1e-5)

    def test_shared_keys_are_not_copied(self):
        q, k = normal(1, 3, 1, 4, 7, 16), normal(2, 1, 4, 9, 16)
        text = jax.jit(jax.vmap(lambda q: sdpa(q, k, k))).lower(q).as_text()
        self.assertIn("tensor<3x4x7x16xf32>, tensor<1x4x9x16xf32>, tensor<1x4x9x16xf32>", text)

    def test_refusals(self):
        q, k = normal(1, 3, 1, 4, 7, 16), normal(2, 1, 4, 9, 16)
        both = "vmap over sinks, .* and over kv_lens, .* use jax.lax.map"
        with self.assertRaisesRegex(acromion.UnsupportedError, both):
            jax.vmap(lambda q, s, n: sdpa(q, k, k, sinks=s, kv_lens=n))(q, normal(3, 3, 4), self.lens(4, 3, 1))
        with self.assertRaisesRegex(acromion.UnsupportedError, "vmap over packed sequences"):
            jax.vmap(lambda q: sdpa(q, q, q, q_offsets=int32(0, 4), kv_offsets=int32(0, 4)))(normal(1, 3, 4, 2, 8))


class Devices(Case):
    def test_each(self):
        q = normal(1, 2, 2, 33, 16)
        expected = sdpa(q, q, q)
        for device in jax.devices():
            there = jax.device_put(q, device)
            for found in (sdpa(there, there, there), jax.jit(lambda x: sdpa(x, x, x))(there)):
                self.assertEqual(found.devices(), {device})
                np.testing.assert_array_equal(found, expected)
        self.assertEqual(len(jax.devices()), 3)

    def test_shard_map(self):
        """Batch and heads over devices: each computes its part."""
        shard_map = getattr(jax, "shard_map", None)
        if shard_map is None:
            from jax.experimental.shard_map import shard_map
        q, k, lens = normal(1, 3, 6, 9, 16), normal(2, 3, 3, 11, 16), int32(11, 4, 7)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        P = jax.sharding.PartitionSpec
        call = functools.partial(sdpa, enable_gqa=True, return_lse=True)
        for specs, out in (((P("x"), P("x"), P("x")), P("x")), ((P(None, "x"), P(None, "x"), P()), P(None, "x"))):
            split = shard_map(lambda q, k, lens: tuple(call(q, k, k, kv_lens=lens)), mesh=mesh, in_specs=specs,
                              out_specs=(out, out))
            for found, expected in zip(jax.jit(split)(q, k, lens), call(q, k, k, kv_lens=lens)):
                np.testing.assert_array_equal(found, expected)

    def test_threads(self):
        """Many threads at once, on one device and on several; each result is that of a call on its own."""
        inputs = [jax.device_put(normal(i, 2, 4, 100 + i, 64), jax.devices()[i % 3]) for i in range(8)]
        call = jax.jit(lambda x: sdpa(x, x, x, is_causal=True))
        expected = [np.asarray(call(x)) for x in inputs]
        wrong = []

        def work(i):
            for _ in range(10):
                if not np.array_equal(call(inputs[i]), expected[i]):
                    wrong.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


class Refusals(unittest.TestCase):
    q = jnp.zeros((2, 4, 6, 16), jnp.float32)

    def check(self, kind, text, *changed, **arguments):
        """While it is traced: nothing is compiled or run."""
        tensors = changed or (self.q, self.q, self.q)
        with self.assertRaisesRegex(kind, text):
            jax.eval_shape(lambda *x: sdpa(*x, **arguments), *tensors)

    def test_tensors(self):
        q = self.q
        self.check(TypeError, "k is float16, must be float32", q, q.astype(jnp.float16), q)
        self.check(TypeError, "q is int32, must be float16, bfloat16", *[q.astype(jnp.int32)] * 3)
        self.check(TypeError, "q is float8_e5m2, must be float16", *[q.astype(jnp.float8_e5m2)] * 3)
        self.check(ValueError, "q has 3 dimensions, must have 4", q[0], q, q)
        self.check(ValueError, "q has 5 dimensions, at most 4", q[None], q, q)
        self.check(ValueError, "k has extent 1 in dimension 0, must be 2, q's batch", q, q[:1], q[:1])
        self.check(ValueError, "k has extent 8 in dimension 3, must be 16", q, q[..., :8], q)
        self.check(ValueError, "v has extent 5 in dimension 2, must be 6, k's length", q, q, q[:, :, :5])
        self.check(ValueError, "q has 4 heads and k 2: fewer key heads need enable_gqa=True", q, q[:, :2], q[:, :2])

    def test_arguments(self):
        q, short = self.q, self.q[:, :, :4]
        self.check(ValueError, "is_causal with q_len 4 and kv_len 6: say causal_align", short, q, q, is_causal=True)
        self.check(ValueError, "layout is 'sbhd', must be 'bhsd' or 'bshd'", layout="sbhd")
        self.check(ValueError, "scale is -1", scale=-1)
        self.check(ValueError, "window has 0, must be positive", window=0)
        self.check(TypeError, "kv_lens is float32, must be int32", kv_lens=jnp.ones(2))
        self.check(ValueError, "kv_lens must have one dimension of q's batch, 2", kv_lens=int32(1, 2, 3))
        self.check(ValueError, "sinks must have one dimension of q's heads, 4", sinks=jnp.ones(2))
        self.check(ValueError, "attn_mask has extent 5 for the length of q, must be 1 or 6", attn_mask=jnp.ones((5, 6)))
        self.check(TypeError, "q is float32, must be float8_e4m3fn: no other", q_scale=jnp.ones((2, 4)))
        self.check(TypeError, "out is float16, must be float32", out_dtype=jnp.float16)
        self.check(NotImplementedError, "dropout_p is 0.1, must be 0", dropout_p=0.1)
        with self.assertRaisesRegex(TypeError, "scale is traced: .* must be known when the function is traced"):
            jax.jit(lambda q, scale: sdpa(q, q, q, scale=scale))(q, 0.5)

    def test_no_kernel(self):
        wide = jnp.zeros((1, 1, 2, 5000), jnp.float32)
        with self.assertRaises(acromion.UnsupportedError):
            jax.jit(lambda q: sdpa(q, q, q)).lower(wide)

    def test_other_versions_programs(self):
        """Programs are kept in files: what the compiled half does not understand it refuses when it is called."""
        q = normal(1, 1, 2, 5, 8)
        bytes_ = acromion._native.problem(*[(q.shape, None, "float32")] * 3)
        good = np.frombuffer(bytes_, np.int64)
        grown = np.append(good, 0)
        grown[0] += 8  # size, in the lower half

        def call(operands="q k v", **attributes):
            result = jax.ShapeDtypeStruct(q.shape, q.dtype)
            return np.asarray(jax.ffi.ffi_call("acromion_sdpa", result)(q, q, q, operands=operands, **attributes))
        np.testing.assert_array_equal(call(problem=good), sdpa(q, q, q))
        for text, attributes in (("attribute problem is missing", {}), ("another version", {"problem": grown}),
                                 ("another version", {"problem": good[:-1]}),
                                 ("the operand soft is not known", {"problem": good, "operands": "q k soft"}),
                                 ("2 operands are named and 3 given", {"problem": good, "operands": "q k"}),
                                 ("4 operands are named and 3 given", {"problem": good, "operands": "q k v sinks"}),
                                 ("q, k, v or a result is missing", {"problem": good, "operands": "q k sinks"})):
            with self.subTest(text), self.assertRaisesRegex(Exception, f"acromion.jax.sdpa: .*{text}"):
                call(**attributes)


class Imports(unittest.TestCase):
    def test_nothing_else_is_loaded(self):
        """acromion loads no JAX, and acromion.jax no PyTorch, even where it is installed."""
        for program in ("import acromion, sys; acromion.sdpa; assert 'jax' not in sys.modules",
                        "import acromion.jax, sys; assert 'torch' not in sys.modules"):
            subprocess.run([sys.executable, "-c", program], check=True)


def by_definition(q, k, v, visible=None, softcap=None, sinks=None, bias=0.0):
    """Attention in JAX's own operations, [batch, heads, length, dim], for gradients."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    s = (s if softcap is None else softcap * jnp.tanh(s / softcap)) + bias
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate((s, jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))), -1)
    return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s, -1)[..., :k.shape[2]], v)


class Gradients(Case):
    CAUSAL = np.tril(np.ones((9, 9), bool))
    WINDOW = CAUSAL & ~np.tril(np.ones((9, 9), bool), -4)
    LENS = np.arange(9) < np.array([5, 9])[:, None, None, None]

    def setUp(self):
        self.q, self.k, self.v = normal(1, 2, 4, 9, 16), normal(2, 2, 2, 9, 16), normal(3, 2, 2, 9, 24)
        self.weight = normal(4, 2, 4, 9, 24)

    def compare(self, ours, theirs, inputs, tolerance=2e-6):
        found, expected = (jax.jit(jax.grad(lambda *x, f=f: (f(*x).astype(jnp.float32) * self.weight).sum(),
                                            tuple(range(len(inputs)))))(*inputs) for f in (ours, theirs))
        for x, y, given in zip(found, expected, inputs):
            self.assertEqual(x.dtype, given.dtype)
            self.near(x.astype(jnp.float32), y.astype(jnp.float32), tolerance)

    def test_values(self):
        bias = normal(5, 1, 4, 9, 9)
        inputs = (self.q, self.k, self.v)
        for options, definition_of in (
                ({}, {}), ({"is_causal": True}, {"visible": self.CAUSAL}),
                ({"is_causal": True, "window": 4}, {"visible": self.WINDOW}),
                ({"softcap": 1.5, "is_causal": True}, {"visible": self.CAUSAL, "softcap": 1.5}),
                ({"kv_lens": int32(5, 9)}, {"visible": self.LENS}), ({"attn_mask": bias}, {"bias": bias}),
                ({"return_lse": True}, {})):
            with self.subTest(**{name: str(value) for name, value in options.items()}):
                def ours(q, k, v, options=options):
                    found = sdpa(q, k, v, enable_gqa=True, **options)
                    return found[0] if "return_lse" in options else found
                self.compare(ours, functools.partial(by_definition, **definition_of), inputs)

    def test_sinks_and_types(self):
        self.compare(lambda q, k, v, s: sdpa(q, k, v, enable_gqa=True, sinks=s),
                     lambda q, k, v, s: by_definition(q, k, v, sinks=s), (self.q, self.k, self.v, normal(6, 4)))
        for dtype in (jnp.float16, jnp.bfloat16):
            inputs = tuple(x.astype(dtype) for x in (self.q, self.k, self.v))
            self.compare(lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
                         lambda *x: by_definition(*(y.astype(jnp.float32) for y in x)), inputs, TOLERANCE[
                             jnp.dtype(dtype).name] * 4)

    def test_layout_and_packed(self):
        turned = tuple(x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
        self.compare(lambda *x: sdpa(*x, enable_gqa=True, layout="bshd").swapaxes(1, 2),
                     lambda *x: by_definition(*(y.swapaxes(1, 2) for y in x)), turned)
        # A row before, and two behind, belong to no sequence.
        q, k, v = normal(1, 12, 2, 16), normal(2, 12, 2, 16), normal(3, 12, 2, 16)
        self.weight, offsets = normal(4, 9, 2, 16), int32(1, 5, 10)

        def one_by_one(q, k, v):
            parts = [by_definition(*(x[None, a:b].swapaxes(1, 2) for x in (q, k, v)))[0].swapaxes(0, 1)
                     for a, b in ((1, 5), (5, 10))]
            return jnp.concatenate(parts)
        self.compare(lambda *x: sdpa(*x, q_offsets=offsets, kv_offsets=offsets)[1:10], one_by_one, (q, k, v))

    def test_vmap(self):
        many = tuple(jnp.stack((x, 2 * x, x - 1)) for x in (self.q, self.k, self.v))
        sinks = normal(6, 4)

        def of(function):
            return jax.grad(lambda q, k, v: (function(q, k, v) * self.weight).sum(), (0, 1, 2))
        for axes in ((0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)):
            inputs = [x if axis == 0 else x[0] for x, axis in zip(many, axes)]
            for more in ({}, {"sinks": sinks}):
                with self.subTest(axes=axes, more=more.keys()):
                    found = jax.vmap(of(lambda *x, m=more: sdpa(*x, enable_gqa=True, **m)), axes)(*inputs)
                    expected = jax.vmap(of(lambda *x, m=more: by_definition(*x, **m)), axes)(*inputs)
                    for x, y in zip(found, expected):
                        self.near(x, y, 2e-6)
        # The gradient of a sum over copies, of an input that all copies share.
        def of_all(function):
            def total(k, sinks):
                return jax.vmap(lambda q, v: function(q, k, v, sinks=sinks))(many[0], many[2]).sum()
            return jax.grad(total, (0, 1))(self.k, sinks)
        found, expected = of_all(functools.partial(sdpa, enable_gqa=True)), of_all(by_definition)
        for x, y in zip(found, expected):
            self.near(x, y, 4e-6)

    def test_shard_map(self):
        shard_map = getattr(jax, "shard_map", None)
        if shard_map is None:
            from jax.experimental.shard_map import shard_map
        q, k, lens = normal(1, 3, 6, 9, 16), normal(2, 3, 3, 11, 16), int32(11, 4, 7)
        mesh, P = jax.sharding.Mesh(np.array(jax.devices()), ("x",)), jax.sharding.PartitionSpec

        def attend(q, k, lens):
            return sdpa(q, k, k, enable_gqa=True, kv_lens=lens)
        split = shard_map(attend, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
        # Keys that all devices have: their gradient is the sum over devices.
        one = shard_map(lambda q, k: sdpa(q, k, k, enable_gqa=True), mesh=mesh, in_specs=(P("x"), P()),
                        out_specs=P("x"))
        for ours, theirs, keys in ((lambda q, k: split(q, k, lens), lambda q, k: attend(q, k, lens), k),
                                   (one, lambda q, k: sdpa(q, jnp.repeat(k, 3, 0), jnp.repeat(k, 3, 0),
                                                           enable_gqa=True), k[:1])):
            found, expected = (jax.jit(jax.grad(lambda q, k, f=f: (f(q, k) ** 2).sum(), (0, 1)))(q, keys)
                               for f in (ours, theirs))
            for x, y in zip(found, expected):
                self.near(x, y, 2e-6)

    def test_same_bits(self):
        gradient = jax.jit(jax.grad(lambda q: (sdpa(q, self.k, self.v, enable_gqa=True) * self.weight).sum()))
        np.testing.assert_array_equal(gradient(self.q), gradient(self.q))

    def test_refusals(self):
        q = normal(1, 1, 2, 5, 8)
        ranges = jnp.zeros((1, 5, 2), jnp.int32).at[:, :, 1].set(5)
        for text, transform in (
                ("attn_mask requires a gradient", lambda: jax.grad(
                    lambda m: sdpa(q, q, q, attn_mask=m).sum())(normal(2, 1, 1, 5, 5))),
                ("alibi_slopes requires a gradient", lambda: jax.grad(
                    lambda s: sdpa(q, q, q, alibi_slopes=s).sum())(normal(2, 2))),
                ("no kernel computes gradients with ranges", lambda: jax.grad(
                    lambda q: sdpa(q, q, q, ranges=ranges).sum())(q)),
                ("through the output only", lambda: jax.grad(lambda q: sdpa(q, q, q, return_lse=True)[1].sum())(q)),
                ("first gradients only", lambda: jax.grad(
                    lambda q: jax.grad(lambda x: (sdpa(x, x, x) ** 2).sum())(q).sum())(q))):
            with self.subTest(text), self.assertRaisesRegex(NotImplementedError, text):
                transform()
        still = jax.grad(lambda w: (w * sdpa(jax.lax.stop_gradient(w * q), q, q)).sum())(2.0)
        self.assertAlmostEqual(float(still), float(sdpa(2 * q, q, q).sum()), places=4)


if __name__ == "__main__":
    unittest.main()
