"""The table of cases: which problems the Python package is compared with float64 on. The same seed gives the same
table everywhere. Standard library only."""
import dataclasses
import random

LENGTHS = ((1, 1), (1, 7), (1, 333), (5, 129), (17, 17), (33, 65), (64, 64), (127, 127), (128, 128), (200, 72),
           (256, 256))
HEADS = ((1, 1), (4, 4), (8, 2), (6, 1), (5, 5))
DIMS = ((64, 64), (128, 128), (32, 32), (40, 40), (64, 32), (96, 96), (256, 256))
MASKS = (None, "top_left", "bottom_right")
VIEWS = ("packed", "transposed", "sliced", "expanded", "offset")


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int
    v_dim: int
    align: "str | None"  # causal_align; None: no causal mask
    has_lens: bool
    layout: str
    view: str
    scale: "float | None"
    seed: int

    def __str__(self):
        mask = f":{self.align}" if self.align else ""
        return (f"{self.dtype}:b{self.batch}:h{self.q_heads}/{self.kv_heads}:s{self.q_len}/{self.kv_len}:"
                f"d{self.qk_dim}/{self.v_dim}{mask}{':kvlens' if self.has_lens else ''}:{self.layout}:{self.view}:"
                f"scale={self.scale}:seed={self.seed}")

    def arguments(self):
        """The keyword arguments of sdpa that a case needs, without tensors."""
        return {"is_causal": self.align is not None, "causal_align": self.align, "scale": self.scale,
                "enable_gqa": self.q_heads != self.kv_heads, "layout": self.layout, "return_lse": True}

    def lens(self):
        """Key lengths for the batch, 0 and kv_len among the possible ones, or None."""
        if not self.has_lens:
            return None
        chance = random.Random(self.seed)
        return [chance.randint(0, self.kv_len) for _ in range(self.batch)]


def table(count, dtypes):
    """`count` different cases."""
    chance = random.Random(20261121)
    found = {}
    while len(found) < count:
        lengths, heads, dims = chance.choice(LENGTHS), chance.choice(HEADS), chance.choice(DIMS)
        key = (dtypes[len(found) % len(dtypes)], chance.choice((1, 2, 3)), *heads, *lengths, *dims,
               chance.choice(MASKS), chance.random() < 0.4, chance.choice(("bhsd", "bshd")), chance.choice(VIEWS),
               chance.choice((None, None, 0.3)))
        found.setdefault(key, Case(*key, seed=len(found)))
    return list(found.values())
