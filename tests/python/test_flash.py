#!/usr/bin/env python3
"""acromion.flash against the definition, on the CPU. Needs the installed package, PyTorch and transformers."""
import unittest
from unittest import mock

import torch

import reference
from acromion.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def attention(q, k, v, causal=False, window_size=(-1, -1), kv_lens=None, kv_starts=None, **scores):
    """FlashAttention's meaning, [batch, length, heads, dim]: a mask of positions, said without acromion's limits."""
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    ends = torch.full((batch,), keys) if kv_lens is None else kv_lens
    starts = torch.zeros(batch, dtype=torch.long) if kv_starts is None else kv_starts
    i = torch.arange(rows)[:, None] + (ends - rows)[:, None, None]
    j = torch.arange(keys)
    seen = (j < ends[:, None, None]) & (j >= starts[:, None, None])
    left, right = window_size[0], 0 if causal else window_size[1]
    if left >= 0:
        seen = seen & (j >= i - left)
    if right >= 0:
        seen = seen & (j <= i + right)
    slopes = scores.pop("alibi_slopes", None)
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
    if slopes is not None:
        mask = mask - slopes[:, None, None] * (i - j).abs()[:, None]
    out, lse = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, **scores)
    return out.transpose(1, 2), lse


def check(got, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)


class Plain(unittest.TestCase):
    def test_values(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            q, k, v = (normal(*shape, dtype=dtype) for shape in ((2, 5, 6, 32), (2, 9, 2, 32), (2, 9, 2, 16)))
            for limits in ({}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (-1, 1)},
                           {"window_size": (2, 0)}, {"window_size": (0, -1)}, {"causal": True, "window_size": (4, 7)}):
                with self.subTest(dtype=dtype, **limits):
                    out, lse, dropped = flash_attn_func(q, k, v, softmax_scale=0.3, softcap=5.0, return_attn_probs=True,
                                                        deterministic=True, **limits)
                    wanted, wanted_lse = attention(q, k, v, scale=0.3, softcap=5.0, **limits)
                    check(out, wanted, dtype)
                    check(lse, wanted_lse, dtype)
                    self.assertIsNone(dropped)

    def test_alibi_sinks_and_strides(self):
        q, k, v = (normal(2, 32, 4, 7).permute(0, 3, 2, 1) for _ in range(3))  # rows do not lie side by side
        slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 0.0]), normal(4).bfloat16()
        check(flash_attn_func(q, k, v, 0.0, None, True, alibi_slopes=slopes),
              attention(q, k, v, causal=True, alibi_slopes=slopes)[0])
        check(flash_attn_func(q, k, v, s_aux=sinks), attention(q, k, v, sinks=sinks.float())[0])

    def test_gradients(self):
        ours, theirs = ([normal(2, 6, 4, 16).requires_grad_(), normal(2, 8, 2, 16).requires_grad_(),
                         normal(2, 8, 2, 16).add(1).detach().requires_grad_()] for _ in range(2))
        weights = normal(2, 6, 4, 16)
        (flash_attn_func(*ours, causal=True, window_size=(3, 0)) * weights).sum().backward()
        (attention(*theirs, causal=True, window_size=(3, 0))[0] * weights).sum().backward()
        for mine, other in zip(ours, theirs):
            check(mine.grad, other.grad)

    def test_refusals(self):
        q = normal(1, 4, 2, 16)
        with self.assertRaisesRegex(NotImplementedError, "dropout_p is 0.1, must be 0"):
            flash_attn_func(q, q, q, 0.1)
        with self.assertRaisesRegex(NotImplementedError, "dropout_p is 0.1, must be 0"):
            flash_attn_varlen_func(q[0], q[0], q[0], None, None, 4, 4, 0.1)
        with self.assertRaisesRegex(NotImplementedError, r"alibi_slopes is \(1, 2\), must be of one dimension"):
            flash_attn_func(q, q, q, alibi_slopes=normal(1, 2))
        with self.assertRaisesRegex(ValueError, "scale is -1"):
            flash_attn_func(q, q, q, softmax_scale=-1.0)


class Packed(unittest.TestCase):
    def setUp(self):
        self.q_offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        self.k_offsets = torch.tensor([0, 6, 8, 19], dtype=torch.int32)
        self.q, self.k, self.v = normal(9, 4, 16), normal(19, 2, 16), normal(19, 2, 16).add(1)

    def each(self, q, k, v, **limits):
        """The definition, sequence by sequence."""
        parts = [attention(*(x[a:b][None] for x, (a, b) in zip(
            (q, k, v), (self.q_offsets[s:s + 2], self.k_offsets[s:s + 2], self.k_offsets[s:s + 2]))), **limits)
            for s in (0, 2)]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def test_values_and_gradients(self):
        mine, other = ([x.clone().requires_grad_() for x in (self.q, self.k, self.v)] for _ in range(2))
        out, lse, _ = flash_attn_varlen_func(*mine, self.q_offsets, self.k_offsets, 5, torch.tensor(11), causal=True,
                                             window_size=(4, 0), return_attn_probs=True)
        wanted, wanted_lse = self.each(*other, causal=True, window_size=(4, 0))
        check(out, wanted)
        check(lse, wanted_lse)
        out.sum().backward()
        wanted.sum().backward()
        for x, y in zip(mine, other):
            check(x.grad, torch.zeros_like(x) if y.grad is None else y.grad)

    def test_block_table(self):
        page, table = 4, torch.tensor([[5, 0, -1], [3, -1, -1], [7, 2, 6]], dtype=torch.int32)
        k, v = (torch.full((8, page, 2, 16), float("nan")) for _ in range(2))
        for s in range(3):
            first, end = self.k_offsets[s:s + 2].tolist()
            for j in range(first, end):
                at = table[s, (j - first) // page], (j - first) % page
                k[at], v[at] = self.k[j], self.v[j]
        for longest in (11, 1000):
            check(flash_attn_varlen_func(self.q, k, v, self.q_offsets, self.k_offsets, 5, longest, causal=True,
                                         block_table=table), self.each(self.q, self.k, self.v, causal=True)[0])


def rotated(x, positions, cos, sin, interleaved):
    """[batch, length, heads, dim] turned by positions [batch, length]."""
    half = cos.shape[1]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    turning, rest = x[..., :2 * half], x[..., 2 * half:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pairs = (a * c - b * s, b * c + a * s)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)


class Cache(unittest.TestCase):
    def setUp(self):
        self.before = torch.tensor([3, 7], dtype=torch.int32)
        self.k_cache, self.v_cache = normal(5, 16, 2, 16), normal(5, 16, 2, 16).add(1)
        self.k, self.v = normal(2, 4, 2, 16).add(2), normal(2, 4, 2, 16).add(3)
        angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.5, 0.2])
        self.cos, self.sin = angles.cos(), angles.sin()

    def written(self, entries, k):
        """What the caches of the sequences hold afterwards."""
        k_cache, v_cache = self.k_cache[entries].clone(), self.v_cache[entries].clone()
        for b, first in enumerate(self.before.tolist()):
            k_cache[b, first:first + 4], v_cache[b, first:first + 4] = k[b], self.v[b]
        return k_cache, v_cache

    def test_reading(self):
        q, k, v = normal(2, 3, 4, 16), self.k_cache[:2], self.v_cache[:2]
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=self.before, causal=True, return_softmax_lse=True)
        wanted, wanted_lse = attention(q, k, v, causal=True, kv_lens=self.before)
        check(out, wanted)
        check(lse, wanted_lse)
        check(flash_attn_with_kvcache(q, k, v), attention(q, k, v)[0])
        check(flash_attn_with_kvcache(q, k, v, cache_seqlens=9, window_size=(4, 1)),
              attention(q, k[:, :9], v[:, :9], window_size=(4, 1))[0])
        pad = torch.tensor([1, 5], dtype=torch.int32)
        check(flash_attn_with_kvcache(q, k, v, cache_seqlens=self.before, cache_leftpad=pad),
              attention(q, k, v, kv_lens=self.before, kv_starts=pad)[0])

    def test_appending_and_rotating(self):
        positions = self.before[:, None] + torch.arange(4)
        for rows, causal, interleaved in ((4, True, True), (4, True, False), (2, True, True), (4, False, True)):
            for entries in (None, torch.tensor([4, 1], dtype=torch.int32)):
                with self.subTest(rows=rows, causal=causal, interleaved=interleaved, entries=entries):
                    q = normal(2, rows, 4, 16)
                    chosen = [0, 1] if entries is None else entries.tolist()
                    k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
                    given = (k_cache, v_cache) if entries is not None else (k_cache[:2], v_cache[:2])
                    out = flash_attn_with_kvcache(q, *given, self.k, self.v, self.cos, self.sin, self.before, entries,
                                                  causal=causal, rotary_interleaved=interleaved)
                    k, v = self.written(chosen, rotated(self.k, positions, self.cos, self.sin, interleaved))
                    check(k_cache[chosen], k)
                    check(v_cache[chosen], v)
                    others = [i for i in range(5) if i not in chosen]
                    self.assertTrue(torch.equal(k_cache[others], self.k_cache[others]))
                    stands = positions[:, :rows] if causal else self.before[:, None].expand(-1, rows)
                    turned = rotated(q, stands, self.cos, self.sin, interleaved)
                    check(out, attention(turned, k, v, causal=causal, kv_lens=self.before + 4)[0])

    def test_block_table(self):
        table = torch.tensor([[6, 1, 3, 9], [0, 8, 2, 4]], dtype=torch.int32)
        pages = [torch.full((10, 4, 2, 16), float("nan")) for _ in range(2)]
        for cache, entries in zip(pages, (self.k_cache, self.v_cache)):
            for b in range(2):
                cache[table[b].long()] = entries[b].unflatten(0, (4, 4))
        q = normal(2, 4, 4, 16)
        out = flash_attn_with_kvcache(q, *pages, self.k, self.v, cache_seqlens=self.before, block_table=table,
                                      causal=True)
        k, v = self.written([0, 1], self.k)
        check(out, attention(q, k, v, causal=True, kv_lens=self.before + 4)[0])
        check(pages[0][table.long()].flatten(1, 2), k)

    def test_refusals(self):
        q, k, v = normal(2, 3, 4, 16), self.k_cache[:2], self.v_cache[:2]
        entries = torch.tensor([0, 1], dtype=torch.int32)
        for arguments, text in (({"k": self.k}, "v is missing"),
                                ({"k": self.k, "v": self.v}, "cache_seqlens is missing"),
                                ({"rotary_cos": self.cos}, "come together"),
                                ({"rotary_cos": self.cos, "rotary_sin": self.sin}, "without k and v"),
                                ({"block_table": entries[:, None]}, "cache_seqlens is missing"),
                                ({"block_table": entries[:, None], "cache_batch_idx": entries}, "with block_table")):
            with self.assertRaisesRegex(ValueError, text):
                flash_attn_with_kvcache(q, k, v, **arguments)
        with self.assertRaisesRegex(NotImplementedError, "num_splits is 2, must be 0"):
            flash_attn_with_kvcache(q, k, v, num_splits=2)


class Transformers(unittest.TestCase):
    """transformers looks for the package flash_attn on CUDA only; what it calls there is called here."""

    def test_padded_batches(self):
        from transformers import modeling_flash_attention_utils as utils
        ours = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, utils._pad_input, utils._unpad_input)
        q, k, v = normal(2, 6, 4, 16), normal(2, 6, 2, 16), normal(2, 6, 2, 16).add(1)
        padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
        sinks = normal(4)
        with mock.patch.object(utils, "_lazy_imports", lambda *args, **keywords: ours), \
                mock.patch.object(utils, "_loaded_implementation", None):
            for mask in (None, padding):
                out = utils._flash_attention_forward(q, k, v, mask, 6, True, sliding_window=3, softcap=4.0, s_aux=sinks,
                                                     attn_implementation="flash_attention_2")
                starts = None if mask is None else torch.tensor([0, 2])
                wanted, _ = attention(q, k, v, causal=True, window_size=(2, 0), kv_starts=starts, softcap=4.0,
                                      sinks=sinks)
                wanted = wanted if mask is None else wanted * padding[:, :, None, None]
                check(out, wanted)


if __name__ == "__main__":
    unittest.main()
