#!/usr/bin/env python3
"""PyTorch, and FlashAttention-4 under it, as peers of `acromion bench`, on the CPU: what they leave is the output, or
dq, dk and dv, in every pass, with and without grouped queries. Needs PyTorch; the device's functions that the CPU has
not are left out."""
import ctypes
import pathlib
import sys
import types
import unittest
from unittest import mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/acromion"))
import bench  # noqa: E402: from the tree, which needs no library

BATCH, HEADS, LENGTH, DIM, SCALE = 2, 4, 9, 16, 0.3


class Peer(unittest.TestCase):
    def setUp(self):
        for name in ("synchronize", "set_device"):
            patch = mock.patch.object(torch.cuda, name)
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(torch.use_deterministic_algorithms, False)

    def begin(self, timed, kv_heads, bshd=False, library=bench.Sdpa, dtype=torch.float32, **more):
        generator = torch.Generator().manual_seed(kv_heads)
        self.tensors = [torch.randn(BATCH, heads, LENGTH, DIM, generator=generator).to(dtype)
                        for heads in (HEADS, kv_heads, kv_heads, HEADS)]
        q, k, v, d_o = (tensor.data_ptr() for tensor in self.tensors)
        number = {torch.float32: 1, torch.float16: bench.FLOAT16, torch.bfloat16: bench.BFLOAT16,
                  torch.float8_e4m3fn: bench.E4M3}[dtype]
        problem = bench.Problem(batch=BATCH, q_heads=HEADS, kv_heads=kv_heads, q_len=LENGTH, kv_len=LENGTH, qk_dim=DIM,
                                v_dim=DIM, dtype=number, mask=1, bshd=bshd, sets=2, timed=timed, scale=SCALE, q=q, k=k,
                                v=v, d_o=d_o, **{"out_dtype": number, **more})
        peer = library(torch, "cpu")
        peer.begin(problem)
        self.addCleanup(peer.end)
        return peer

    def expected(self, timed, kv_heads):
        q, k, v = (tensor.double().requires_grad_() for tensor in self.tensors[:3])
        wide = (tensor.repeat_interleave(HEADS // kv_heads, 1) for tensor in (k, v))
        scores = SCALE * q @ next(wide).transpose(2, 3)
        out = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1) @ next(wide)
        if timed == bench.FORWARD:
            return out.detach().flatten()
        return torch.cat([x.flatten() for x in torch.autograd.grad(out, (q, k, v), self.tensors[3].double())])

    def check(self, peer, name, timed, kv_heads):
        self.assertGreater(peer.call(name, 2), 0)
        expected = self.expected(timed, kv_heads)
        found = torch.full((expected.numel(),), torch.nan)
        peer.output(name, found.data_ptr(), 4 * found.numel())
        self.assertLess((found - expected).abs().max(), 1e-5)
        with self.assertRaisesRegex(RuntimeError, "shape"):
            peer.output(name, found.data_ptr(), 4 * found.numel() - 4)

    def test_what_is_timed_is_what_was_asked_for(self):
        for timed in (bench.FORWARD, bench.GRADIENTS, bench.STEP):
            for kv_heads, bshd in ((HEADS, False), (2, True)):
                peer = self.begin(timed, kv_heads, bshd)
                for name in ("torch-default", "torch-flash", "torch-math"):
                    with self.subTest(timed=timed, kv_heads=kv_heads, name=name):
                        self.check(peer, name, timed, kv_heads)
                self.assertTrue(peer.note("torch-default").startswith("takes torch-"))

    def test_the_deterministic_order_is_of_gradients_and_ends_with_the_call(self):
        name = "torch-flash-deterministic"
        with self.assertRaisesRegex(RuntimeError, "no other order"):
            self.begin(bench.FORWARD, HEADS).call(name, 1)
        peer = self.begin(bench.GRADIENTS, HEADS)
        seen, attend = [], peer.attend
        peer.attend = lambda *arguments: (seen.append(torch.are_deterministic_algorithms_enabled()),
                                          attend(*arguments))[1]
        self.check(peer, name, bench.GRADIENTS, HEADS)
        self.assertEqual(set(seen), {True})
        self.assertFalse(torch.are_deterministic_algorithms_enabled())

    def test_without_grouped_queries_keys_are_expanded_beforehand(self):
        for timed in (bench.GRADIENTS, bench.STEP):
            peer = self.begin(timed, 2)
            forward = peer.forward

            def ungrouped(name, number, forward=forward, peer=peer):
                if name not in peer.expanding:
                    raise RuntimeError("no grouped queries here")
                return forward(name, number)
            peer.forward = ungrouped
            self.check(peer, "torch-default", timed, 2)
            self.assertIn("expanded beforehand", peer.note("torch-default"))

    def test_flash_attention_4_gets_its_own_layout(self):
        """Its function is played by one that says the same of tensors [batch, length, heads, dim]."""
        calls = []

        def flash_attn_func(q, k, v, softmax_scale, causal):
            calls.append((q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in (q, k, v)), scale=softmax_scale, is_causal=causal,
                enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        played = {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.cute": types.ModuleType("flash_attn.cute")}
        played["flash_attn.cute"].flash_attn_func = flash_attn_func
        with mock.patch.dict(sys.modules, played):
            for timed, kv_heads, bshd in ((bench.FORWARD, 2, False), (bench.FORWARD, HEADS, True),
                                          (bench.STEP, 2, False)):
                peer = self.begin(timed, kv_heads, bshd, bench.Fa4, torch.float16)
                self.assertGreater(peer.call("fa4", 2), 0)
                expected = self.expected(timed, kv_heads)
                found = torch.full((expected.numel(),), torch.nan, dtype=torch.float16)
                peer.output("fa4", found.data_ptr(), 2 * found.numel())
                self.assertLess((found - expected).abs().max(), 1e-2)
            with self.assertRaisesRegex(RuntimeError, "float16 and bfloat16"):
                self.begin(bench.FORWARD, 2, library=bench.Fa4)
        for tensor, heads in zip(calls[0], (HEADS, 2, 2)):
            self.assertEqual(tuple(tensor.shape), (BATCH, LENGTH, heads, DIM))
            self.assertTrue(tensor.is_contiguous())

    def test_flash_attention_3_of_8_bits(self):
        """The wheel is given e4m3 as it is, and its bfloat16 is judged in the problem's type."""
        given = []

        def flash_attn_func(q, k, v, softmax_scale, causal, softcap=0.0):
            given.append((q, softcap))
            out = torch.nn.functional.scaled_dot_product_attention(
                *(tensor.transpose(1, 2).float() for tensor in (q, k, v)), scale=softmax_scale, is_causal=causal,
                enable_gqa=True)
            return out.transpose(1, 2).bfloat16().contiguous()
        played = types.ModuleType("fa3_fwd_interface")
        played.flash_attn_func = flash_attn_func
        with mock.patch.dict(sys.modules, {"fa3_fwd_interface": played}):
            peer = self.begin(bench.FORWARD, 2, False, bench.Fa3Fwd, torch.float8_e4m3fn, out_dtype=bench.FLOAT16)
            self.assertGreater(peer.call("fa3-fwd", 2), 0)
            expected = self.expected(bench.FORWARD, 2)
            found = torch.full((expected.numel(),), torch.nan, dtype=torch.float16)
            peer.output("fa3-fwd", found.data_ptr(), 2 * found.numel())
            self.assertLess((found - expected).abs().max(), 2e-2)
            with torch.inference_mode():
                peer.outputs["fa3-fwd"][0].zero_()  # as later launches write where a graph's first ones have
            peer.output("fa3-fwd", found.data_ptr(), 2 * found.numel())
            self.assertEqual(found.abs().max(), 0)
            q, softcap = given[0]
            self.assertEqual((q.dtype, tuple(q.shape), softcap), (torch.float8_e4m3fn, (BATCH, LENGTH, HEADS, DIM), 0))
            self.assertTrue(q.is_contiguous())
            self.begin(bench.FORWARD, 2, False, bench.Fa3Fwd, torch.bfloat16, softcap=2.0).call("fa3-fwd", 1)
            self.assertEqual(given[-1][1], 2.0)
            refusals = (("no gradients", bench.STEP, torch.bfloat16, {}),
                        ("bfloat16 and float8", bench.FORWARD, torch.float16, {}),
                        ("writes bfloat16", bench.FORWARD, torch.bfloat16, {"out_dtype": 1}),
                        ("a causal mask, softcap", bench.FORWARD, torch.bfloat16, {"chunk": 4}))
            for reason, timed, dtype, more in refusals:
                with self.assertRaisesRegex(RuntimeError, reason):
                    self.begin(timed, 2, False, bench.Fa3Fwd, dtype, **more)
        with self.assertRaisesRegex(RuntimeError, "takes no e4m3"):
            self.begin(bench.FORWARD, 2, dtype=torch.float8_e4m3fn)

    def test_what_is_not_captured_is_called_in_stretches(self):
        """A stretch of FlashAttention-3's calls is all made before its last is waited for, and timed against one call
        alone: what the host needs to begin and to see the end is no part of a call's time."""
        made, ready, clock = [], [], [0.0]
        begin, call, see = 50e-6, 1e-3, 30e-6  # seconds

        class Output:
            def __init__(self):
                made.append(self)

            def is_ready(self):
                calls = len(made) - (ready[-1][0] if ready else 0)
                ready.append((len(made), made.index(self)))
                clock[0] += begin + calls * call + see
                return True

        peer = object.__new__(bench.Fa3)
        peer.jax = types.SimpleNamespace(tree_util=types.SimpleNamespace(tree_leaves=lambda tree: [tree]))
        peer.attend, peer.inputs = lambda *inputs: Output(), ()
        self.assertIsNone(peer.capture("fa3", 4))
        with mock.patch.object(bench.time, "perf_counter", lambda: clock[0]):
            self.assertAlmostEqual(peer.stretch("fa3", 4), call)
        self.assertEqual(ready, [(1, 0), (2, 1), (7, 6)])

        seconds, text = ctypes.c_double(), ctypes.create_string_buffer(bench.TEXT_BYTES)
        peers = bench.Peers([peer], {"fa3"})
        with mock.patch.object(bench.Fa3, "version", lambda self: "a version"):
            provider = bench.provider_of(peers)
        graph = ctypes.c_void_p(7)
        self.assertEqual(provider.capture(0, 3, ctypes.pointer(graph), ctypes.addressof(text)), 0)
        self.assertIsNone(graph.value)
        with mock.patch.object(bench.time, "perf_counter", lambda: clock[0]):
            self.assertEqual(provider.stretch(0, 3, ctypes.pointer(seconds), ctypes.addressof(text)), 0)
        self.assertAlmostEqual(seconds.value, call)
        self.assertIn(b"3 calls back to back, not captured", text.value)

    def test_single_peers_can_be_asked_for(self):
        sdpa = bench.Sdpa(torch, "cpu")
        names = [name for _, name in bench.Peers([sdpa], {"torch-cudnn", "torch-flash"}).peers]
        self.assertEqual(names, ["torch-flash", "torch-cudnn"])
        self.assertEqual(len(bench.Peers([sdpa], {"torch"}).peers), len(bench.Sdpa.NAMES))


if __name__ == "__main__":
    unittest.main()
