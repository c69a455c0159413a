#!/usr/bin/env python3
"""torch.nn.attention.activate_flash_attention_impl("ACROMION"): PyTorch's own calls by acromion, what is handed over,
what is restored. Needs the installed package and PyTorch."""
import concurrent.futures
import contextlib
import re
import subprocess
import sys
import unittest
import warnings

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import acromion
from acromion import _aten, _native

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if HAS_GPU else ("cpu", torch.float32)
FLASH = "_scaled_dot_product_flash_attention" + ("" if HAS_GPU else "_for_cpu")
UNSERVED, WHY_UNSERVED = ((torch.float32, "float32 on CUDA") if HAS_GPU else
                          (torch.float64, "q is float64, must be"))
TOLERANCE = {"atol": 4e-3, "rtol": 4e-3} if HAS_GPU else {"atol": 1e-5, "rtol": 1e-5}


def normal(*shape, dtype=DTYPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


class Case(unittest.TestCase):
    """Each test begins with acromion active and not strict, and ends with PyTorch as it was."""

    def setUp(self):
        acromion.register_torch()
        torch.nn.attention.activate_flash_attention_impl("ACROMION")
        self.addCleanup(torch.nn.attention.restore_flash_attention_impl, _raise_warn=False)
        self.told = {}

    def handed_over(self):
        """Since the test began; activating forgets what was counted."""
        return {**self.told, **acromion.fallbacks()}

    def native(self, function, *arguments, **keywords):
        """What PyTorch itself computes."""
        self.told = self.handed_over()
        torch.nn.attention.restore_flash_attention_impl()
        try:
            return function(*arguments, **keywords)
        finally:
            torch.nn.attention.activate_flash_attention_impl("ACROMION")


class Active(Case):
    def test_calls_are_acromion_s(self):
        q, k, v = normal(2, 4, 33, 64), normal(2, 4, 70, 64), normal(2, 4, 70, 64)
        out = F.scaled_dot_product_attention(q, k, v)
        self.assertTrue(torch.equal(out, acromion.sdpa(q, k, v)))  # to the bit: nobody else's
        torch.testing.assert_close(out, self.native(F.scaled_dot_product_attention, q, k, v), **TOLERANCE)
        self.assertEqual(self.handed_over(), {})

    def test_causal_scale_heads_and_layout(self):
        q, k = normal(2, 4, 33, 64), normal(2, 2, 33, 64)
        bshd = normal(2, 33, 4, 64).transpose(1, 2)
        for arguments, tensors in (({"is_causal": True}, (q, q, q)), ({"scale": 0.3}, (q, q, q)),
                                   ({"enable_gqa": True}, (q, k, k)), ({"is_causal": True}, (bshd, bshd, bshd))):
            with self.subTest(str(arguments)):
                out = F.scaled_dot_product_attention(*tensors, **arguments)
                wanted = self.native(F.scaled_dot_product_attention, *tensors, **arguments)
                torch.testing.assert_close(out, wanted, **TOLERANCE)
                self.assertEqual(out.stride(), wanted.stride())

    @unittest.skipIf(HAS_GPU, "the CPU's operator")
    def test_results_are_as_pytorch_describes_them(self):
        """Shapes, strides, types and log-sum-exp of the operator: compiled programs and the backward pass want them."""
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for q in (normal(2, 4, 33, 64), normal(2, 33, 4, 64).transpose(1, 2)):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                with self.subTest(str(dtype)):
                    x = q.to(dtype)
                    found, wanted = operator(x, x, x, 0.0, True), self.native(operator, x, x, x, 0.0, True)
                    with FakeTensorMode() as mode:
                        described = operator(*[mode.from_tensor(x)] * 3, 0.0, True)
                    for a, b, c in zip(found, wanted, described):
                        self.assertEqual((a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype))
                        self.assertEqual((a.shape, a.stride(), a.dtype), (c.shape, c.stride(), c.dtype))
                    torch.testing.assert_close(found[1], wanted[1], atol=2e-2, rtol=2e-2)
        self.assertEqual(self.handed_over(), {})

    def test_masks(self):
        """Boolean ones and such that are added, of every shape that PyTorch takes; with a gradient, too."""
        q, k, v = normal(2, 4, 33, 64), normal(2, 4, 72, 64), normal(2, 4, 72, 64)
        shapes = [(33, 72), (2, 1, 33, 72), (1, 4, 33, 72), (2, 4, 33, 72), (2, 1, 1, 72)]
        if not HAS_GPU:  # there, ATen's backward pass wants a mask's keys side by side
            shapes.append((33, 1))
        for shape in shapes:
            for mask in (normal(*shape), normal(*shape) > -1):
                with self.subTest(f"{shape} {mask.dtype}"):
                    def gradient():
                        x = q.clone().requires_grad_()
                        out = F.scaled_dot_product_attention(x, k, v, attn_mask=mask)
                        out.square().sum().backward()
                        return out.detach(), x.grad
                    (out, grad), (wanted, wanted_grad) = gradient(), self.native(gradient)
                    torch.testing.assert_close(out, wanted, **TOLERANCE)
                    torch.testing.assert_close(grad, wanted_grad, atol=10 * TOLERANCE["atol"],
                                               rtol=10 * TOLERANCE["rtol"])
                    with torch.no_grad():  # of any shape
                        told = self.handed_over()
                        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), wanted,
                                                   **TOLERANCE)
                        self.assertEqual(self.handed_over(), told)
        for reason in self.handed_over():  # cuDNN's operator gets masks as they are
            self.assertTrue(HAS_GPU and "not 4 dimensions" in reason, reason)

    def test_what_is_not_served_is_handed_over_and_counted(self):
        q = normal(2, 4, 33, 64, dtype=UNSERVED)
        for _ in range(2):
            out = F.scaled_dot_product_attention(q, q, q)
        self.assertEqual(list(acromion.fallbacks().values()), [2])
        self.assertTrue(torch.equal(out, self.native(F.scaled_dot_product_attention, q, q, q)))
        F.scaled_dot_product_attention(q, q, q)
        (told, count), = acromion.fallbacks().items()  # counted since it was activated last
        self.assertEqual(count, 1)
        self.assertRegex(told, f"^_scaled_dot_product_.*: {WHY_UNSERVED}")

    def test_reasons_stay_bounded(self):
        """Reasons hold sizes: a program of endlessly many must not fill memory."""
        from acromion import _aten
        for i in range(2 * _aten.REASONS_MAX):
            _aten._tell("an operator", f"reason {i}")
        found = acromion.fallbacks()
        self.assertLessEqual(len(found), _aten.REASONS_MAX + 1)
        self.assertEqual((sum(found.values()), found["an operator: other reasons"]),
                         (2 * _aten.REASONS_MAX, _aten.REASONS_MAX))

    def test_strict(self):
        q = normal(1, 2, 9, 64)
        unserved = q.to(UNSERVED)
        acromion.register_torch(strict=True)
        torch.nn.attention.activate_flash_attention_impl("ACROMION")
        self.addCleanup(acromion.register_torch)
        F.scaled_dot_product_attention(q, q, q)
        text = f"aten::_scaled_dot_product_.*: acromion does not serve {WHY_UNSERVED}"
        with self.assertRaisesRegex(acromion.UnsupportedError, text):
            F.scaled_dot_product_attention(unserved, unserved, unserved)
        self.assertEqual(self.handed_over(), {})

    def test_strict_after_calls_were_counted(self):
        """They stay counted, and the same call raises all the same; no longer strict, it is counted on."""
        q = normal(1, 2, 9, 64).to(UNSERVED)
        for strict, calls in ((False, 2), (True, 2), (False, 4)):
            acromion.register_torch(strict=strict)
            self.addCleanup(acromion.register_torch)
            for _ in range(2):
                with self.assertRaises(acromion.UnsupportedError) if strict else contextlib.nullcontext():
                    F.scaled_dot_product_attention(q, q, q)
            self.assertEqual(list(acromion.fallbacks().values()), [calls])

    def test_gradients_are_pytorch_s(self):
        """ATen's backward pass on our output and log-sum-exp."""
        def gradients():
            tensors = [normal(2, 4, 33, 64).requires_grad_(), normal(2, 4, 33, 64).requires_grad_(),
                       normal(2, 4, 33, 64).requires_grad_()]
            F.scaled_dot_product_attention(*tensors, is_causal=True).square().sum().backward()
            return [x.grad for x in tensors]
        for found, wanted in zip(gradients(), self.native(gradients)):
            torch.testing.assert_close(found, wanted, atol=10 * TOLERANCE["atol"], rtol=10 * TOLERANCE["rtol"])
        self.assertEqual(self.handed_over(), {})

    def test_a_training_run(self):
        """The losses of a small transformer, step by step."""
        def losses():
            torch.manual_seed(1)
            model = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=DEVICE)
            optimizer, x = torch.optim.SGD(model.parameters(), 0.05), normal(4, 20, 64, dtype=torch.float32)
            found = []
            for _ in range(10):
                loss = (model(x) - x.flip(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found
        torch.testing.assert_close(losses(), self.native(losses), atol=1e-4, rtol=1e-4)

    def test_compiled(self):
        q = normal(2, 4, 33, 64)

        def block(x):
            return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1
        with torch.no_grad():
            found = torch.compile(block, fullgraph=True, backend="aot_eager")(q)
            self.assertTrue(torch.equal(found, acromion.sdpa(q * 2, q, q, is_causal=True) + 1))

    def test_forced_backends(self):
        """On CUDA the operators of all three; on the CPU the one."""
        q = normal(2, 4, 33, 64)
        backends = [SDPBackend.FLASH_ATTENTION] + ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
                                                   if HAS_GPU else [])
        for backend in backends:
            with self.subTest(str(backend)), sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, q, q)
                torch.testing.assert_close(out, acromion.sdpa(q, q, q), atol=0, rtol=0)
                x = q.clone().requires_grad_()
                F.scaled_dot_product_attention(x, x, x).sum().backward()
        self.assertEqual(self.handed_over(), {})


def packed_offsets(*lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


@unittest.skipUnless(HAS_GPU, "operators of CUDA")
class OnCuda(Case):
    """Each operator beside ATen's own kernel: every result, with shape, strides, type and device."""
    DTYPES = (torch.float16, torch.bfloat16)

    def compare(self, operator, arguments, keywords=None, checks_memory=True):
        keywords = keywords or {}
        found, wanted = operator(*arguments, **keywords), self.native(operator, *arguments, **keywords)
        for i, (a, b) in enumerate(zip(found, wanted)):
            if not isinstance(b, torch.Tensor):
                self.assertEqual(a, b, i)
            elif checks_memory and i < 2:
                self.assertEqual((a.shape, a.stride(), a.dtype, a.device), (b.shape, b.stride(), b.dtype, b.device), i)
        for a, b in zip(found[:2], wanted[:2]):
            if b is not None and b.numel():
                bound = 2e-2 if a.dtype == torch.bfloat16 else 4e-3
                torch.testing.assert_close(a, b, atol=bound, rtol=bound)

    def inputs(self):
        for dtype in self.DTYPES:
            for q_heads, kv_heads, q_len, kv_len, dim in ((4, 4, 64, 64, 64), (4, 4, 33, 33, 128), (8, 2, 77, 77, 64),
                                                          (4, 4, 200, 77, 40), (4, 4, 1, 333, 64)):
                q = normal(2, q_len, q_heads, dim, dtype=dtype).transpose(1, 2)
                k, v = (normal(2, kv_heads, kv_len, dim, dtype=dtype) * s for s in (1, 2))
                for causal in ((False, True) if q_len == kv_len else (False,)):
                    with self.subTest(f"{dtype} {tuple(q.shape)} {tuple(k.shape)} causal={causal}"):
                        yield q, k, v, causal

    def test_flash(self):
        for q, k, v, causal in self.inputs():
            self.compare(torch.ops.aten._scaled_dot_product_flash_attention, (q, k, v, 0.0, causal))
            self.compare(torch.ops.aten._scaled_dot_product_flash_attention, (q, k, v), {"scale": 0.3})
        self.assertEqual(self.handed_over(), {})

    def test_cudnn(self):
        for q, k, v, causal in self.inputs():
            for wants_lse in (False, True):
                self.compare(torch.ops.aten._scaled_dot_product_cudnn_attention,
                             (q, k, v, None, wants_lse, 0.0, causal))
        self.assertEqual(self.handed_over(), {})

    def test_efficient(self):
        for q, k, v, causal in self.inputs():
            if q.shape[1] != k.shape[1]:
                continue  # PyTorch repeats the heads first
            for wants_lse in (False, True):
                self.compare(torch.ops.aten._scaled_dot_product_efficient_attention,
                             (q, k, v, None, wants_lse, 0.0, causal))
        self.assertEqual(self.handed_over(), {})

    def test_packed(self):
        """Windows and causal as FlashAttention has them, sequences of other lengths, an empty one."""
        operator = torch.ops.aten._flash_attention_forward
        for dtype in self.DTYPES:
            q, k, v = (normal(400, heads, 64, dtype=dtype) for heads in (8, 2, 2))
            for q_lengths, kv_lengths in (((100, 37, 0, 263), (100, 37, 0, 263)),
                                          ((3, 120, 77, 200), (90, 150, 100, 60))):
                cum_q, cum_k = packed_offsets(*q_lengths), packed_offsets(*kv_lengths)
                for causal, left, right in ((False, None, None), (True, -1, -1), (True, 40, 0), (False, 20, 9)):
                    with self.subTest(f"{dtype} {q_lengths} {causal} {left} {right}"):
                        arguments = (q, k, v, cum_q, cum_k, max(q_lengths), max(kv_lengths), 0.0, causal, False)
                        keywords = {"window_size_left": left, "window_size_right": right}
                        found, wanted = operator(*arguments, **keywords), self.native(operator, *arguments, **keywords)
                        bound, rows = (2e-2 if dtype == torch.bfloat16 else 4e-3), sum(q_lengths)
                        torch.testing.assert_close(found[0][:rows], wanted[0][:rows], atol=bound, rtol=bound)
                        seen = wanted[1].isfinite()  # FlashAttention's is +inf for a row without keys
                        self.assertEqual((found[1].shape, found[1].dtype), (wanted[1].shape, wanted[1].dtype))
                        torch.testing.assert_close(found[1][seen], wanted[1][seen], atol=4e-3, rtol=4e-3)
                        self.assertTrue((found[1][:, :rows][~seen[:, :rows]] == -float("inf")).all())
        self.assertEqual(self.handed_over(), {})

    def test_packed_gradients(self):
        from torch.nn.attention.varlen import varlen_attn

        def gradients():
            tensors = [normal(400, 4, 64).requires_grad_() for _ in range(3)]
            cum = packed_offsets(100, 37, 263)
            varlen_attn(*tensors, cum, cum, 263, 263, window_size=(-1, 0)).square().sum().backward()
            return [x.grad for x in tensors]
        for found, wanted in zip(gradients(), self.native(gradients)):
            torch.testing.assert_close(found, wanted, atol=4e-2, rtol=4e-2)
        self.assertEqual(self.handed_over(), {})

    def test_handed_over(self):
        q = normal(2, 4, 64, 64)
        for given, told in (({"dropout_p": 0.5}, "dropout"), ({"dtype": torch.float32}, "float32 on CUDA")):
            with self.subTest(told):
                x = q.to(given.pop("dtype", q.dtype))
                torch.manual_seed(1)
                found = F.scaled_dot_product_attention(x, x, x, **given)
                reasons = acromion.fallbacks()
                torch.manual_seed(1)
                wanted = self.native(F.scaled_dot_product_attention, x, x, x, **given)
                self.assertTrue(torch.equal(found, wanted))
                self.assertEqual([count for reason, count in reasons.items() if told in reason], [1])
                self.assertEqual(len(reasons), 1)  # what ATen's kernel calls in turn is not counted

    def test_a_bias_whose_keys_do_not_lie_side_by_side(self):
        """ATen's backward pass would read it wrong: its own forward pass says whether it can."""
        q = normal(2, 4, 64, 64)
        for bias in (normal(64, 1).expand(2, 4, 64, 64), normal(2, 4, 64, 64).transpose(2, 3)):
            try:
                torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, bias, True)
            except RuntimeError:
                pass
        self.assertEqual(sum(count for reason, count in acromion.fallbacks().items() if "side by side" in reason), 2)

    def test_graphs(self):
        """Compiled with CUDA graphs, forward alone and with a backward pass."""
        q = normal(2, 4, 64, 64)

        def block(x):
            return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1
        wanted = block(q)
        compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            with torch.no_grad():
                torch.testing.assert_close(compiled(q).clone(), wanted, atol=4e-3, rtol=4e-3)
        x = q.clone().requires_grad_()
        block(x).sum().backward()
        for _ in range(4):
            y = q.clone().requires_grad_()
            compiled(y).sum().backward()
            torch.testing.assert_close(y.grad, x.grad, atol=2e-2, rtol=2e-2)
        self.assertEqual(self.handed_over(), {})


@unittest.skipIf(HAS_GPU, "puts the operators of CUDA where the CPU has none")
class OnStack(unittest.TestCase):
    """What the dispatcher calls without Python: arguments and results of every schema, and exceptions."""

    def setUp(self):
        _aten._bind()
        self.calls, self.counts = [], {}

    @contextlib.contextmanager
    def registered(self, name, native=None):
        def call(*arguments, **keywords):
            self.calls.append((arguments, keywords))
            return native(*arguments, **keywords)
        operator = _native.aten_operator(name, call, "keys", self.counts, lambda reason: 1)
        kept = [_aten._register_directly(name, "CPU", operator)]
        self.assertIsNotNone(kept[0])
        try:
            yield getattr(torch.ops.aten, name)
        finally:
            kept.clear()

    def test_schemas(self):
        q, k = normal(2, 4, 33, 64), normal(2, 2, 33, 64)
        bias = normal(33, 33).expand(2, 4, 33, 33)
        wanted, lse = acromion.sdpa(q, k, k, scale=0.3, is_causal=True, enable_gqa=True, return_lse=True)
        with self.registered("_scaled_dot_product_flash_attention") as operator:
            found = operator(q, k, k, 0.0, True, scale=0.3)
        self.assertTrue(torch.equal(found[0], wanted) and torch.equal(found[1], lse))
        self.assertEqual([found[4], found[5], found[8].shape], [33, 33, (0,)])
        with self.registered("_scaled_dot_product_cudnn_attention") as operator:
            found = operator(q, k, k, None, True, 0.0, True, False, scale=0.3)
            self.assertTrue(torch.equal(found[0], wanted) and torch.equal(found[1][..., 0], lse))
            self.assertEqual(found[4:6], (33, 33))
            self.assertTrue(torch.equal(operator(q, k, k, None, False, 0.0, True, scale=0.3)[0], wanted))
        with self.registered("_scaled_dot_product_efficient_attention") as operator:
            found = operator(q, k, k, bias, False)
            self.assertTrue(torch.equal(found[0], acromion.sdpa(q, k, k, attn_mask=bias, enable_gqa=True)))
            self.assertEqual(found[1].shape, (2, 4, 0))
        cum, packed = packed_offsets(13, 0, 20), (x[0].transpose(0, 1).contiguous() for x in (q, k, k))
        with self.registered("_flash_attention_forward") as operator:
            found = operator(*packed, cum, cum, 20, 20, 0.0, False, False, window_size_left=4, window_size_right=0)
        self.assertEqual([x.shape for x in found[:2]], [(33, 4, 64), (4, 33)])
        self.assertEqual((self.calls, self.counts), ([], {}))

    def test_what_is_handed_over(self):
        q = normal(1, 2, 16, 64)
        given = q + 1, q + 2
        name = "_scaled_dot_product_efficient_attention"
        with self.registered(name, lambda *a, **k: (*given, None, None)) as operator:
            found = operator(q, q, q, None, True, 0.5, scale=0.25)
        self.assertEqual([x.data_ptr() for x in found[:2]], [x.data_ptr() for x in given])
        (arguments, keywords), = self.calls
        self.assertTrue(arguments[0] == "keys" and arguments[1] is q)
        self.assertEqual((arguments[4:], keywords), ((None, True, 0.5, False), {"scale": 0.25}))

    def test_every_argument_is_handed_over(self):
        """All that the schemas have comes to ATen's kernel, by place or by name, and its results come back."""
        made = {"Tensor": lambda: normal(1, 2, 16, 64), "Optional[Tensor]": lambda: normal(1, 2, 16, 64),
                "bool": lambda: True, "int": lambda: 7, "Optional[int]": lambda: 3, "float": lambda: 0.5,
                "Optional[float]": lambda: 0.25}
        for name, _ in _aten.OPERATORS:
            with self.subTest(name):
                del self.calls[:]
                schema = torch._C._get_schema(f"aten::{name}", "")
                given = {x.name: made[str(x.type)]() for x in schema.arguments}
                results = tuple(made[str(x.type)]() for x in schema.returns)
                names = {x.name for x in schema.arguments if x.kwarg_only}
                places = [value for key, value in given.items() if key not in names]
                with self.registered(name, lambda *a, **k: results) as operator:
                    found = operator(*places, **{key: given[key] for key in names})
                (arguments, keywords), = self.calls
                self.assertEqual((arguments[0], len(arguments), keywords.keys()), ("keys", len(places) + 1, names))
                for a, b in [*zip(arguments[1:], places), *((keywords[key], given[key]) for key in names),
                             *zip(found, results)]:
                    self.assertEqual(type(a), type(b))
                    self.assertEqual(*((x.data_ptr() if isinstance(x, torch.Tensor) else x) for x in (a, b)))

    def test_random_states_are_not_written(self):
        """Nothing is dropped: on a GPU clearing them would be launches of their own. Without a backward pass all calls
        have the same."""
        q, cum = normal(1, 2, 32, 64), packed_offsets(32)
        rows = q[0].transpose(0, 1).contiguous()
        for name, states, calls in (
                ("_scaled_dot_product_flash_attention", (6, 7), [(q, q, q)]),
                ("_scaled_dot_product_cudnn_attention", (6, 7), [(q, q, q, None, lse) for lse in (False, False, True)]),
                ("_scaled_dot_product_efficient_attention", (2, 3),
                 [(q, q, q, None, lse) for lse in (False, False, True)]),
                ("_flash_attention_forward", (2, 3), [(rows, rows, rows, cum, cum, 32, 32, 0.0, False, False)])):
            with self.subTest(name), self.registered(name) as operator:
                operator(*calls[0])  # the first makes what the others share
                with torch.profiler.profile() as profile:
                    found = [operator(*arguments) for arguments in calls]
                    torch.empty(1)
                kinds = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
                self.assertLessEqual({f"aten::{name}", "aten::empty"}, kinds)  # the profiler looked
                self.assertEqual([kind for kind in kinds if re.search("zero|fill|ones|full|copy|random", kind)], [])
                places = [tuple(results[i].data_ptr() for i in states) for results in found]
                if len(calls) == 3:
                    self.assertEqual(places[0], places[1])
                    self.assertEqual(len({places[0][0], *places[2]}), 3)

    def test_exceptions_keep_their_type(self):
        """C++ carries them from the operator to Python, under every mode."""
        q, raised = normal(1, 2, 16, 64), torch.OutOfMemoryError("no memory left")

        def fail(*arguments, **keywords):
            raise raised
        with self.registered("_scaled_dot_product_efficient_attention", fail) as operator:
            references = sys.getrefcount(q)
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.device("cpu")):
                with self.subTest(mode), mode(), self.assertRaises(torch.OutOfMemoryError) as caught:
                    operator(q, q, q, None, True, 0.5)
                self.assertIs(caught.exception, raised)
            raised.__traceback__ = None
            del self.calls[:]
            self.assertEqual(sys.getrefcount(q), references)

    def test_many_threads(self):
        q = normal(1, 2, 64, 64)
        wanted = acromion.sdpa(q, q, q)
        with self.registered("_scaled_dot_product_efficient_attention") as operator:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                results = list(pool.map(lambda _: operator(q, q, q, None, False)[0], range(200)))
        self.assertTrue(all(torch.equal(found, wanted) for found in results))


class Registry(unittest.TestCase):
    def test_import_registers_and_activates_nothing(self):
        self.assertIn("ACROMION", torch.nn.attention.list_flash_attention_impls())
        self.assertIsNone(torch.nn.attention.current_flash_attention_impl())

    def test_restored_to_the_bit(self):
        q = normal(2, 4, 33, 64)
        before = F.scaled_dot_product_attention(q, q, q)
        for _ in range(3):
            torch.nn.attention.activate_flash_attention_impl("ACROMION")
            self.assertEqual(torch.nn.attention.current_flash_attention_impl(), "ACROMION")
            torch.nn.attention.restore_flash_attention_impl()
            self.assertTrue(torch.equal(F.scaled_dot_product_attention(q, q, q), before))

    def test_no_warning(self):
        program = ("import warnings, torch; warnings.simplefilter('error'); import acromion\n"
                   "torch.nn.attention.activate_flash_attention_impl('ACROMION')")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_order_of_imports(self):
        """Before PyTorch the name is not told by itself, but by register_torch; nothing is loaded by either import."""
        program = ("import sys, acromion; assert 'torch' not in sys.modules and 'acromion._native' not in sys.modules\n"
                   "import torch; acromion.register_torch()\n"
                   "assert 'ACROMION' in torch.nn.attention.list_flash_attention_impls()")
        subprocess.run([sys.executable, "-c", program], check=True)
        program = "import torch, sys, acromion; assert 'acromion._native' not in sys.modules"
        subprocess.run([sys.executable, "-c", program], check=True)


if __name__ == "__main__":
    warnings.simplefilter("default")
    unittest.main()
