"""`acromion bench` beside PyTorch: python3 -m acromion.bench [arguments of `acromion bench`].

Everything is measured in C (workbench/bench/peer_interface.h, which this file mirrors). Python only brings the peer: it
makes the tensors, captures scaled_dot_product_attention into CUDA graphs, and in the call modes makes the calls. Exit
codes are those of `acromion`; 4 says what is missing here."""
import ctypes
import os
import pathlib
import sys
import time
import warnings

EXIT_CANNOT_RUN = 4
TEXT_BYTES = 512
OURS = -1
BOTTOM_RIGHT = 2
LIBRARY = "libacromion_bench.so"
# Larger score matrices than this are not tried with the math backend, which keeps several of them.
MATH_SCORES_MAX = 2**29 - 1

Pointer, Int, Long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Problem(ctypes.Structure):
    """struct peer_problem"""
    _fields_ = [(name, Long) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim")] + [
        (name, Int) for name in ("device", "dtype", "mask", "bshd", "sets", "reserved")] + [
        ("scale", ctypes.c_double), ("q", Pointer), ("k", Pointer), ("v", Pointer)]


Enqueue = ctypes.CFUNCTYPE(Int, Pointer, Pointer)
Begin = ctypes.CFUNCTYPE(Int, ctypes.POINTER(Problem), Pointer)
Capture = ctypes.CFUNCTYPE(Int, Int, Int, ctypes.POINTER(Pointer), Pointer)
Call = ctypes.CFUNCTYPE(Int, Int, Int, Enqueue, Pointer, ctypes.POINTER(ctypes.c_double), Pointer)
Output = ctypes.CFUNCTYPE(Int, Int, Pointer, Long, Pointer)
End = ctypes.CFUNCTYPE(None)


class Provider(ctypes.Structure):
    """struct peer_provider"""
    _fields_ = [("provider_bytes", Int), ("problem_bytes", Int), ("count", Int),
                ("names", ctypes.POINTER(ctypes.c_char_p)), ("version", ctypes.c_char_p),
                ("begin", Begin), ("capture", Capture), ("call", Call), ("output", Output), ("end", End),
                ("enqueue", Pointer)]


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


class Sdpa:
    """PyTorch's attention on one problem, by one backend or by its own choice."""
    NAMES = ("torch-default", "torch-flash", "torch-efficient", "torch-cudnn", "torch-math")

    def __init__(self, torch):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.torch, self.sdpa_kernel = torch, sdpa_kernel
        self.backends = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
                         "torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-math": SDPBackend.MATH}
        self.end()

    def version(self):
        torch = self.torch
        return f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"

    def tensor(self, address, shape, dtype, bshd):
        torch = self.torch
        count = shape[0] * shape[1] * shape[2] * shape[3]
        host = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        packed = torch.frombuffer(host, dtype=dtype).view(shape).to("cuda")
        return packed.transpose(1, 2).contiguous().transpose(1, 2) if bshd else packed

    def begin(self, problem):
        torch, p = self.torch, problem
        if p.mask == BOTTOM_RIGHT:
            raise RuntimeError("PyTorch's causal flag is top-left, this mask is bottom-right")
        torch.cuda.set_device(p.device)
        dtype = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}[p.dtype]
        q = self.tensor(p.q, (p.batch, p.q_heads, p.q_len, p.qk_dim), dtype, p.bshd)
        k = self.tensor(p.k, (p.batch, p.kv_heads, p.kv_len, p.qk_dim), dtype, p.bshd)
        v = self.tensor(p.v, (p.batch, p.kv_heads, p.kv_len, p.v_dim), dtype, p.bshd)
        # clone keeps the strides
        self.sets = [(q, k, v)] + [(q.clone(), k.clone(), v.clone()) for _ in range(p.sets - 1)]
        self.options = {"is_causal": bool(p.mask), "scale": p.scale}
        if p.q_heads != p.kv_heads:
            self.options["enable_gqa"] = True
        self.scores = p.batch * p.q_heads * p.q_len * p.kv_len

    def end(self):
        self.sets = []
        self.graphs, self.outputs, self.usable = {}, {}, set()

    def attend(self, set_number=0):
        return self.torch.nn.functional.scaled_dot_product_attention(*self.sets[set_number], **self.options)

    def chosen(self, name):
        """A context in which PyTorch takes that backend."""
        import contextlib
        return self.sdpa_kernel([self.backends[name]]) if name in self.backends else contextlib.nullcontext()

    def first_call(self, name):
        """Raises with PyTorch's own reasons when the backend cannot run the problem; also warms it up."""
        if name in self.usable:
            return
        if name == "torch-math" and self.scores > MATH_SCORES_MAX:
            raise RuntimeError(f"{self.scores:.2e} scores are too many to keep in memory several times")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for _ in range(3):
                    self.attend()
                self.torch.cuda.synchronize()
            except RuntimeError as error:
                said = [str(w.message).split(" (Triggered")[0] for w in caught]
                reasons = [text for text in said if "not used because" not in text and "runtime disabled" not in text]
                raise RuntimeError("; ".join([str(error).split("\n")[0]] + reasons)) from None
        self.usable.add(name)

    def choice(self):
        """Which backend PyTorch takes by itself."""
        from torch.nn.attention import SDPBackend
        number = self.torch._fused_sdp_choice(*self.sets[0], **self.options)
        return "takes " + next((n for n, b in self.backends.items() if b == SDPBackend(number)), str(number))

    def capture(self, name, launches):
        torch = self.torch
        with torch.inference_mode(), self.chosen(name):
            self.graphs.pop(name, None)
            self.outputs.pop(name, None)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                self.first_call(name)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            outputs = [None] * len(self.sets)  # alive all at once, so that each has memory of its own
            with torch.cuda.graph(graph, stream=side):
                for i in range(launches):
                    outputs[i % len(self.sets)] = self.attend(i % len(self.sets))
            for output in outputs:
                if output is not None:
                    output.fill_(float("nan"))
            torch.cuda.synchronize()
        self.graphs[name], self.outputs[name] = graph, outputs[(launches - 1) % len(self.sets)]
        return graph.raw_cuda_graph()

    def call(self, name, calls):
        """Seconds a call, from the first to the completion of the last."""
        torch = self.torch
        with torch.inference_mode(), self.chosen(name):
            self.first_call(name)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                output = self.attend()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / calls
        self.outputs[name] = output
        return seconds

    def call_ours(self, calls, enqueue, argument):
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            status = enqueue(argument, None)
        self.torch.cuda.synchronize()
        if status != 0:
            raise RuntimeError(f"status {status}")
        return (time.perf_counter() - start) / calls

    def output(self, name, address, size):
        packed = self.outputs[name].contiguous().cpu()
        if packed.numel() * packed.element_size() != size:
            raise RuntimeError(f"the output has shape {tuple(packed.shape)} and type {packed.dtype}")
        ctypes.memmove(address, packed.data_ptr(), size)


def provider_of(sdpa):
    """The C view of a peer library. It must outlive its use: the callbacks live in it."""
    names = (ctypes.c_char_p * len(sdpa.NAMES))(*(name.encode() for name in sdpa.NAMES))

    def begin(problem, text):
        sdpa.begin(problem.contents)

    def capture(peer, launches, graph, text):
        graph[0] = sdpa.capture(sdpa.NAMES[peer], launches)
        if sdpa.NAMES[peer] == "torch-default":
            write_text(text, sdpa.choice())

    def call(peer, calls, enqueue, argument, seconds, text):
        if peer == OURS:
            seconds[0] = sdpa.call_ours(calls, enqueue, argument)
        else:
            seconds[0] = sdpa.call(sdpa.NAMES[peer], calls)

    def output(peer, address, size, text):
        sdpa.output(sdpa.NAMES[peer], address, size)

    return Provider(ctypes.sizeof(Provider), ctypes.sizeof(Problem), len(sdpa.NAMES), names, sdpa.version().encode(),
                    Begin(reporting(begin)), Capture(reporting(capture)), Call(reporting(call)),
                    Output(reporting(output)), End(sdpa.end), None)


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


def main():
    try:
        provider = provider_of(Sdpa(load_torch()))
        library = load_library()
    except (Missing, OSError) as error:
        print(f"acromion: --peers torch: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    arguments = [b"bench"] + [os.fsencode(argument) for argument in sys.argv[1:]]
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
    sys.stdout.flush()
    return library.acromion_bench(len(arguments), argv, ctypes.byref(provider))


if __name__ == "__main__":
    sys.exit(main())
