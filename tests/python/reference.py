"""definition.py for PyTorch's tensors, on any device."""
import definition
import torch


def _array(x):
    if not isinstance(x, torch.Tensor):
        return x
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def visible(*lengths, device="cpu", **limits):
    """[batch, 1, q_len, kv_len]: which keys a query sees."""
    seen = definition.visible(*lengths, **{name: _array(x) for name, x in limits.items()})
    return torch.from_numpy(seen).to(device)


def attention(q, k, v, **given):
    """(output, log-sum-exp) of [batch, heads, length, dim] in float64; that of a row without keys or sink is -inf."""
    found = definition.attention(_array(q), _array(k), _array(v), **{name: _array(x) for name, x in given.items()})
    return tuple(torch.from_numpy(x).to(q.device) for x in found)
