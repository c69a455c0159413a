#!/usr/bin/env python3
"""acromion.sdpa on PyTorch's tensors: values, gradients, operators, torch.compile; on a GPU also streams and graphs.
Needs the installed package and PyTorch."""
import importlib.util
import itertools
import unittest

import torch
import torch.nn.functional as F

import acromion
import reference
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

    def test_new_tensors_are_as_pytorch_makes_them(self):
        """Whether they come straight from its allocator, as here but for q with gaps or without rows, or not."""
        gaps = normal(2, 4, 9, 32)[..., :16]
        for q in (normal(2, 4, 9, 16), normal(2, 9, 4, 16).transpose(1, 2), normal(1, 4, 9, 16), normal(2, 1, 9, 16),
                  normal(2, 4, 1, 16), normal(1, 9, 1, 16).transpose(1, 2), normal(2, 4, 9, 1), normal(2, 4, 0, 16),
                  normal(9, 2, 4, 16).permute(1, 2, 0, 3), normal(1, 1, 9, 16).expand(2, 4, 9, 16), gaps,
                  normal(2, 4, 9, 16).to(torch.bfloat16), normal(2, 4, 9, 16).to(torch.float16)):
            k = normal(q.shape[0], q.shape[1], 7, q.shape[3]).to(q.dtype)
            with self.subTest(f"{tuple(q.shape)} {q.stride()} {q.dtype}"):
                wanted = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
                for found, like in zip(acromion.sdpa(q, k, k, return_lse=True), wanted):
                    for of in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset):
                        self.assertEqual(of(found), of(like))
                    self.assertEqual((type(found), found.dtype, found.device, found.requires_grad, found._version),
                                     (type(like), like.dtype, like.device, False, 0))
                    self.assertEqual(found.untyped_storage().nbytes(), like.untyped_storage().nbytes())
        packed, offsets = normal(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
        self.assertEqual(acromion.sdpa(packed, packed, packed, q_offsets=offsets, kv_offsets=offsets, max_q_len=5,
                                       max_kv_len=5).stride(), packed.stride())
        with torch.inference_mode():
            self.assertTrue(acromion.sdpa(gaps, gaps, gaps).is_inference())
            self.assertTrue(acromion.sdpa(packed, packed, packed, q_offsets=offsets, kv_offsets=offsets, max_q_len=5,
                                          max_kv_len=5).is_inference())

    def test_new_tensors_take_no_call_of_python(self):
        from torch.overrides import TorchFunctionMode
        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))
        q = normal(2, 4, 9, 16)
        with torch.no_grad(), Mode():
            acromion.sdpa(q, q, q, return_lse=True)
        self.assertEqual(seen, [])

    def test_modes_are_those_of_the_thread(self):
        """A gradient is recorded by the thread that wants it, whatever another one has switched off."""
        from concurrent.futures import ThreadPoolExecutor
        q = normal(1, 2, 5, 16).requires_grad_()
        with torch.no_grad(), ThreadPoolExecutor(1) as other:
            self.assertFalse(acromion.sdpa(q, q, q).requires_grad)
            self.assertTrue(other.submit(acromion.sdpa, q, q, q).result().requires_grad)

    def test_views_that_are_to_be_negated(self):
        """Their memory holds the opposite of what they say; the imaginary part of a conjugate is such a view."""
        q, k, v, bias = (torch.randn(shape) for shape in ((1, 2, 5, 32), (1, 2, 9, 32), (1, 2, 9, 32), (1, 2, 5, 9)))
        wanted = acromion.sdpa(q, k, v, attn_mask=bias)
        negated = [torch.complex(x, -x).conj().imag for x in (q, k, v, bias)]
        self.assertTrue(all(x.is_neg() for x in negated))
        for i in range(4):
            given = [q, k, v, bias]
            given[i] = negated[i]
            torch.testing.assert_close(acromion.sdpa(*given[:3], attn_mask=given[3]), wanted)
        with self.assertRaisesRegex(ValueError, "out is a view that PyTorch negates"):
            acromion.sdpa(q, k, v, out=torch._neg_view(torch.empty_like(q)))
        lse = torch.zeros(1, 2, 5)
        with self.assertRaisesRegex(ValueError, "a part's out is a view that PyTorch negates"):
            acromion.merge([negated[0], q], [lse, lse])

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

    def test_one_device(self):
        """PyTorch takes a call with one meta tensor for shape inference: nothing would be computed."""
        q = normal(1, 2, 5, 64)
        lens = torch.tensor([3], dtype=torch.int32, device=DEVICE)
        others = ["meta"] + (["cpu"] if HAS_GPU else []) + (["cuda:1"] if torch.cuda.device_count() > 1 else [])
        calls = {"k": lambda x: ((q, x, q), {}), "v": lambda x: ((q, q, x), {}), "q": lambda x: ((x, q, q), {}),
                 "out": lambda x: ((q, q, q), {"out": x}),
                 "kv_lens": lambda x: ((q, q, q), {"kv_lens": lens.to(x.device)})}
        for other in others:
            for name, call in calls.items():
                for out in ({}, {"out": q.clone()}) if name in "kv" else ({},):
                    with self.subTest(name, device=other, **out):
                        tensors, arguments = call(q.to(other))
                        with self.assertRaisesRegex(ValueError, f"is on {other}.* and q on .*, must be the same|"
                                                                f" and q on {other}.*, must be the same"):
                            acromion.sdpa(*tensors, **arguments, **out)
                        operator = OPERATOR.sdpa_out if {**arguments, **out}.get("out") is not None else OPERATOR.sdpa
                        with self.assertRaisesRegex(ValueError, "must be the same"):
                            operator(*tensors, **arguments, **out)
        with self.assertRaisesRegex(ValueError, "k is on meta and q on .*, must be the same"):
            acromion.sdpa(q, q.to("meta"), q, return_lse=True)
        with self.assertRaisesRegex(Exception, "k is on meta and q on .*, must be the same"):
            torch.compile(acromion.sdpa, backend="aot_eager")(q, q.to("meta"), q)

    def test_shapes_on_the_meta_device(self):
        q, k, v = (torch.empty(2, 4, n, d, device="meta") for n, d in ((5, 64), (9, 64), (9, 32)))
        out, lse = acromion.sdpa(q, k, v, return_lse=True)
        self.assertEqual((out.device.type, out.shape, lse.shape), ("meta", (2, 4, 5, 32), (2, 4, 5)))

    def test_kinds_of_tensors(self):
        q = normal(1, 2, 5, 64, device="cpu")
        for x, text in ((q.to_sparse(), r"k is a torch.sparse_coo tensor, must be dense: k.to_dense\(\)"),
                        (q.to_mkldnn(), "k is a torch._mkldnn tensor"),
                        (torch.nested.nested_tensor([q[0]]), "k is a nested tensor, must be dense"),
                        (torch.quantize_per_tensor(q, 0.1, 0, torch.qint8), "k is a quantised tensor")):
            with self.subTest(text), self.assertRaisesRegex(TypeError, text):
                acromion.sdpa(q, x, q)
            with self.subTest(text), self.assertRaisesRegex(TypeError, "needs dense tensors"):
                acromion.explain(q, x, q)
        with self.assertRaisesRegex(TypeError, "q is a numpy.ndarray, must be a torch.Tensor"):
            acromion.sdpa(q.numpy(), q.to_sparse(), q)


class Packed(unittest.TestCase):
    """Sequences of different lengths in one tensor [total, heads, dim]."""
    Q_LENGTHS, KV_LENGTHS = (5, 0, 33, 1), (9, 4, 20, 70)

    def setUp(self):
        self.q = normal(sum(self.Q_LENGTHS), 4, 64)
        self.k, self.v = normal(sum(self.KV_LENGTHS), 2, 64), normal(sum(self.KV_LENGTHS), 2, 64) * 2
        self.offsets = [torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
                        for lengths in (self.Q_LENGTHS, self.KV_LENGTHS)]

    def alone(self, **arguments):
        """Each sequence by a call of its own."""
        outs, lses = [], []
        for q, k, v in zip(*(x.split(n) for x, n in ((self.q, self.Q_LENGTHS), (self.k, self.KV_LENGTHS),
                                                     (self.v, self.KV_LENGTHS)))):
            out, lse = acromion.sdpa(*(x[None] for x in (q, k, v)), layout="bshd", enable_gqa=True, return_lse=True,
                                     **arguments)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, dim=1)

    def packed(self, **arguments):
        return acromion.sdpa(self.q, self.k, self.v, q_offsets=self.offsets[0], kv_offsets=self.offsets[1],
                             enable_gqa=True, return_lse=True, **arguments)

    def test_as_alone(self):
        for arguments in ({}, {"is_causal": True, "causal_align": "bottom_right"}, {"scale": 0.3},
                          {"is_causal": True, "causal_align": "top_left"}, {"window": (5, 3)}):
            with self.subTest(str(arguments)):
                wanted = self.alone(**arguments)
                for lengths in ({}, {"max_q_len": 33, "max_kv_len": 70}):
                    torch.testing.assert_close(self.packed(**arguments, **lengths), wanted, atol=1e-5, rtol=1e-5)

    def test_names_of_flash_attention(self):
        found = acromion.sdpa(self.q, self.k, self.v, cu_seqlens_q=self.offsets[0], cu_seqlens_k=self.offsets[1],
                              max_seqlen_q=33, max_seqlen_k=70, enable_gqa=True, return_lse=True)
        torch.testing.assert_close(found, self.packed(max_q_len=33, max_kv_len=70), atol=0, rtol=0)
        with self.assertRaisesRegex(TypeError, "multiple values for argument 'q_offsets'"):
            acromion.sdpa(self.q, self.k, self.v, q_offsets=self.offsets[0], cu_seqlens_q=self.offsets[0])

    def test_compiled_and_on_the_meta_device(self):
        def block(q):
            return acromion.sdpa(q * 2, self.k, self.v, cu_seqlens_q=self.offsets[0], cu_seqlens_k=self.offsets[1],
                                 enable_gqa=True, return_lse=True)
        found = torch.compile(block, fullgraph=True, backend="aot_eager")(self.q)
        torch.testing.assert_close(found, block(self.q), atol=0, rtol=0)
        meta = acromion.sdpa(*(x.to("meta") for x in (self.q, self.k, self.v)), enable_gqa=True, return_lse=True,
                             q_offsets=self.offsets[0].to("meta"), kv_offsets=self.offsets[1].to("meta"))
        for a, b in zip(meta, found):
            self.assertEqual((a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype))

    def test_refusals(self):
        q, k, v, (first, second) = self.q, self.k, self.v, self.offsets
        lens = torch.tensor([1] * 4, dtype=torch.int32, device=DEVICE)
        for arguments, error, text in (
                ({"q_offsets": first}, ValueError, "kv_offsets is missing: packed sequences need q_offsets and kv_off"),
                ({"q_offsets": first.long(), "kv_offsets": second}, TypeError, "q_offsets is int64, must be int32"),
                ({"q_offsets": first, "kv_offsets": second[:-1]}, ValueError, "kv_offsets must have one dimension of"),
                ({"q_offsets": first[:1], "kv_offsets": second[:1]}, ValueError, "the number of sequences and 1"),
                ({"q_offsets": first, "kv_offsets": second, "kv_lens": lens}, ValueError, "kv_lens is given with pack"),
                ({"q_offsets": first, "kv_offsets": second, "layout": "bhsd"}, ValueError, r"\[total, heads, dim\]"),
                ({"q_offsets": first, "kv_offsets": second, "is_causal": True}, ValueError, "say causal_align"),
                ({"q_offsets": first, "kv_offsets": second, "max_q_len": 0}, ValueError, "must be positive"),
                ({"max_q_len": 4}, ValueError, "max_q_len and max_kv_len are of packed sequences")):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                acromion.sdpa(q, k, v, enable_gqa=True, **arguments)
        with self.assertRaisesRegex(ValueError, "q has 4 dimensions, must have 3 for packed sequences"):
            acromion.sdpa(q[None], k, v, enable_gqa=True, q_offsets=first, kv_offsets=second)


class Terms(unittest.TestCase):
    """What else stands in a score and hides keys, beside the definition in float64."""
    Q, KV, BATCH, HEADS, GROUP = 37, 53, 3, 4, 2

    def setUp(self):
        self.q = normal(self.BATCH, self.HEADS, self.Q, 64, dtype=self.dtype())
        self.k, self.v = (normal(self.BATCH, self.HEADS // self.GROUP, self.KV, 64, dtype=self.dtype()) * scale
                          for scale in (1, 2))

    def dtype(self):
        return torch.float16 if HAS_GPU else torch.float32

    def int32(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def arguments(self):
        """name -> arguments, one term each and some together."""
        causal = {"is_causal": True, "causal_align": "bottom_right"}
        tree = torch.randint(256, (3, self.Q, (self.Q + 7) // 8), generator=torch.Generator().manual_seed(1))
        terms = {
            "softcap": {"softcap": 0.7}, "sinks": {"sinks": normal(4) * 3}, "chunk": {"chunk": 9},
            "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01], device=DEVICE)},
            "starts": {"kv_starts": self.int32(0, 11, 53)}, "tree": {"tree": tree.to(DEVICE, torch.uint8)},
            "ranges": {"ranges": torch.stack([self.int32(20, 41, 5, 5), self.int32(30, 50, 16, 30),
                                              self.int32(0, 53, -4, 60)]).view(3, 2, 2)},
            "mask": {"attn_mask": normal(3, 1, self.Q, self.KV) > 0},
            "bias": {"attn_mask": normal(1, 4, self.Q, self.KV)},
        }
        found = dict(terms)
        found |= {f"causal {name}": {**causal, **given} for name, given in terms.items()}
        found["together"] = {**causal, **terms["softcap"], **terms["sinks"], **terms["alibi"], **terms["bias"],
                             **terms["starts"], "window": 20, "kv_lens": self.int32(53, 40, 50)}
        found["ranges in windows"] = {**causal, **terms["ranges"], "window": 7, "chunk": 16}
        return found

    def compare(self, given, q=None, k=None, v=None):
        q, k, v = (x if y is None else y for x, y in zip((self.q, self.k, self.v), (q, k, v)))
        out, lse = acromion.sdpa(q, k, v, enable_gqa=True, return_lse=True, **given)
        wanted_out, wanted_lse = reference.attention(q, k, v, **given)
        bound = 2e-5 if q.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), wanted_out, atol=bound, rtol=bound)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=bound, rtol=bound)

    def test_values(self):
        for name, given in self.arguments().items():
            for dtype in (torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.bfloat16):
                with self.subTest(f"{name} {dtype}"):
                    self.compare(given, *(x.to(dtype) for x in (self.q, self.k, self.v)))

    def test_every_mask_that_broadcasts(self):
        """Through strides; where keys do not lie side by side, a copy."""
        sizes = (self.BATCH, self.HEADS, self.Q, self.KV)
        for ones in itertools.product((False, True), repeat=4):
            for left_out in range(4):
                if not all(ones[:left_out]):
                    continue
                shape = [1 if one else size for one, size in zip(ones, sizes)][left_out:]
                for mask in (normal(*shape), normal(*shape) > 0, normal(*shape).half()):
                    with self.subTest(f"{shape} {mask.dtype}"):
                        self.compare({"attn_mask": mask})
        wide = normal(3, 4, self.KV, self.Q + 5)
        for mask in (wide[..., :self.Q].transpose(2, 3), normal(self.Q, 2 * self.KV)[:, ::2],
                     normal(self.Q, self.KV + 7)[:, :self.KV], normal(1, 1, self.Q, self.KV).expand(3, 4, -1, -1)):
            with self.subTest(f"{tuple(mask.shape)} {mask.stride()}"):
                self.compare({"attn_mask": mask})
                self.compare({"attn_mask": mask > 0})

    def test_as_pytorch_s_own(self):
        mask = normal(3, 1, self.Q, self.KV)
        for given in ({"attn_mask": mask.to(self.dtype())}, {"attn_mask": mask > 0},
                      {"attn_mask": mask.to(self.dtype()), "scale": 0.3, "dropout_p": 0.0}):
            found = acromion.sdpa(self.q, self.k, self.v, enable_gqa=True, **given)
            wanted = F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True, **given)
            bound = 1e-2 if HAS_GPU else 1e-5
            torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)

    def test_packed(self):
        q_lengths, kv_lengths = (5, 12, 30), (9, 12, 41)
        q, k, v = (normal(sum(n), heads, 64, dtype=self.dtype()) for n, heads in
                   ((q_lengths, 4), (kv_lengths, 2), (kv_lengths, 2)))
        q_offsets, kv_offsets = (self.int32(0, *itertools.accumulate(n)) for n in (q_lengths, kv_lengths))
        bias = normal(3, 1, 30, 41)
        for name, given in {"softcap": {"softcap": 0.7}, "sinks": {"sinks": normal(4)}, "bias": {"attn_mask": bias},
                            "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01], device=DEVICE)},
                            "chunk": {"chunk": 6}}.items():
            for causal in ({}, {"is_causal": True, "causal_align": "bottom_right"}):
                with self.subTest(f"{name} {causal}"):
                    out, lse = acromion.sdpa(q, k, v, q_offsets=q_offsets, kv_offsets=kv_offsets, max_q_len=30,
                                             max_kv_len=41, enable_gqa=True, return_lse=True, **given, **causal)
                    parts = zip(out.split(q_lengths), lse.split(q_lengths, 1), q.split(q_lengths), k.split(kv_lengths),
                                v.split(kv_lengths))
                    for b, (found, found_lse, *alone) in enumerate(parts):
                        own = ({**given, "attn_mask": bias[b, :, :q_lengths[b], :kv_lengths[b]]} if name == "bias"
                               else given)
                        wanted = reference.attention(*(x.transpose(0, 1)[None] for x in alone), **own, **causal)
                        bound = 2e-2 if HAS_GPU else 2e-5
                        torch.testing.assert_close(found.double(), wanted[0][0].transpose(0, 1), atol=bound, rtol=bound)
                        torch.testing.assert_close(found_lse.double(), wanted[1][0], atol=bound, rtol=bound)

    def test_compiled_and_on_the_meta_device(self):
        for name, given in self.arguments().items():
            with self.subTest(name):
                def block(q):
                    return acromion.sdpa(q * 2, self.k, self.v, enable_gqa=True, return_lse=True, **given)
                torch._dynamo.reset()
                found = torch.compile(block, fullgraph=True, backend="aot_eager")(self.q)
                torch.testing.assert_close(found, block(self.q), atol=0, rtol=0)
                on_meta = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in given.items()}
                meta = acromion.sdpa(*(x.to("meta") for x in (self.q, self.k, self.v)), enable_gqa=True,
                                     return_lse=True, **on_meta)
                for a, b in zip(meta, found):
                    self.assertEqual((a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype))

    def test_refusals(self):
        heads, rows, keys = self.HEADS, self.Q, self.KV
        ranges = torch.zeros(3, 2, 2, dtype=torch.int32, device=DEVICE)
        tree = torch.zeros(3, rows, 5, dtype=torch.uint8, device=DEVICE)
        offsets = self.int32(0, 5)
        for given, error, text in (
                ({"softcap": -1.0}, ValueError, "softcap is -1.0, must be positive and finite"),
                ({"softcap": float("nan")}, ValueError, "softcap is nan, must be positive"),
                ({"chunk": 0}, ValueError, "chunk is 0, must be positive"),
                ({"chunk": 2.5}, TypeError, "chunk is 2.5, must be a number"),
                ({"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1, must be 0"),
                ({"sinks": normal(heads).double()}, TypeError, "sinks is float64, must be float32"),
                ({"sinks": normal(2)}, ValueError, f"sinks must have one dimension of q's heads, {heads}"),
                ({"alibi_slopes": normal(3, heads)}, ValueError, "alibi_slopes must have one dimension of q's heads"),
                ({"alibi_slopes": normal(2 * heads)[::2]}, ValueError, "alibi_slopes has a stride of 2, must be 1"),
                ({"kv_starts": offsets.long()}, TypeError, "kv_starts is int64, must be int32"),
                ({"kv_starts": offsets}, ValueError, "kv_starts must have one dimension of q's batch, 3"),
                ({"ranges": ranges.long()}, TypeError, "ranges is int64, must be int32"),
                ({"ranges": ranges[:2]}, ValueError, r"ranges must have three dimensions \[3, ranges, 2\]"),
                ({"ranges": ranges[..., :1].expand(3, 2, 2)}, ValueError, "ranges must be contiguous"),
                ({"tree": tree.int()}, TypeError, "tree is int32, must be uint8"),
                ({"tree": tree[..., :4]}, ValueError, rf"tree must have three dimensions \[3, {rows}, 5\]"),
                ({"attn_mask": torch.zeros(rows, keys, dtype=torch.int32, device=DEVICE)}, TypeError,
                 "attn_mask is int32, must be bool, float16, bfloat16 or float32"),
                ({"attn_mask": normal(2, 1, rows, keys)}, ValueError,
                 "attn_mask has extent 2 for the batch, must be 1 or 3"),
                ({"attn_mask": normal(rows + 1, keys)}, ValueError, f"extent {rows + 1} for the length of q, must"),
                ({"attn_mask": normal(rows, keys - 1)}, ValueError, f"extent {keys - 1} for the length of k, must"),
                ({"attn_mask": normal(1, 1, 1, rows, keys)}, ValueError, "attn_mask has 5 dimensions, at most 4")):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                acromion.sdpa(self.q, self.k, self.v, enable_gqa=True, **given)
        with self.assertRaisesRegex(NotImplementedError, "attn_mask requires a gradient"):
            acromion.sdpa(self.q, self.k, self.v, normal(rows, keys).requires_grad_(), enable_gqa=True)
        flat = {"q_offsets": offsets, "kv_offsets": offsets}
        with self.assertRaisesRegex(ValueError, "kv_starts is given with packed sequences"):
            acromion.sdpa(self.q[0, :, :5], self.k[0, :, :5], self.v[0, :, :5], enable_gqa=True,
                          kv_starts=self.int32(0), **flat)


def quantised(*shape, scale=1.0):
    """Values in float8_e4m3fn; scale a number or a tensor that broadcasts."""
    return (normal(*shape) / scale).to(torch.float8_e4m3fn)


class Fp8(unittest.TestCase):
    """e4m3 inputs with scales: numbers, or a tensor with one for each batch entry and key/value head."""
    BATCH, HEADS, GROUP = 3, 2, 2

    def setUp(self):
        self.scales = [2.0 ** torch.arange(6, device=DEVICE, dtype=torch.float32).reshape(3, 2).roll(n).sub(3)
                       for n in range(3)]
        of_head = [s[:, :, None, None] for s in self.scales]
        of_head[0] = of_head[0].repeat_interleave(self.GROUP, dim=1)
        shapes = (3, 4, 33, 64), (3, 2, 70, 64), (3, 2, 70, 32)
        self.stored = [quantised(*shape, scale=s) for shape, s in zip(shapes, of_head)]
        self.values = [x.double() * s for x, s in zip(self.stored, of_head)]

    def check(self, out, q, k, v, bound=1.0):
        k, v = (x.repeat_interleave(self.GROUP, dim=1) for x in (k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v)
        self.assertLessEqual((out.double() - expected).abs().max().item(), 0.06 * bound)

    def named(self, scales):
        return dict(zip(("q_scale", "k_scale", "v_scale"), scales))

    def test_scales_of_heads(self):
        out = acromion.sdpa(*self.stored, enable_gqa=True, **self.named(self.scales))
        self.assertEqual((out.dtype, out.shape), (torch.float16, (3, 4, 33, 32)))
        self.check(out, *self.values)
        shuffled = self.named([self.scales[0].flip(0), *self.scales[1:]])
        self.assertFalse(torch.equal(out, acromion.sdpa(*self.stored, enable_gqa=True, **shuffled)))

    def test_numbers_and_nothing(self):
        q, k, v = self.stored
        out = torch.empty(3, 4, 33, 32, dtype=torch.bfloat16, device=DEVICE)
        result, lse = acromion.sdpa(q, k, v, enable_gqa=True, q_scale=0.5, k_scale=1, out=out, return_lse=True)
        self.assertTrue(result is out and lse.dtype == torch.float32)
        self.check(out, 0.5 * q.double(), k.double(), v.double(), bound=v.double().abs().max().item())
        mixed = acromion.sdpa(q, k, v, enable_gqa=True, q_scale=0.5, v_scale=self.scales[2])
        self.check(mixed, 0.5 * q.double(), k.double(), self.values[2])

    def test_refused(self):
        q, k, v = self.stored
        given = self.named(self.scales)
        for name, scale, error, text in (
                ("q_scale", -1.0, ValueError, "positive"), ("v_scale", float("inf"), ValueError, "finite"),
                ("k_scale", self.scales[0].double(), TypeError, "k_scale is float64, must be float32"),
                ("k_scale", self.scales[0][:2], ValueError, r"two dimensions \[3, 2\]"),
                ("v_scale", self.scales[0].flatten(), ValueError, "two dimensions"),
                ("q_scale", self.scales[0].T.contiguous().T, ValueError, "must be contiguous"),
                ("q_scale", "2", TypeError, "")):
            with self.subTest(name), self.assertRaisesRegex(error, text):
                acromion.sdpa(q, k, v, enable_gqa=True, **{**given, name: scale})
        half = [x.to(torch.float16) for x in self.stored]
        with self.assertRaisesRegex(TypeError, "q is float16, must be float8_e4m3fn"):
            acromion.sdpa(*half, enable_gqa=True, **given)
        with self.assertRaisesRegex(ValueError, "only e4m3 inputs have scales"):
            acromion.sdpa(*half, enable_gqa=True, q_scale=2.0)
        with self.assertRaisesRegex(TypeError, "out is float32, must be float16 or bfloat16"):
            acromion.sdpa(q, k, v, enable_gqa=True, out=torch.empty(3, 4, 33, 32, device=DEVICE))
        with self.assertRaisesRegex(NotImplementedError, "v_scale requires a gradient"):
            acromion.sdpa(q, k, v, enable_gqa=True, v_scale=self.scales[2].clone().requires_grad_())
        if DEVICE == "cpu":
            with self.assertRaisesRegex(ValueError, r"k_scale\[1, 1\] is -?nan"):
                bad = self.scales[1].clone()
                bad[1, 1] = float("nan")
                acromion.sdpa(q, k, v, enable_gqa=True, k_scale=bad)

    def test_operators_and_compile(self):
        q, k, v = self.stored
        expected = acromion.sdpa(q, k, v, enable_gqa=True, scale=0.2, q_scale=0.5, k_scale=self.scales[1])
        found = OPERATOR.sdpa(q, k, v, enable_gqa=True, scale=0.2, q_scale=0.5, k_scales=self.scales[1])
        self.assertTrue(torch.equal(found, expected))
        torch.library.opcheck(OPERATOR.sdpa_lse.default, (q, k, v),  # test_schema compares floats of 8 bits, and cannot
                              {"enable_gqa": True, "q_scale": 2.0, "v_scales": self.scales[2]},
                              test_utils="test_faketensor")
        same = v.repeat(1, 1, 1, 2)  # an output like q, but for its type

        def block(q, k, v, scale):
            return acromion.sdpa(q, k, v, enable_gqa=True, k_scale=scale, q_scale=0.5) + 1
        for values in (v, same):
            wanted = block(q, k, values, self.scales[1])
            found = torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, values, self.scales[1])
            self.assertTrue(torch.equal(found, wanted) and found.dtype == torch.float16)


class Paged(unittest.TestCase):
    """Values are test_ops.py's; here is what PyTorch adds. On CUDA these run where a kernel serves pages."""
    def setUp(self):
        self.k, self.v = normal(9, 2, 16, 64, device="cpu"), normal(9, 2, 16, 32, device="cpu")
        self.table = torch.tensor([[3, 0, 8], [1, 7, 2]], dtype=torch.int32)
        self.lens = torch.tensor([37, 20], dtype=torch.int32)
        self.q = normal(2, 8, 3, 64, device="cpu")

    def test_8_bit_caches(self):
        scales = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
        for dtype in (torch.float16, torch.bfloat16):
            q, k, v = self.q.to(dtype), self.k.to(torch.float8_e4m3fn), self.v.to(torch.float8_e4m3fn)
            out = acromion.sdpa_paged(q, k, v, self.table, self.lens, k_scale=0.25, v_scale=scales, is_causal=True)
            wanted = acromion.sdpa_paged(q, k.to(dtype) * 0.25, v.to(dtype), self.table, self.lens, is_causal=True)
            wanted = wanted * scales.repeat_interleave(4, 1)[:, :, None, None].to(dtype)
            torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
            plain = acromion.sdpa(q[:, :2], k[:2], v[:2], k_scale=0.25)
            torch.testing.assert_close(plain, acromion.sdpa(q[:, :2], k[:2].to(dtype) * 0.25, v[:2].to(dtype)),
                                       atol=2e-2, rtol=2e-2)
        with self.assertRaisesRegex(TypeError, "v_cache is float32, must be float8_e4m3fn"):
            acromion.sdpa_paged(self.q, self.k.to(torch.float8_e4m3fn), self.v, self.table, self.lens)
        with self.assertRaisesRegex(TypeError, "k_cache is float32, must be float8_e4m3fn: no other"):
            acromion.sdpa_paged(self.q, self.k, self.v, self.table, self.lens, k_scale=scales)

    def test_compiled_and_on_the_meta_device(self):
        def paged(*args):
            return acromion.sdpa_paged(*args, is_causal=True, return_lse=True)

        def inside(q, k, table, lens):
            return acromion.sdpa_paged(q, k, None, page_table=table, kv_lens=lens, v_dim=48, scale=0.1)

        args = (self.q, self.k, self.v, self.table, self.lens)
        for wanted, got in zip(paged(*args), torch.compile(paged, backend="aot_eager", fullgraph=True)(*args)):
            self.assertTrue(torch.equal(wanted, got))
        few = (self.q, self.k, self.table, self.lens)
        self.assertTrue(torch.equal(inside(*few), torch.compile(inside, backend="aot_eager", fullgraph=True)(*few)))
        out, lse = paged(*(x.to("meta") for x in args))
        self.assertEqual((out.shape, lse.shape), ((2, 8, 3, 32), (2, 8, 3)))
        self.assertEqual(inside(*(x.to("meta") for x in few)).shape, (2, 8, 3, 48))

    def test_gradients_are_refused(self):
        q = self.q.clone().requires_grad_()
        with self.assertRaisesRegex(NotImplementedError, "no kernel computes gradients with page_table"):
            acromion.sdpa_paged(q, self.k, self.v, self.table, self.lens)
        with torch.no_grad():
            acromion.sdpa_paged(q, self.k, self.v, self.table, self.lens)
        with self.assertRaisesRegex(NotImplementedError, "8-bit inputs have no gradients"):
            acromion.sdpa(q[:, :2], *(x[:2].to(torch.float8_e4m3fn) for x in (self.k, self.v)))


class Gradients(unittest.TestCase):
    def test_refused_where_nothing_computes_them(self):
        q, leaf = normal(1, 2, 5, 64), normal(1, 2, 5, 64).requires_grad_()
        for function in (acromion.sdpa, OPERATOR.sdpa, torch.compile(acromion.sdpa, backend="aot_eager")):
            if not HAS_GPU:  # tests/python/test_gradients.py
                break
            with self.assertRaisesRegex(NotImplementedError, "requires a gradient, and no kernel"):
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

    def test_compile_with_pytorch_s_names(self):
        q, k = normal(1, 2, 9, 64), normal(1, 2, 9, 64)
        wanted = acromion.sdpa(q, k, k, is_causal=True)

        def named(q, k):
            return acromion.sdpa(query=q, key=k, value=k, attn_mask=None, dropout_p=0.0, is_causal=True)

        def placed(q, k):
            return acromion.sdpa(q, k, k, None, 0.0, True)
        for function in (named, placed):
            found = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k)
            torch.testing.assert_close(found, wanted, atol=0, rtol=0)

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
