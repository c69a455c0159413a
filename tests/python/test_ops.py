#!/usr/bin/env python3
"""acromion.merge, acromion.append and acromion.sdpa_paged on NumPy's arrays. Needs the installed package and NumPy."""
import unittest

import numpy as np

import acromion
import definition


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Merging(unittest.TestCase):
    def test_parts_of_the_keys(self):
        q, k, v = (random(2, 4, n, 16, seed=i) for i, n in enumerate((7, 50, 50)))
        whole, whole_lse = acromion.sdpa(q, k, v, return_lse=True)
        parts = [acromion.sdpa(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 1), (1, 30), (30, 50))]
        outs, lses = zip(*parts)
        out, lse = acromion.merge(outs, lses)
        np.testing.assert_allclose(out, whole, atol=2e-6)
        np.testing.assert_allclose(lse, whole_lse, atol=2e-6)
        again, _ = acromion.merge(outs, lses, out=outs[0], out_lse=lses[0])
        self.assertIs(again, outs[0])
        np.testing.assert_array_equal(again, out)

    def test_types_layouts_and_packed(self):
        outs = [random(3, 5, 2, 8, dtype=np.float16, seed=i) for i in range(2)]
        lses = [random(3, 2, 5, seed=i + 5) for i in range(2)]
        out, lse = acromion.merge(outs, lses, layout="bshd", out=np.empty((3, 5, 2, 8), np.float32))
        weights = np.exp(np.stack(lses) - np.logaddexp(*lses))[..., None].transpose(0, 1, 3, 2, 4)
        np.testing.assert_allclose(out, (weights * np.stack(outs).astype(np.float64)).sum(0), atol=1e-6)
        np.testing.assert_allclose(lse, np.logaddexp(*lses), atol=1e-6)
        packed, _ = acromion.merge([o[0] for o in outs], [m[0] for m in lses])
        np.testing.assert_allclose(packed, out[0].astype(np.float16), atol=1e-3)

    def test_refusals(self):
        out, lse = random(1, 2, 3, 4), random(1, 2, 3)
        for outs, lses, text in (([], [], "outs is empty"), ([out], [lse, lse], "1 outs and 2 lses"),
                                 ([out, out[:, :1]], [lse, lse[:, :1]], "must be as a part's out"),
                                 ([out], [lse[:, :, :2]], "a part's lse must be"),
                                 ([out, out.astype(np.float16)], [lse, lse], "part 1 differs")):
            with self.assertRaisesRegex(ValueError, text):
                acromion.merge(outs, lses, out=np.empty_like(out), out_lse=np.empty_like(lse))
        with self.assertRaisesRegex(TypeError, "float64"):
            acromion.merge([out.astype(np.float64)], [lse])
        with self.assertRaisesRegex(ValueError, "layout is 'sbhd'"):
            acromion.merge([out], [lse], layout="sbhd")
        with self.assertRaisesRegex(ValueError, "args.o overlaps args.parts.1..o"):
            acromion.merge([out, out.copy()][::-1], [lse, lse], out=out)


def turned(x, positions, cos, sin):
    """Halves of each row, [batch, heads, length, dim]."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


class Appending(unittest.TestCase):
    def setUp(self):
        self.k, self.v, self.q = random(2, 3, 4, 8), random(2, 3, 4, 6, seed=1), random(2, 6, 4, 8, seed=2)
        self.lens = np.array([4, 9], np.int32)
        angles = np.arange(12)[:, None] * np.array([1.0, 0.5, 0.2, 0.1])
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.positions = np.array([[0, 1, 2, 3], [5, 6, 7, 8]])

    def test_plain_cache(self):
        k_cache, v_cache = np.zeros((2, 3, 10, 8), np.float32), np.zeros((2, 3, 10, 6), np.float32)
        q = acromion.append(self.k, self.v, k_cache, v_cache, self.lens, q=self.q, cos=self.cos, sin=self.sin)
        np.testing.assert_allclose(q, turned(self.q, self.positions, self.cos, self.sin), atol=1e-6)
        wanted = turned(self.k, self.positions, self.cos, self.sin)
        for b, first in enumerate((0, 5)):
            np.testing.assert_allclose(k_cache[b, :, first:first + 4], wanted[b], atol=1e-6)
            np.testing.assert_array_equal(v_cache[b, :, first:first + 4], self.v[b])
        self.assertEqual(np.count_nonzero(v_cache), 2 * 3 * 4 * 6)
        in_place = self.q.copy()
        self.assertIs(acromion.append(None, None, None, None, self.lens, q=in_place, q_out=in_place, cos=self.cos,
                                      sin=self.sin), in_place)
        np.testing.assert_array_equal(in_place, q)

    def test_pages_and_packed_sequences(self):
        table = np.array([[3, 0, -1], [1, 2, 4]], np.int32)
        pages = np.zeros((5, 4, 3, 6), np.float16)  # [pages, page, heads, dim]
        v = np.concatenate([self.v[0].transpose(1, 0, 2), self.v[1].transpose(1, 0, 2)[:2]]).astype(np.float16)
        acromion.append(None, v, None, pages, self.lens, offsets=np.array([0, 4, 6], np.int32), page_table=table,
                        layout="bshd")
        np.testing.assert_array_equal(pages[3], v[:4])
        np.testing.assert_array_equal(pages[2, 3], v[4])
        np.testing.assert_array_equal(pages[4, 0], v[5])
        self.assertFalse(pages[0].any() or pages[1].any())

    def test_refusals(self):
        k_cache, v_cache = np.zeros((2, 3, 10, 8), np.float32), np.zeros((2, 3, 10, 6), np.float32)
        good = {"k": self.k, "v": self.v, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": self.lens}
        for change, text in (({"v_cache": None}, "v_cache is missing"), ({"v_cache": v_cache[:, :2]}, "v_cache is"),
                             ({"kv_lens": self.lens[:1]}, "k is"), ({"cos": self.cos}, "sin is missing"),
                             ({"k_scale": 2.0}, "only an e4m3 cache"), ({"k": k_cache[:, :, :4]}, "overlaps"),
                             ({"page_table": self.lens}, "page_table must have two"),
                             ({"cos": self.cos, "sin": self.sin, "rope_first": 2}, "at most qk_dim"),
                             ({"q": self.q}, "rope_dim is 0")):
            with self.assertRaisesRegex(ValueError, text):
                acromion.append(**{**good, **change})
        with self.assertRaisesRegex(TypeError, "kv_lens is int64"):
            acromion.append(**{**good, "kv_lens": self.lens.astype(np.int64)})


def gathered(cache, table):
    """[batch, heads, positions, dim] of pages [pages, heads, page, dim]; numbers that name no page give zeros."""
    pages = np.where((table >= 0) & (table < len(cache)), table, 0)
    batch, count = table.shape
    return cache[pages].transpose(0, 2, 1, 3, 4).reshape(batch, cache.shape[1], count * cache.shape[2], -1)


class Paged(unittest.TestCase):
    """sdpa_paged against the definition on gathered keys. Pages out of order, shared, and stale ones of NaN."""

    def cache(self, page):
        k, v = random(12, 2, page, 16, seed=1), random(12, 2, page, 24, seed=2)
        k[9:], v[9:] = np.nan, np.nan
        count = -(-40 // page)
        table = np.random.default_rng(page).integers(0, 9, (3, count)).astype(np.int32)
        lens = np.array([40, 1, count * page // 2], np.int32).clip(1, count * page)
        for b, n in enumerate(lens):
            table[b, -(-n // page):] = (9, -7, 2**31 - 1)[b]
        return k, v, table, lens

    def test_page_sizes_and_layouts(self):
        for page in (1, 4, 16, 64):
            k, v, table, lens = self.cache(page)
            q = random(3, 6, 5, 16, seed=page)
            # what lies behind a length is NaN in the cache, and zero for the definition
            wanted, wanted_lse = definition.attention(q, np.nan_to_num(gathered(k, table)),
                                                      np.nan_to_num(gathered(v, table)), kv_lens=lens, is_causal=True,
                                                      causal_align="bottom_right", window=7, softcap=3.0)
            out, lse = acromion.sdpa_paged(q, k, v, table, lens, is_causal=True, window=7, softcap=3.0,
                                           return_lse=True)
            np.testing.assert_allclose(out, wanted, atol=1e-5)
            np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
            both = np.stack([k.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)], 1)  # [pages, 2, page, heads, dim]
            turned_out = acromion.sdpa_paged(q.transpose(0, 2, 1, 3), both[:, 0], v.transpose(0, 2, 1, 3), table, lens,
                                             layout="bshd", is_causal=True, window=7, softcap=3.0)
            np.testing.assert_array_equal(turned_out.transpose(0, 2, 1, 3), out)
            wide = np.full((3, table.shape[1] + 5), -1, np.int32)  # a part of a wider table
            wide[:, :table.shape[1]] = table
            np.testing.assert_array_equal(
                acromion.sdpa_paged(q, k, v, wide[:, :table.shape[1]], lens, is_causal=True, window=7, softcap=3.0,
                                    out=np.empty_like(out)), out)

    def test_packed_queries(self):
        k, v, table, lens = self.cache(8)
        offsets, sinks = np.array([0, 7, 8, 11], np.int32), random(6)
        q = random(11, 6, 16)
        for layout, (keys, values) in {"bhsd": (k, v), "bshd": (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
                                       }.items():
            out, lse = acromion.sdpa_paged(q, keys, values, table, lens, q_offsets=offsets, max_q_len=7,
                                           layout=layout, is_causal=True, sinks=sinks, return_lse=True)
            for b in range(3):
                rows = slice(offsets[b], offsets[b + 1])
                wanted, wanted_lse = definition.attention(
                    q[rows].transpose(1, 0, 2)[None], gathered(k, table[b:b + 1])[:, :, :lens[b]],
                    gathered(v, table[b:b + 1])[:, :, :lens[b]], is_causal=True, causal_align="bottom_right",
                    sinks=sinks)
                np.testing.assert_allclose(out[rows].transpose(1, 0, 2)[None], wanted, atol=1e-5)
                np.testing.assert_allclose(lse[:, rows][None], wanted_lse, atol=1e-5)

    def test_values_inside_keys_and_invariant_rows(self):
        k, _, table, lens = self.cache(16)
        q = random(3, 4, 5, 16)
        out = acromion.sdpa_paged(q, k, None, table, lens, v_dim=12, scale=0.3, invariant=True)
        wanted, _ = definition.attention(q, np.nan_to_num(gathered(k, table)),
                                         np.nan_to_num(gathered(k, table))[..., :12], scale=0.3, kv_lens=lens)
        np.testing.assert_allclose(out, wanted, atol=1e-5)
        alone = acromion.sdpa_paged(q[1:2, :, 3:4], k, None, table[1:2], lens[1:2], v_dim=12, scale=0.3, invariant=True)
        np.testing.assert_array_equal(alone, out[1:2, :, 3:4])
        plain = acromion.sdpa(q, np.nan_to_num(k[:3, :1]), None, v_dim=12, scale=0.3, enable_gqa=True)
        self.assertEqual(plain.shape, (3, 4, 5, 12))

    def test_explain_and_refusals(self):
        k, v, table, lens = self.cache(16)
        good = {"q": random(3, 6, 5, 16), "k_cache": k, "v_cache": v, "page_table": table, "kv_lens": lens}
        self.assertIn(":kvlens:page16", acromion.explain(good["q"], k, v, page_table=table, kv_lens=lens))
        for change, text in (({"kv_lens": None}, "kv_lens is missing"), ({"page_table": None}, "page_table is None"),
                             ({"page_table": table[:2]}, r"page_table must have two dimensions \[3, "),
                             ({"page_table": table[:, ::2]}, "page_table has strides"),
                             ({"kv_lens": lens[:2]}, "kv_lens must have one dimension of q's batch, 3"),
                             ({"v_cache": v[:5]}, "v_cache has extent 5 in dimension 0, must be 12, k's pages"),
                             ({"v_cache": v[:, :, :4]}, "must be 16, k's page"), ({"v_cache": None}, "v is None"),
                             ({"v_dim": 8, "scale": 1.0}, "v is another tensor than k"),
                             ({"v_dim": 8, "v_cache": None}, "scale is missing"),
                             ({"v_dim": 17, "v_cache": None, "scale": 1.0}, "v_dim is 17, must be at most"),
                             ({"max_kv_len": 49}, "max_kv_len is 49, and page_table has 3 pages of 16"),
                             ({"max_q_len": 5}, "are of packed"), ({"kv_offsets": lens}, "kv_offsets is given with"),
                             ({"k_cache": k[:0], "v_cache": v[:0]}, "k_cache has no pages"),
                             ({"k_cache": k[0], "v_cache": v[0]}, r"3 dimensions, must have 4: \[pages, heads, page"),
                             ({"k_scale": 2.0}, "k_scale")):
            with self.subTest(str(list(change))), self.assertRaisesRegex(ValueError, text):
                acromion.sdpa_paged(**{**good, **change})
        with self.assertRaisesRegex(TypeError, "page_table is int64, must be int32"):
            acromion.sdpa_paged(**{**good, "page_table": table.astype(np.int64)})
        with self.assertRaisesRegex(TypeError, r"sdpa_paged\(\) takes up to 5 positional arguments \(q, k_cache"):
            acromion.sdpa_paged(*good.values(), None)
        with self.assertRaisesRegex(TypeError, r"sdpa_paged\(\) is missing the argument 'page_table'"):
            acromion.sdpa_paged(good["q"], k, v)


if __name__ == "__main__":
    unittest.main()
