#!/usr/bin/env python3
"""acromion.merge and acromion.append on NumPy's arrays. Needs the installed package and NumPy."""
import unittest

import numpy as np

import acromion


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


if __name__ == "__main__":
    unittest.main()
