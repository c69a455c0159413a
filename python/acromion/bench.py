"""`acromion bench` beside PyTorch and FlashAttention: python3 -m acromion.bench [arguments of `acromion bench`].

Everything is measured in C (workbench/bench/peer_interface.h, which this file mirrors). Python only brings the peers:
it makes the tensors, captures PyTorch's attention into CUDA graphs, and in the call modes makes the calls. Exit codes
are those of `acromion`; 4 says what is missing here."""
import ctypes
import os
import pathlib
import sys
import time
import warnings

EXIT_USAGE, EXIT_CANNOT_RUN = 2, 4
TEXT_BYTES = 512
OURS = -1
BOTTOM_RIGHT = 2
FLOAT16, BFLOAT16, E4M3 = 2, 3, 4  # acr_dtype
FORWARD, GRADIENTS, STEP = range(3)  # what is timed: PEER_FORWARD, PEER_BACKWARD, PEER_STEP
LIBRARY = "libacromion_bench.so"
# Larger score matrices than this are not tried with the math backend, which keeps several of them.
MATH_SCORES_MAX = 2**29 - 1

Pointer, Int, Long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Problem(ctypes.Structure):
    """struct peer_problem"""
    _fields_ = [(name, Long) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim")] + [
        (name, Int) for name in ("device", "dtype", "mask", "bshd", "sets", "timed")] + [
        ("scale", ctypes.c_double), ("q", Pointer), ("k", Pointer), ("v", Pointer)] + [
        (name, Long) for name in ("window_left", "window_right", "chunk")] + [
        ("softcap", ctypes.c_double), ("sinks", Pointer), ("slopes", Pointer), ("bias", Pointer)] + [
        (name, Long) for name in ("bias_batch", "bias_head", "bias_row", "bias_elements")] + [
        ("bias_dtype", Int), ("out_dtype", Int), ("d_o", Pointer)]

    def features(self):
        """Names of what the problem has beyond SDPA's own arguments."""
        return [name for name in ("window_left", "window_right", "chunk", "softcap", "sinks", "slopes")
                if getattr(self, name)]


Enqueue = ctypes.CFUNCTYPE(Int, Pointer, Pointer)
Begin = ctypes.CFUNCTYPE(Int, ctypes.POINTER(Problem), Pointer)
Capture = ctypes.CFUNCTYPE(Int, Int, Int, ctypes.POINTER(Pointer), Pointer)
Call = ctypes.CFUNCTYPE(Int, Int, Int, Enqueue, Pointer, ctypes.POINTER(ctypes.c_double), Pointer)
Stretch = ctypes.CFUNCTYPE(Int, Int, Int, ctypes.POINTER(ctypes.c_double), Pointer)
Output = ctypes.CFUNCTYPE(Int, Int, Pointer, Long, Pointer)
End = ctypes.CFUNCTYPE(None)


class Provider(ctypes.Structure):
    """struct peer_provider"""
    _fields_ = [("provider_bytes", Int), ("problem_bytes", Int), ("count", Int),
                ("names", ctypes.POINTER(ctypes.c_char_p)), ("version", ctypes.c_char_p),
                ("begin", Begin), ("capture", Capture), ("call", Call), ("output", Output), ("end", End),
                ("enqueue", Pointer), ("stretch", Stretch)]


def write_text(address, text):
    data = " ".join(str(text).split()).encode("ascii", "replace")[:TEXT_BYTES - 1] + b"\0"
    ctypes.memmove(address, data, len(data))


def reporting(function):
    """A callback: exceptions become -1 and a reason in the last argument."""
    def callback(*arguments):
        try:
            function(*arguments)
            return 0
        except Exception as error:
            write_text(arguments[-1], error if str(error) else repr(error))
            return -1
    return callback


class Flex:
    """FlexAttention, compiled, with what a problem says as its mask and score functions."""

    def __init__(self, torch, p, bias):
        from torch.nn.attention import flex_attention as flex

        def numbers(address):
            host = (ctypes.c_float * p.q_heads).from_address(address)
            return torch.tensor(list(host), device="cuda")
        diagonal = p.kv_len - p.q_len if p.mask == BOTTOM_RIGHT or not p.mask else 0
        left, right, chunk, softcap, causal = p.window_left, p.window_right, p.chunk, p.softcap, bool(p.mask)
        slopes = numbers(p.slopes) if p.slopes else None
        boolean = bias is not None and bias.dtype == torch.bool

        def visible(b, h, i, j):
            at = i + diagonal
            seen = j >= 0
            if causal:
                seen = seen & (j <= at)
            if left:
                seen = seen & (j > at - left)
            if right:
                seen = seen & (j <= at + right)
            if chunk:
                seen = seen & (j // chunk == at // chunk)
            return seen & bias[b, h, i, j] if boolean else seen

        def score(s, b, h, i, j):
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None and not boolean:
                s = s + bias[b, h, i, j]
            return s - slopes[h] * (i + diagonal - j).abs() if slopes is not None else s

        limited = causal or left or right or chunk or boolean
        by_head = (p.batch, p.q_heads) if boolean else (None, None)
        mask = flex.create_block_mask(visible, *by_head, p.q_len, p.kv_len, device="cuda") if limited else None
        modifies = softcap or slopes is not None or (bias is not None and not boolean)
        options = {"score_mod": score if modifies else None, "block_mask": mask, "scale": p.scale,
                   "enable_gqa": p.q_heads != p.kv_heads}
        sinks = numbers(p.sinks) if p.sinks else None

        def attend(q, k, v):
            if sinks is None:
                return flex.flex_attention(q, k, v, **options)
            out, lse = flex.flex_attention(q, k, v, return_lse=True, **options)
            return (out * torch.sigmoid(lse - sinks[None, :, None])[..., None]).to(q.dtype)

        torch._dynamo.reset()  # each problem is compiled for its own shapes
        self.attend = torch.compile(attend, dynamic=False)

    def __call__(self, q, k, v):
        return self.attend(q, k, v)


class Sdpa:
    """PyTorch's attention on one problem, by one backend or by its own choice."""
    DETERMINISTIC = "-deterministic"  # a backend's gradients in an order that is the same in every run
    NAMES = ("torch-default", "torch-flash", "torch-efficient", "torch-cudnn", "torch-math", "torch-flex",
             "torch-flash" + DETERMINISTIC, "torch-cudnn" + DETERMINISTIC)
    FLEX = "torch-flex"

    def __init__(self, torch, device="cuda"):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.torch, self.sdpa_kernel, self.device = torch, sdpa_kernel, device
        self.backends = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
                         "torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-math": SDPBackend.MATH}
        self.side = None
        self.end()

    def version(self):
        torch = self.torch
        return f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"

    def tensor(self, address, shape, dtype, bshd):
        torch = self.torch
        count = shape[0] * shape[1] * shape[2] * shape[3]
        host = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        packed = torch.frombuffer(host, dtype=dtype).view(shape).to(self.device)
        return packed.transpose(1, 2).contiguous().transpose(1, 2) if bshd else packed

    def begin(self, problem):
        torch, p = self.torch, problem
        torch.cuda.set_device(p.device)
        dtype = self.dtype_of(p)
        q = self.tensor(p.q, (p.batch, p.q_heads, p.q_len, p.qk_dim), dtype, p.bshd)
        k = self.tensor(p.k, (p.batch, p.kv_heads, p.kv_len, p.qk_dim), dtype, p.bshd)
        v = self.tensor(p.v, (p.batch, p.kv_heads, p.kv_len, p.v_dim), dtype, p.bshd)
        # clone keeps the strides
        self.sets = [(q, k, v)] + [(q.clone(), k.clone(), v.clone()) for _ in range(p.sets - 1)]
        self.timed, self.group = p.timed, p.q_heads // p.kv_heads
        if self.timed != FORWARD:
            d_o = self.tensor(p.d_o, (p.batch, p.q_heads, p.q_len, p.v_dim), dtype, p.bshd)
            self.d_o = [d_o] + [d_o.clone() for _ in range(p.sets - 1)]
            for tensors in self.sets:
                for tensor in tensors:
                    tensor.requires_grad_()
        self.options = {"is_causal": bool(p.mask), "scale": p.scale}
        bias = self.bias(p)
        if bias is not None:
            self.options["attn_mask"] = bias
        self.refused = self.why_not_sdpa(p)
        self.flex = Flex(torch, p, bias) if self.refused or bias is not None else None
        if p.q_heads != p.kv_heads:
            self.options["enable_gqa"] = True
        self.scores = p.batch * p.q_heads * p.q_len * p.kv_len
        torch.cuda.synchronize()

    def dtype_of(self, p):
        if p.dtype == E4M3:
            raise RuntimeError("scaled_dot_product_attention takes no e4m3")
        torch = self.torch
        return {1: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}[p.dtype]

    def bias(self, p):
        """The bias or mask as a tensor [batch, heads, q_len, kv_len] that repeats by strides of 0; None."""
        if not p.bias:
            return None
        torch = self.torch
        dtype = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 5: torch.bool}[p.bias_dtype]
        host = (ctypes.c_char * (p.bias_elements * dtype.itemsize)).from_address(p.bias)
        flat = torch.frombuffer(host, dtype=dtype).to("cuda")
        return flat.as_strided((p.batch, p.q_heads, p.q_len, p.kv_len), (p.bias_batch, p.bias_head, p.bias_row, 1))

    @staticmethod
    def why_not_sdpa(p):
        """Why scaled_dot_product_attention cannot say the problem, or None."""
        if p.features():
            return "scaled_dot_product_attention has no " + ", ".join(p.features())
        if p.bias and p.mask:
            return "scaled_dot_product_attention takes no attn_mask beside is_causal"
        if p.mask == BOTTOM_RIGHT:
            return "PyTorch's causal flag is top-left, this mask is bottom-right"
        return None

    def end(self):
        self.sets, self.refused, self.flex = [], None, None
        self.d_o, self.forwards, self.expanded, self.expanding = [], {}, {}, set()
        self.graphs, self.outputs, self.usable = {}, {}, set()

    def inputs(self, name, number):
        """q, k and v of a set; for a peer without grouped queries k and v of every query head, made beforehand."""
        if name not in self.expanding:
            return self.sets[number]
        if number not in self.expanded:
            q, *of_keys = self.sets[number]
            self.expanded[number] = (q, *(tensor.detach().repeat_interleave(self.group, 1).requires_grad_()
                                          for tensor in of_keys))
        return self.expanded[number]

    def forward(self, name, number):
        if name == self.FLEX:
            return self.flex(*self.sets[number])
        options = {key: value for key, value in self.options.items()
                   if key != "enable_gqa" or name not in self.expanding}
        return self.torch.nn.functional.scaled_dot_product_attention(*self.inputs(name, number), **options)

    def prepare(self, name):
        """What gradients alone are taken from: the forward pass of each set, not timed."""
        if self.timed == GRADIENTS:
            for number in range(len(self.sets)):
                if (name, number) not in self.forwards:
                    self.forwards[name, number] = self.forward(name, number)

    def attend(self, name, number=0):
        """What is timed: the output, or the gradients of q, k and v."""
        if self.timed == FORWARD:
            return self.forward(name, number)
        alone = self.timed == GRADIENTS
        out = self.forwards[name, number] if alone else self.forward(name, number)
        return self.torch.autograd.grad(out, self.inputs(name, number), self.d_o[number], retain_graph=alone)

    def chosen(self, name):
        """A context in which PyTorch takes that backend, and its deterministic order where that is asked for."""
        import contextlib
        torch, stack = self.torch, contextlib.ExitStack()
        stack.enter_context(torch.inference_mode() if self.timed == FORWARD else torch.enable_grad())
        backend = self.backends.get(name.removesuffix(self.DETERMINISTIC))
        if backend is not None:
            stack.enter_context(self.sdpa_kernel([backend]))
        if name.endswith(self.DETERMINISTIC):
            torch.utils.deterministic.fill_uninitialized_memory = False  # not part of the attention
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=True)
        return stack

    def why_not(self, name):
        """Why the peer does not run the problem, as far as that is known without a try; None."""
        if name.endswith(self.DETERMINISTIC) and self.timed == FORWARD:
            return "a forward pass has no other order"
        if name == self.FLEX and self.flex is None:
            return "FlexAttention is asked for features and biases alone: the rest SDPA serves"
        if name != self.FLEX and self.refused:
            return self.refused
        if name == "torch-math" and self.scores > MATH_SCORES_MAX:
            return f"{self.scores:.2e} scores are too many to keep in memory several times"
        return None

    def try_calls(self, name):
        """Raises with PyTorch's own reasons when the backend cannot run the problem."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.prepare(name)
                for _ in range(3):
                    self.attend(name)
                self.torch.cuda.synchronize()
            except RuntimeError as error:
                said = [str(w.message).split(" (Triggered")[0] for w in caught]
                reasons = [text for text in said if "not used because" not in text and "runtime disabled" not in text]
                raise RuntimeError("; ".join([str(error).split("\n")[0]] + reasons)) from None

    def first_call(self, name):
        """Warms a peer up; raises with the reason when it cannot run the problem."""
        if name in self.usable:
            return
        reason = self.why_not(name)
        if reason:
            raise RuntimeError(reason)
        try:
            self.try_calls(name)
        except RuntimeError:
            if self.timed == FORWARD or self.group == 1 or name == self.FLEX:
                raise
            self.expanding.add(name)
            self.try_calls(name)
        self.usable.add(name)

    def choice(self):
        """Which backend PyTorch takes by itself."""
        from torch.nn.attention import SDPBackend
        if self.refused:
            return ""
        number = self.torch._fused_sdp_choice(*self.sets[0], **self.options)
        return "takes " + next((n for n, b in self.backends.items() if b == SDPBackend(number)), str(number))

    def note(self, name):
        """What a record of the peer should say besides."""
        notes = [self.choice()] if name == "torch-default" else []
        if name in self.expanding:
            notes.append("k and v expanded beforehand, their gradients not summed over the group")
        return ", ".join(note for note in notes if note)

    def capture(self, name, launches):
        torch = self.torch
        self.side = self.side or torch.cuda.Stream()  # gradients run in the stream of their forward pass
        with self.chosen(name):
            self.graphs.pop(name, None)
            self.outputs.pop(name, None)
            with torch.cuda.stream(self.side):
                self.first_call(name)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            outputs = [()] * len(self.sets)  # alive all at once, so that each has memory of its own
            with torch.cuda.graph(graph, stream=self.side):
                for i in range(launches):
                    output = self.attend(name, i % len(self.sets))
                    outputs[i % len(self.sets)] = (output,) if self.timed == FORWARD else output
            for output in outputs:
                for tensor in output:
                    tensor.fill_(float("nan"))
            torch.cuda.synchronize()
        self.graphs[name], self.outputs[name] = graph, outputs[(launches - 1) % len(self.sets)]
        return graph.raw_cuda_graph()

    def call(self, name, calls):
        """Seconds a call, from the first to the completion of the last."""
        torch = self.torch
        with self.chosen(name):
            self.first_call(name)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                output = self.attend(name)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / calls
        self.outputs[name] = (output,) if self.timed == FORWARD else output
        return seconds

    def written(self, name):
        """What the peer's last launches have written, as it is judged."""
        if name not in self.expanding:
            return self.outputs[name]
        q, *of_keys = self.outputs[name]
        return (q, *(tensor.unflatten(1, (-1, self.group)).float().sum(2).to(q.dtype) for tensor in of_keys))

    def output(self, name, address, size):
        packed = [tensor.contiguous().cpu() for tensor in self.written(name)]
        if sum(tensor.numel() * tensor.element_size() for tensor in packed) != size:
            shapes = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in packed)
            raise RuntimeError(f"the output has the shape {shapes}")
        for tensor in packed:
            ctypes.memmove(address, tensor.data_ptr(), tensor.numel() * tensor.element_size())
            address += tensor.numel() * tensor.element_size()


class Fa3:
    """FlashAttention-3 under JAX, by the wheel flash-attn3-jax, with tensors [batch, length, heads, dim], its best."""
    NAMES = ("fa3",)

    def __init__(self):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the memory is shared with ours
        import flash_attn3_jax
        import jax
        self.jax, self.flash_mha = jax, flash_attn3_jax.flash_mha
        self.end()

    def note(self, name):
        return ""

    def version(self):
        import importlib.metadata
        return f"flash-attn3-jax {importlib.metadata.version('flash-attn3-jax')}, JAX {self.jax.__version__}"

    def begin(self, problem):
        jax, p = self.jax, problem
        if p.features() or p.bias:
            raise RuntimeError("the wheel is given no features beyond a causal mask")
        if p.dtype not in (FLOAT16, BFLOAT16) or (p.qk_dim, p.v_dim) != (128, 128):
            raise RuntimeError("the wheel has kernels of float16 and bfloat16 at head dim 128")
        if p.mask and p.mask != BOTTOM_RIGHT and p.q_len != p.kv_len:
            raise RuntimeError("its causal mask is bottom-right, this one is top-left")
        import numpy
        dtype = jax.numpy.float16 if p.dtype == FLOAT16 else jax.numpy.bfloat16

        def tensor(address, heads, length, dim):
            host = (ctypes.c_char * (p.batch * heads * length * dim * 2)).from_address(address)
            bits = numpy.frombuffer(host, dtype=numpy.uint16).reshape(p.batch, heads, length, dim)
            return jax.device_put(numpy.ascontiguousarray(bits.transpose(0, 2, 1, 3)).view(dtype))
        self.inputs = (tensor(p.q, p.q_heads, p.q_len, p.qk_dim), tensor(p.k, p.kv_heads, p.kv_len, p.qk_dim),
                       tensor(p.v, p.kv_heads, p.kv_len, p.v_dim))
        causal, scale = bool(p.mask), p.scale

        def attend(q, k, v):
            return self.flash_mha(q, k, v, softmax_scale=scale, is_causal=causal)
        self.timed, self.attend = p.timed, jax.jit(attend)
        if p.timed == FORWARD:
            return
        d_o = tensor(p.d_o, p.q_heads, p.q_len, p.v_dim)
        if p.timed == STEP:
            self.inputs += (d_o,)
            self.attend = jax.jit(lambda q, k, v, gradient: jax.vjp(attend, q, k, v)[1](gradient))
        else:
            self.inputs = (jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])(*self.inputs), d_o)
            self.attend = jax.jit(lambda pull_back, gradient: pull_back(gradient))

    def end(self):
        self.inputs = self.attend = self.last = None

    def capture(self, name, launches):
        return None  # JAX's calls are not captured into graphs here: stretch makes them

    def stretch(self, name, launches):
        """Seconds a call: what `launches` calls and one more take, less what one takes alone. The host's time to begin
        and to see the end is in both. (If the first of many calls were waited for instead, its end would be seen late:
        the host makes the others before it looks.)"""
        def made(calls):
            start = time.perf_counter()
            for _ in range(calls):
                self.last = self.attend(*self.inputs)
            while not all(output.is_ready() for output in self.jax.tree_util.tree_leaves(self.last)):
                pass  # a thread that sleeps is woken up to 100 us late
            return time.perf_counter() - start
        made(1)  # the first after a pause is late
        one = made(1)
        return (made(launches + 1) - one) / launches

    def call(self, name, calls):
        self.jax.block_until_ready(self.attend(*self.inputs))
        start = time.perf_counter()
        for _ in range(calls):
            self.last = self.attend(*self.inputs)
        self.jax.block_until_ready(self.last)
        return (time.perf_counter() - start) / calls

    def output(self, name, address, size):
        import numpy
        tensors = (self.last,) if self.timed == FORWARD else self.last
        packed = [numpy.ascontiguousarray(numpy.asarray(tensor).transpose(0, 2, 1, 3)) for tensor in tensors]
        if sum(tensor.nbytes for tensor in packed) != size:
            shapes = ", ".join(f"{tensor.shape} of {tensor.dtype}" for tensor in packed)
            raise RuntimeError(f"the output has the shape {shapes}")
        for tensor in packed:
            ctypes.memmove(address, tensor.ctypes.data, tensor.nbytes)
            address += tensor.nbytes


class FlashWheel(Sdpa):
    """A FlashAttention of a wheel under PyTorch: captured as PyTorch's backends are, with tensors
    [batch, length, heads, dim], its best layout. What a subclass names: NAMES, WHEEL, and by `import_function` the
    function of q, k, v, softmax_scale and causal."""
    TYPES = {FLOAT16: "float16", BFLOAT16: "bfloat16"}
    FEATURES = ()  # that it has beyond a causal mask

    def __init__(self, torch, device="cuda"):
        self.flash_attn_func = self.import_function()
        super().__init__(torch, device)

    def version(self):
        import importlib.metadata
        return f"{self.WHEEL} {importlib.metadata.version(self.WHEEL)}, PyTorch {self.torch.__version__}"

    def tensor(self, address, shape, dtype, bshd):
        return super().tensor(address, shape, dtype, True)

    def dtype_of(self, p):
        return getattr(self.torch, self.TYPES[p.dtype])

    def begin(self, problem):
        p = problem
        if set(p.features()) - set(self.FEATURES) or p.bias:
            raise RuntimeError(f"the wheel is given no features beyond {', '.join(('a causal mask', *self.FEATURES))}")
        if p.dtype not in self.TYPES:
            raise RuntimeError(f"the wheel has kernels of {' and '.join(self.TYPES.values())}")
        if p.mask and p.mask != BOTTOM_RIGHT and p.q_len != p.kv_len:
            raise RuntimeError("its causal mask is bottom-right, this one is top-left")
        self.softcap = {"softcap": p.softcap} if p.softcap else {}
        super().begin(p)

    @staticmethod
    def why_not_sdpa(p):
        return None

    def forward(self, name, number):
        options = {"softmax_scale": self.options["scale"], "causal": self.options["is_causal"], **self.softcap}
        out = self.flash_attn_func(*(tensor.transpose(1, 2) for tensor in self.inputs(name, number)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


class Fa4(FlashWheel):
    """FlashAttention-4, the wheel flash-attn-4."""
    NAMES, WHEEL = ("fa4",), "flash-attn-4"

    @staticmethod
    def import_function():
        from flash_attn.cute import flash_attn_func
        return flash_attn_func


class Fa3Fwd(FlashWheel):
    """FlashAttention-3's forward pass, the wheel fa3-fwd: head dims to 256, and e4m3, of which it writes bfloat16; that
    is brought to the problem's type when it is judged, untimed."""
    NAMES, WHEEL = ("fa3-fwd",), "fa3-fwd"
    TYPES = {BFLOAT16: "bfloat16", E4M3: "float8_e4m3fn"}
    FEATURES = ("softcap",)

    @staticmethod
    def import_function():
        from fa3_fwd_interface import flash_attn_func
        return flash_attn_func

    def begin(self, problem):
        p = problem
        if p.timed != FORWARD:
            raise RuntimeError("the wheel has no gradients")
        if p.out_dtype not in (BFLOAT16, FLOAT16):
            raise RuntimeError("the wheel writes bfloat16")
        self.out = self.torch.float16 if p.out_dtype == FLOAT16 else self.torch.bfloat16
        super().begin(p)

    def written(self, name):
        return tuple(tensor.to(self.out) for tensor in super().written(name))


class Device:
    """The primary context of a device, retained once: where our calls are waited for."""

    def __init__(self, ordinal):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.context = Pointer()
        if self.driver.cuInit(0) or self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), ordinal):
            raise RuntimeError(f"no primary context of device {ordinal}")

    def select(self):
        status = self.driver.cuCtxSetCurrent(self.context)
        if status:
            raise RuntimeError(f"cuCtxSetCurrent: {status}")

    def wait(self):
        status = self.driver.cuCtxSynchronize()
        if status:
            raise RuntimeError(f"cuCtxSynchronize: {status}")


class Peers:
    """Peer libraries side by side, as one to the C side."""

    def __init__(self, libraries, wanted=()):
        """wanted: names of peers; those of a library that none of them names all take part."""
        self.libraries = libraries
        self.peers = [(library, name) for library in libraries for name in library.NAMES
                      if name in wanted or not set(library.NAMES) & set(wanted)]
        self.refused = {}
        self.device = None

    def version(self):
        return "; ".join(library.version() for library in self.libraries)

    def begin(self, problem):
        """Raises when every library refuses; what one refuses its peers say later."""
        self.device = self.device or Device(problem.device)  # one device for a whole run
        self.device.select()
        self.refused = {}
        for library in self.libraries:
            try:
                library.begin(problem)
            except Exception as error:
                self.refused[library] = str(error) or repr(error)
        if len(self.refused) == len(self.libraries):
            raise RuntimeError("; ".join(self.refused.values()))

    def of(self, peer):
        library, name = self.peers[peer]
        if library in self.refused:
            raise RuntimeError(self.refused[library])
        return library, name

    def end(self):
        for library in self.libraries:
            library.end()

    def call_ours(self, calls, enqueue, argument):
        self.device.wait()
        start = time.perf_counter()
        for _ in range(calls):
            status = enqueue(argument, None)
        self.device.wait()
        if status != 0:
            raise RuntimeError(f"status {status}")
        return (time.perf_counter() - start) / calls


def provider_of(peers):
    """The C view of peer libraries. It must outlive its use: the callbacks live in it."""
    names = (ctypes.c_char_p * len(peers.peers))(*(name.encode() for _, name in peers.peers))

    def begin(problem, text):
        peers.begin(problem.contents)

    def capture(peer, launches, graph, text):
        library, name = peers.of(peer)
        graph[0] = library.capture(name, launches)  # None: not captured
        write_text(text, library.note(name))

    def call(peer, calls, enqueue, argument, seconds, text):
        if peer == OURS:
            seconds[0] = peers.call_ours(calls, enqueue, argument)
        else:
            library, name = peers.of(peer)
            seconds[0] = library.call(name, calls)
            write_text(text, library.note(name))

    def stretch(peer, launches, seconds, text):
        library, name = peers.of(peer)
        seconds[0] = library.stretch(name, launches)
        write_text(text, f"{launches} calls back to back, not captured")

    def output(peer, address, size, text):
        library, name = peers.of(peer)
        library.output(name, address, size)

    return Provider(ctypes.sizeof(Provider), ctypes.sizeof(Problem), len(peers.peers), names, peers.version().encode(),
                    Begin(reporting(begin)), Capture(reporting(capture)), Call(reporting(call)),
                    Output(reporting(output)), End(peers.end), None, Stretch(reporting(stretch)))


class Missing(Exception):
    """What is not there, in words."""


def load_library():
    named = os.environ.get("ACROMION_BENCH_LIBRARY")
    here = pathlib.Path(__file__).resolve().parent
    places = [pathlib.Path(named)] if named else [folder / LIBRARY for folder in (here, *here.parents[:3])]
    for place in places:
        if place.exists():
            return ctypes.CDLL(str(place))
    raise Missing(f"{LIBRARY} not found; looked for {', '.join(map(str, places))}")


def load_torch():
    try:
        import torch
    except ImportError as error:
        raise Missing(f"no PyTorch: {error}") from None
    if not torch.cuda.is_available():
        raise Missing(f"PyTorch {torch.__version__} sees no CUDA device")
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        raise Missing(f"PyTorch {torch.__version__} has no CUDAGraph.raw_cuda_graph; newer versions do")
    return torch


def load_fa3():
    try:
        return Fa3()
    except ImportError as error:
        raise Missing(f"no FlashAttention-3 (the wheel flash-attn3-jax, under JAX): {error}") from None


def load_fa3_fwd():
    torch = load_torch()
    try:
        return Fa3Fwd(torch)
    except (ImportError, OSError) as error:
        raise Missing(f"no FlashAttention-3 (the wheel fa3-fwd): {error}") from None


def load_fa4():
    torch = load_torch()
    try:
        return Fa4(torch)
    except ImportError as error:
        raise Missing(f"no FlashAttention-4 (the wheel flash-attn-4, with nvidia-cutlass-dsl): {error}") from None


WHEELS = {"fa3": load_fa3, "fa3-fwd": load_fa3_fwd, "fa4": load_fa4}


def wanted_peers(arguments):
    """The words of --peers, torch where there is none."""
    values = [following for option, following in zip(arguments, arguments[1:]) if option == "--peers"]
    values += [argument.partition("=")[2] for argument in arguments if argument.startswith("--peers=")]
    words = {word for value in values for word in value.split(",")}
    return {word for word in words if word in WHEELS or word.startswith("torch")} or {"torch"}


def main():
    wanted = wanted_peers(sys.argv[1:])
    loading = "torch"
    try:
        libraries = []
        unknown = wanted - {"torch", *WHEELS, *Sdpa.NAMES}
        if unknown:
            print(f"acromion: --peers {min(unknown)}: there are {', '.join(Sdpa.NAMES)}", file=sys.stderr)
            return EXIT_USAGE
        if wanted - set(WHEELS):
            libraries.append(Sdpa(load_torch()))
        for loading in (wheel for wheel in WHEELS if wheel in wanted):
            libraries.append(WHEELS[loading]())
        provider = provider_of(Peers(libraries, wanted))
        library = load_library()
    except (Missing, OSError) as error:
        print(f"acromion: --peers {loading}: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    arguments = [b"bench"] + [os.fsencode(argument) for argument in sys.argv[1:]]
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
    sys.stdout.flush()
    return library.acromion_bench(len(arguments), argv, ctypes.byref(provider))


if __name__ == "__main__":
    sys.exit(main())
