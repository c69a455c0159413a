#!/usr/bin/env python3
"""acromion.sdpa on PyTorch's tensors: values, gradients, operators, torch.compile; on a GPU also streams and graphs.
Needs the installed package and PyTorch."""
import importlib.util
import unittest

import torch
import torch.nn.functional as F

import acromion
from cases import table
from torch_cases import check

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CASES = 320 if HAS_GPU else 120
OPERATOR = torch.ops.acromion


def normal(*shape, dtype=torch.float32, device=DEVICE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


class Values(unittest.TestCase):
    def test_table(self):
        for case in table(CASES, ("float16", "bfloat16", "float32")):
            with self.subTest(str(case)):
                error, limit = check(case, DEVICE)
                self.assertTrue(error <= limit, f"error {error}, limit {limit}")

    def test_output_lies_in_memory_as_the_query(self):
        q = normal(2, 9, 4, 16).transpose(1, 2)
        self.assertEqual(acromion.sdpa(q, q, q).stride(), q.stride())

    def test_sdpa_s_own_causal_rule(self):
        q, k = normal(1, 2, 5, 64), normal(1, 2, 9, 64)
        ours = acromion.sdpa(q, k, k, is_causal=True, causal_align="top_left")
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, is_causal=True), atol=1e-5, rtol=1e-5)

    def test_mixed_devices_and_types(self):
        q = normal(1, 2, 5, 64)
        with self.assertRaisesRegex(TypeError, "k is bfloat16, must be float32"):
            acromion.sdpa(q, q.bfloat16(), q)
        with self.assertRaisesRegex(TypeError, "q is float64"):
            acromion.sdpa(q.double(), q.double(), q.double())
        if HAS_GPU:
            with self.assertRaisesRegex(ValueError, "k is on CPU 0 and q on CUDA device 0"):
                acromion.sdpa(q, q.cpu(), q)


class Gradients(unittest.TestCase):
    def test_refused_where_a_gradient_is_expected(self):
        q, leaf = normal(1, 2, 5, 64), normal(1, 2, 5, 64).requires_grad_()
        for function in (acromion.sdpa, OPERATOR.sdpa, torch.compile(acromion.sdpa, backend="aot_eager")):
            with self.assertRaisesRegex(NotImplementedError, "requires a gradient"):
                function(q, leaf, q)
        with self.assertRaisesRegex(NotImplementedError, "requires a gradient"):
            OPERATOR.sdpa_out(q, leaf, q, out=torch.empty_like(q))

    def test_served_without_gradients(self):
        q, parameter = normal(1, 2, 5, 64), torch.nn.Parameter(normal(1, 2, 5, 64))
        expected = acromion.sdpa(q, q, q)
        with torch.no_grad():
            torch.testing.assert_close(acromion.sdpa(parameter, parameter, parameter), expected, atol=0, rtol=0)
        with torch.inference_mode():
            torch.testing.assert_close(acromion.sdpa(q, q, q), expected, atol=0, rtol=0)


class Operators(unittest.TestCase):
    def test_opcheck(self):
        q, k = normal(2, 4, 9, 64), normal(2, 2, 9, 64)
        lens = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
        for arguments in ({}, {"is_causal": True, "causal_align": "top_left", "kv_lens": lens}, {"scale": 0.3}):
            for name in ("sdpa", "sdpa_lse", "sdpa_out", "sdpa_lse_out"):
                out = {"out": torch.empty_like(q)} if name.endswith("out") else {}
                torch.library.opcheck(getattr(OPERATOR, name).default, (q, k, k),
                                      {"enable_gqa": True, **arguments, **out})
        bshd = q.transpose(1, 2)
        torch.library.opcheck(OPERATOR.sdpa_lse.default, (bshd, bshd, bshd[..., :32]), {"layout": "bshd"})

    def test_compile_without_graph_breaks(self):
        q, k = normal(2, 4, 9, 64), normal(2, 4, 12, 64)
        out = torch.empty_like(q)

        def block(q, k, out):
            first, lse = acromion.sdpa(q * 2, k, k, is_causal=True, causal_align="bottom_right", return_lse=True)
            acromion.sdpa(q, k, k, out=out)
            last = acromion.sdpa(q, k, k, out=torch.empty_like(q), return_lse=True)[1]
            return first + 1, lse * 2, out + 1, last
        expected = block(q, k, out)
        backends = ("aot_eager", "inductor") if HAS_GPU else ("aot_eager",)
        for backend in backends:
            for found, wanted in zip(torch.compile(block, fullgraph=True, backend=backend)(q, k, out), expected):
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    def test_compile_with_dynamic_shapes(self):
        block = torch.compile(lambda x: acromion.sdpa(x, x, x, is_causal=True), fullgraph=True, dynamic=True,
                              backend="aot_eager")
        for length in (5, 9, 17):
            x = normal(1, 2, length, 64)
            torch.testing.assert_close(block(x), acromion.sdpa(x, x, x, is_causal=True), atol=0, rtol=0)

    def test_export(self):
        class Model(torch.nn.Module):
            def forward(self, x):
                return acromion.sdpa(x, x, x)
        x = normal(1, 2, 5, 64)
        program = torch.export.export(Model(), (x,))
        self.assertIn("acromion.sdpa.default", str(program.graph))
        torch.testing.assert_close(program.module()(x), acromion.sdpa(x, x, x), atol=0, rtol=0)

    def test_dispatch_modes_and_subclasses_see_the_call(self):
        from torch.utils._python_dispatch import TorchDispatchMode
        seen = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))

        class Sub(torch.Tensor):
            pass
        x = normal(1, 2, 5, 64)
        with Mode():
            inside = acromion.sdpa(x, x, x)
        self.assertIn(OPERATOR.sdpa.default, seen)
        torch.testing.assert_close(inside, acromion.sdpa(x, x, x), atol=0, rtol=0)
        self.assertIsInstance(acromion.sdpa(x.as_subclass(Sub), x, x), torch.Tensor)

    def test_vmap(self):
        x = normal(3, 1, 2, 5, 64)
        torch.testing.assert_close(torch.vmap(acromion.sdpa)(x, x, x)[1], acromion.sdpa(x[1], x[1], x[1]))


@unittest.skipUnless(HAS_GPU, "no GPU")
class Streams(unittest.TestCase):
    def test_current_stream(self):
        """Work enqueued behind a long kernel of another stream must wait for it: its input is written there."""
        x, stream = normal(4, 8, 512, 64, dtype=torch.float16), torch.cuda.Stream()
        expected = acromion.sdpa(x, x, x)
        torch.cuda.synchronize()
        late = torch.zeros_like(x)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            out = acromion.sdpa(late, late, late)
        stream.synchronize()
        torch.testing.assert_close(out, expected, atol=0, rtol=0)

    def captured(self, q, k, **arguments):
        out = acromion.sdpa(q, k, k, **arguments)
        expected = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = acromion.sdpa(q, k, k, **arguments)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(captured, expected, atol=0, rtol=0)

    def test_graphs(self):
        q = normal(2, 8, 512, 64, dtype=torch.float16)
        self.captured(q, q, is_causal=True)
        # Long causal problems are shared out by a counter in a workspace; decoding splits keys over one.
        long = normal(4, 16, 4096, 128, dtype=torch.float16)
        self.captured(long, long, is_causal=True)
        self.captured(normal(4, 8, 1, 128, dtype=torch.float16), normal(4, 8, 8192, 128, dtype=torch.float16))

    def test_workspace_between_plans(self):
        """Plans take turns with one workspace of the stream."""
        tensors = [normal(2, 16, length, 128, dtype=torch.float16) for length in (4096, 2048, 3000)]
        expected = [F.scaled_dot_product_attention(x.float(), x.float(), x.float(), is_causal=True) for x in tensors]
        for _ in range(3):
            for x, wanted in zip(tensors, expected):
                torch.testing.assert_close(acromion.sdpa(x, x, x, is_causal=True).float(), wanted, atol=4e-3, rtol=4e-3)

    @unittest.skipUnless(importlib.util.find_spec("cupy"), "no CuPy")
    def test_cupy(self):
        """Arrays of another library: read and made by DLPack, on its stream where it tells, else the default one."""
        import cupy
        x = normal(2, 16, 2048, 128, dtype=torch.float16)
        array = cupy.from_dlpack(x)
        out = acromion.sdpa(array, array, array, is_causal=True)
        self.assertIsInstance(out, cupy.ndarray)
        cupy.cuda.Device().synchronize()
        torch.testing.assert_close(torch.from_dlpack(out), acromion.sdpa(x, x, x, is_causal=True), atol=0, rtol=0)

    def test_no_synchronisation(self):
        x = normal(2, 8, 512, 64, dtype=torch.float16)
        acromion.sdpa(x, x, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            acromion.sdpa(x, x, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    unittest.main()
