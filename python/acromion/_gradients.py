"""What acromion computes no gradients of or with: one set of rules and words for PyTorch and JAX."""
from typing import Any, Optional

WITH_GRADIENT = ("q", "k", "v", "sinks")
OUTPUT_ALONE = ("the log-sum-exp of sdpa(return_lse=True) takes part in what is differentiated, and acromion computes "
                "gradients through the output only")
FIRST_ALONE = "acromion computes first gradients only, and these would have to be differentiated again"


def not_of(name: str) -> str:
    return f"{name} requires a gradient, and acromion computes those of q, k, v and sinks only"


def not_with(arguments: Any, is_8_bit: bool) -> Optional[str]:
    """What in a call's arguments keeps gradients from being computed, or None."""
    if is_8_bit:
        return "8-bit inputs have no gradients"
    if arguments.get("page_table") is not None or arguments.get("v_dim") is not None or arguments.get("invariant"):
        return "no kernel computes gradients with page_table, v_dim or invariant"
    if arguments.get("ranges") is not None or arguments.get("tree") is not None:
        return "no kernel computes gradients with ranges or a tree"
    return None
