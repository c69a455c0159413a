#!/usr/bin/env python3
"""Gradients of acromion.sdpa on the CPU: against float64 by definition, against PyTorch's own, under torch.compile, and
a small model that learns as it does with PyTorch's attention. Needs the installed package and PyTorch."""
import unittest

import torch
import torch.nn.functional as F

import acromion
import reference

STEPS = 12


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def gradients(function, inputs, weight):
    """The gradients of the sum of weight * function(*inputs) with respect to each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    (function(*leaves).double() * weight).sum().backward()
    return [x.grad for x in leaves]


class Values(unittest.TestCase):
    LENS = torch.tensor([9, 13], dtype=torch.int32)
    CASES = (
        ({}, 9, 13), ({"is_causal": True}, 11, 11), ({"is_causal": True, "causal_align": "top_left"}, 7, 12),
        ({"is_causal": True, "causal_align": "bottom_right"}, 7, 12), ({"window": 4, "is_causal": True}, 12, 12),
        ({"window": (3, 2)}, 12, 12), ({"softcap": 1.5, "is_causal": True}, 10, 10), ({"kv_lens": LENS}, 6, 13),
        ({"scale": 0.3}, 5, 70), ({"chunk": 5, "is_causal": True}, 13, 13),
        ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}, 8, 8),
        ({"attn_mask": normal(2, 1, 9, 13)}, 9, 13),
        ({"attn_mask": torch.arange(13) != 3}, 9, 13),
    )

    def check(self, dtype, arguments, q_len, kv_len, tolerance):
        tensors = [normal(2, 4, q_len, 16, dtype=dtype), normal(2, 2, kv_len, 16, dtype=dtype, seed=1),
                   normal(2, 2, kv_len, 24, dtype=dtype, seed=2)]
        weight = normal(2, 4, q_len, 24).double()
        found = gradients(lambda q, k, v: acromion.sdpa(q, k, v, enable_gqa=True, **arguments), tensors, weight)
        wanted = gradients(lambda q, k, v: reference.attention(q, k, v, **arguments)[0],
                           [x.double() for x in tensors], weight)
        for name, x, y in zip("qkv", found, wanted):
            self.assertEqual(x.dtype, dtype)
            with self.subTest(f"d{name}"):
                torch.testing.assert_close(x.double(), y, atol=tolerance, rtol=tolerance)

    def test_definition(self):
        for arguments, q_len, kv_len in self.CASES:
            for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1.5e-2), (torch.bfloat16, 8e-2)):
                with self.subTest(str(arguments), dtype=dtype):
                    self.check(dtype, arguments, q_len, kv_len, tolerance)

    def test_sinks(self):
        tensors = [normal(2, 4, 9, 16), normal(2, 4, 9, 16, seed=1), normal(2, 4, 9, 16, seed=2), normal(4, seed=3)]
        weight = normal(2, 4, 9, 16).double()
        found = gradients(lambda q, k, v, s: acromion.sdpa(q, k, v, is_causal=True, sinks=s), tensors, weight)
        wanted = gradients(lambda q, k, v, s: reference.attention(q, k, v, is_causal=True, sinks=s)[0],
                           [x.double() for x in tensors], weight)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)

    def test_packed_sequences(self):
        offsets = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
        tensors = [normal(14, 2, 16), normal(14, 2, 16, seed=1), normal(14, 2, 16, seed=2)]
        weight = normal(14, 2, 16).double()

        def one_by_one(q, k, v):
            parts = [reference.attention(*(x[first:end].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)[0]
                     for first, end in ((0, 5), (5, 14))]
            return torch.cat([part[0].transpose(0, 1) for part in parts])
        found = gradients(lambda q, k, v: acromion.sdpa(q, k, v, is_causal=True, causal_align="bottom_right",
                                                        q_offsets=offsets, kv_offsets=offsets), tensors, weight)
        for x, y in zip(found, gradients(one_by_one, [x.double() for x in tensors], weight)):
            torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)

    def test_pytorch_s_own(self):
        for layout in ("bhsd", "bshd"):
            shape = (2, 3, 40, 32) if layout == "bhsd" else (2, 40, 3, 32)
            tensors, weight = [normal(*shape, seed=i) for i in range(3)], normal(*shape).double()

            def sdpa(q, k, v, turned=layout == "bshd"):
                if not turned:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
                return out.transpose(1, 2)
            found = gradients(lambda q, k, v: acromion.sdpa(q, k, v, is_causal=True, layout=layout), tensors, weight)
            for x, y in zip(found, gradients(sdpa, tensors, weight)):
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)

    def test_rows_without_keys(self):
        q, k = normal(1, 1, 6, 16).requires_grad_(), normal(1, 1, 4, 16).requires_grad_()
        acromion.sdpa(q, k, k, is_causal=True, causal_align="bottom_right").sum().backward()
        self.assertTrue(torch.equal(q.grad[0, 0, :2], torch.zeros(2, 16)))
        self.assertTrue(bool(k.grad.isfinite().all()))


class Forms(unittest.TestCase):
    """How a gradient may arrive, and where one is asked for."""

    def test_repeated_and_transposed_gradients_of_the_output(self):
        q = normal(2, 3, 8, 16)
        for weight in (torch.ones(()).expand(2, 3, 8, 16), normal(2, 3, 16, 8).transpose(2, 3),
                       normal(1, 3, 8, 16).expand(2, 3, 8, 16), normal(2, 8, 3, 16).transpose(1, 2)):
            found = gradients(lambda x: acromion.sdpa(x, x, x), [q], weight)[0]
            wanted = gradients(lambda x: F.scaled_dot_product_attention(x, x, x), [q], weight)[0]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    def test_some_inputs_only(self):
        q, k, v = (normal(1, 2, 7, 16, seed=i) for i in range(3))
        v.requires_grad_()
        out, lse = acromion.sdpa(q, k, v, return_lse=True)
        out.sum().backward()
        self.assertIsNone(q.grad)
        self.assertEqual(v.grad.shape, v.shape)
        self.assertEqual(lse.shape, (1, 2, 7))

    def test_views_that_are_to_be_negated(self):
        """What an eager call may not read past the dispatcher."""
        q, weight = normal(1, 2, 7, 16), normal(1, 2, 7, 16, seed=1)
        # Queries alone: attention is odd in all three together, and two wrong signs would cancel.
        found, wanted = (gradients(lambda x: acromion.sdpa(negate(x), x, x), [q], weight)[0]
                         for negate in (torch._neg_view, torch.neg))
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)

    def test_modes_see_the_operators(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Names(TorchDispatchMode):
            seen = []

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.seen.append(str(function))
                return function(*args, **(kwargs or {}))
        q = normal(1, 2, 7, 16).requires_grad_()
        with Names():
            acromion.sdpa(q, q, q).sum().backward()
        for name in ("acromion.sdpa_lse.default", "acromion.sdpa_backward.default"):
            self.assertIn(name, Names.seen)

    def test_reruns_give_the_same_bits(self):
        tensors, weight = [normal(2, 4, 150, 32, seed=i) for i in range(3)], normal(2, 4, 150, 32).double()

        def run():
            return gradients(lambda q, k, v: acromion.sdpa(q, k, v, is_causal=True), tensors, weight)
        for x, y in zip(run(), run()):
            self.assertTrue(torch.equal(x, y))

    def test_nothing_to_compute(self):
        q, k = normal(0, 2, 7, 16).requires_grad_(), normal(0, 2, 9, 16)
        acromion.sdpa(q, k, k).sum().backward()
        self.assertEqual(q.grad.shape, q.shape)

    def test_compiled(self):
        tensors, weight = [normal(2, 4, 9, 16, seed=i) for i in range(3)], normal(2, 4, 9, 16).double()

        def block(q, k, v):
            return acromion.sdpa(q * 1.5, k, v, is_causal=True) + 1
        wanted = gradients(block, tensors, weight)
        found = gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), tensors, weight)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)

    def test_operator(self):
        q = normal(1, 2, 5, 16).requires_grad_()
        k = normal(1, 1, 5, 16).requires_grad_()
        torch.library.opcheck(torch.ops.acromion.sdpa_lse.default, (q, k, k), {"enable_gqa": True},
                              test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))

    def test_checkpoint(self):
        q = normal(1, 2, 9, 16).requires_grad_()
        torch.utils.checkpoint.checkpoint(lambda x: acromion.sdpa(x, x, x), q, use_reentrant=False).sum().backward()
        found, q.grad = q.grad, None
        acromion.sdpa(q, q, q).sum().backward()
        self.assertTrue(torch.equal(found, q.grad))


class Refusals(unittest.TestCase):
    def test_by_name(self):
        q = normal(1, 2, 8, 16).requires_grad_()
        mask = normal(8, 8)
        ranges, tree = torch.zeros(1, 1, 2, dtype=torch.int32), torch.full((1, 8, 1), 255, dtype=torch.uint8)
        calls = {
            "attn_mask requires a gradient": lambda: acromion.sdpa(q, q, q, mask.requires_grad_()),
            "with out= nothing is recorded": lambda: acromion.sdpa(q, q, q, out=torch.empty(1, 2, 8, 16)),
            "ranges or a tree": lambda: acromion.sdpa(q, q, q, is_causal=True, ranges=ranges),
            "ranges or a tree:": lambda: acromion.sdpa(q, q, q, tree=tree),
        }
        for words, call in calls.items():
            with self.assertRaisesRegex(NotImplementedError, words.rstrip(":")):
                call()

    def test_second_gradients(self):
        q = normal(1, 2, 8, 16).requires_grad_()
        with self.assertRaisesRegex(NotImplementedError, "first gradients only"):
            torch.autograd.grad(acromion.sdpa(q, q, q).sum(), q, create_graph=True)

    def test_gradients_through_the_log_sum_exp(self):
        q = normal(1, 2, 8, 16).requires_grad_()
        with self.assertRaisesRegex(NotImplementedError, "lse.detach"):
            acromion.sdpa(q, q, q, return_lse=True)[1].sum().backward()


class Block(torch.nn.Module):
    """A layer as Llama has it: grouped queries, a gated feed-forward net, norms before both."""

    def __init__(self, width, heads, kv_heads, attention):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.attention = heads, kv_heads, width // heads, attention
        self.project = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.project(self.norms[0](x)).view(batch, length, -1, self.dim).transpose(1, 2).split(
            [self.heads, self.kv_heads, self.kv_heads], dim=1)
        attended = self.attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def losses(attention):
    """Of a model of four layers that learns to say what it read seven tokens ago."""
    torch.manual_seed(7)
    width, tokens, length = 32, 17, 24
    model = torch.nn.Sequential(torch.nn.Embedding(tokens, width), *(Block(width, 4, 2, attention) for _ in range(4)),
                                torch.nn.RMSNorm(width), torch.nn.Linear(width, tokens, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    result = []
    for step in range(STEPS):
        text = torch.randint(tokens, (4, length), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(text)[:, 7:].reshape(-1, tokens), text[:, :-7].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


class Training(unittest.TestCase):
    def test_loss_follows_pytorch_s(self):
        ours, theirs = losses(acromion.sdpa), losses(F.scaled_dot_product_attention)
        self.assertNotEqual(theirs[0], theirs[-1])
        for step, (a, b) in enumerate(zip(ours, theirs)):
            self.assertLess(abs(a - b), 2e-4 * (1 + step), f"step {step}: {a} and {b}")


if __name__ == "__main__":
    unittest.main()
