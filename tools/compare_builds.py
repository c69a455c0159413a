#!/usr/bin/env python3
"""Times two builds of the library against each other in one process, on a GPU: is the new one slower anywhere?

    compare_builds.py OLD/libacromion.so NEW/libacromion.so [-o FILE] [--limit R] PROBLEM...|@FILE...

For every problem text (without packed batches) each build plans for itself (ACR_ESTIMATE) and its executions are
captured into a CUDA graph. The graphs are replayed in blocks old, new, new, old; the effect is the median over the
blocks of the ratio new/old, its interval a bootstrap over blocks. Only the public API is used, so any two versions can
be compared. Outputs are compared too: bit for bit, and by their largest difference.

Exit code: 0 nothing is slower than the limit (default 1.01) with its whole interval; 1 something is; 2 usage;
4 no GPU."""
import argparse
import ctypes
import json
import math
import random
import re
import struct
import sys

BLOCKS, REPLAYS_MIN_US = 24, 300.0


class Cuda:
    """The driver, as far as it is needed here; every failure raises."""

    def __init__(self):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            print(f"compare_builds: no CUDA driver: {error}", file=sys.stderr)
            sys.exit(4)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(96)
        self.call("cuDeviceGetName", name, 96, device)
        self.device = name.value.decode()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.events = [ctypes.c_void_p() for _ in range(2)]
        for event in self.events:
            self.call("cuEventCreate", ctypes.byref(event), 0)

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def alloc(self, size):
        pointer = ctypes.c_void_p()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 256)))
        return pointer

    def free(self, pointer):
        self.call("cuMemFree_v2", pointer)

    def upload(self, pointer, data):
        self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))

    def download(self, pointer, size):
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(size))
        return data.raw

    def synchronize(self):
        self.call("cuStreamSynchronize", self.stream)

    def capture(self, enqueue):
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, 2)
        enqueue()
        self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.call("cuGraphDestroy", graph)
        return executable

    def replay_us(self, executable):
        self.call("cuEventRecord", self.events[0], self.stream)
        self.call("cuGraphLaunch", executable, self.stream)
        self.call("cuEventRecord", self.events[1], self.stream)
        self.synchronize()
        elapsed = ctypes.c_float()
        name = "cuEventElapsedTime_v2" if hasattr(self.library, "cuEventElapsedTime_v2") else "cuEventElapsedTime"
        self.call(name, ctypes.byref(elapsed), self.events[0], self.events[1])
        return elapsed.value * 1000.0


class Buffers(ctypes.Structure):
    """acr_buffers as far as the fields of the first versions go; the library reads the rest as zero."""
    _fields_ = [("size", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("q", ctypes.c_void_p), ("k", ctypes.c_void_p),
                ("v", ctypes.c_void_p), ("o", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("kv_lens", ctypes.c_void_p),
                ("q_offsets", ctypes.c_void_p), ("kv_offsets", ctypes.c_void_p), ("q_total", ctypes.c_int64),
                ("kv_total", ctypes.c_int64), ("q_scales", ctypes.c_void_p), ("k_scales", ctypes.c_void_p),
                ("v_scales", ctypes.c_void_p)]


class Build:
    """One build of the library: a context, and a plan for a problem."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
        for name in ("acr_last_error", "acr_plan_kernel", "acr_version"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.acr_plan_workspace.restype = ctypes.c_size_t
        self.ctx = ctypes.c_void_p()
        self.check(self.library.acr_ctx_create(ctypes.byref(self.ctx), None))
        self.plan = self.workspace = None

    def check(self, status):
        if status:
            raise RuntimeError(self.library.acr_last_error().decode())

    def open(self, cuda, text):
        problem = ctypes.create_string_buffer(4096)
        self.check(self.library.acr_problem_parse(problem, text.encode(), None))
        self.plan = ctypes.c_void_p()
        self.check(self.library.acr_plan_create(ctypes.byref(self.plan), self.ctx, problem, 0))
        self.kernel = self.library.acr_plan_kernel(self.plan).decode()
        self.bytes = self.library.acr_plan_workspace(self.plan)
        self.workspace = cuda.alloc(self.bytes)
        self.check(self.library.acr_workspace_init(self.plan, self.workspace, ctypes.c_size_t(self.bytes),
                                                   cuda.stream))
        cuda.synchronize()

    def execute(self, cuda, buffers):
        self.check(self.library.acr_execute(self.plan, ctypes.byref(buffers), self.workspace,
                                            ctypes.c_size_t(self.bytes), cuda.stream))

    def close(self, cuda):
        if self.workspace:
            cuda.free(self.workspace)
        if self.plan:
            self.library.acr_plan_destroy(self.plan)
        self.plan = self.workspace = None


def shape_of(text):
    """The extents of a problem text whose tensors are packed."""
    shape = {"dtype": "f16", "lse": False, "kvlens": False}
    for word in text.split(":"):
        if word in ("f32", "f16", "bf16", "e4m3"):
            shape["dtype"] = word
        elif word in ("lse", "kvlens"):
            shape[word] = True
        elif word == "packed":
            raise ValueError(f"{text}: packed batches are not compared here")
        elif match := re.fullmatch(r"([bhsd])(\d+)(?:/(\d+))?", word):
            shape[match[1]] = (int(match[2]), int(match[3] or match[2]))
    return shape


def random_bytes(dtype, count, seed):
    """Normal values, as many as make the content of a tensor; repeated in blocks, as large tensors would take long."""
    block = min(count, 1 << 20)
    draw = random.Random(seed)
    values = [draw.gauss(0.0, 1.0) for _ in range(block)]
    if dtype == "f32":
        data = struct.pack(f"{block}f", *values)
    elif dtype == "f16":
        data = struct.pack(f"{block}e", *values)
    elif dtype == "bf16":
        data = b"".join(struct.pack("f", value)[2:] for value in values)
    else:  # e4m3: sign, and an exponent and mantissa around 1
        data = bytes(draw.getrandbits(1) << 7 | draw.randrange(0x20, 0x3c) for _ in range(block))
    return (data * -(-count // block))[:count * len(data) // block]


def largest_difference(dtype, a, b):
    code = {"f32": "f", "f16": "e", "e4m3": "e"}.get(dtype)
    largest, step = 0.0, 4 if dtype == "f32" else 2
    for at in range(0, min(len(a), 1 << 20), step):
        x, y = a[at:at + step], b[at:at + step]
        if x != y:
            if code is None:
                x, y, form = b"\0\0" + x, b"\0\0" + y, "f"
            else:
                form = code
            difference = abs(struct.unpack(form, x)[0] - struct.unpack(form, y)[0])
            largest = max(largest, difference if difference == difference else math.inf)
    return largest


def median(values):
    ordered = sorted(values)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def interval(ratios):
    draw = random.Random(1)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def compare(cuda, builds, text):
    shape = shape_of(text)
    (batch, _), (q_heads, kv_heads) = shape["b"], shape["h"]
    (q_len, kv_len), (qk_dim, v_dim) = shape["s"], shape["d"]
    dtype, elem = shape["dtype"], {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1}[shape["dtype"]]
    counts = [batch * q_heads * q_len * qk_dim, batch * kv_heads * kv_len * qk_dim, batch * kv_heads * kv_len * v_dim]
    out_bytes = batch * q_heads * q_len * v_dim * (2 if elem == 1 else elem)
    inputs, outputs, extra = [], [], []
    try:
        for seed, count in enumerate(counts):
            inputs.append(cuda.alloc(count * elem))
            cuda.upload(inputs[-1], random_bytes(dtype, count, seed + 1))
        graphs, launches = [], 1
        every = []
        for build in builds:
            build.open(cuda, text)
            outputs.append(cuda.alloc(out_bytes))
            buffers = Buffers(size=ctypes.sizeof(Buffers), q=inputs[0].value, k=inputs[1].value, v=inputs[2].value,
                              o=outputs[-1].value)
            if shape["lse"]:
                extra.append(cuda.alloc(batch * q_heads * q_len * 4))
                buffers.lse = extra[-1].value
            if shape["kvlens"]:
                extra.append(cuda.alloc(batch * 4))
                cuda.upload(extra[-1], struct.pack(f"{batch}i", *[kv_len] * batch))
                buffers.kv_lens = extra[-1].value
            every.append((build, buffers))
        for build, buffers in every:
            build.execute(cuda, buffers)
        cuda.synchronize()
        contents = [cuda.download(output, out_bytes) for output in outputs]
        for number in (1, None):  # once to learn how long a launch takes
            for graph in graphs:
                cuda.call("cuGraphExecDestroy", graph)
            graphs = [cuda.capture(lambda one=one: [one[0].execute(cuda, one[1]) for _ in range(number or launches)])
                      for one in every]
            for graph in graphs * 3:
                took = cuda.replay_us(graph)
            if number == 1:
                launches = max(1, min(200, int(REPLAYS_MIN_US / max(took - 4.0, 2.0)) + 1))
        warm = 0.0
        while warm < 40e3:
            warm += sum(cuda.replay_us(graph) for graph in graphs)
        blocks = []
        for _ in range(BLOCKS):
            times = ([], [])
            for which in (0, 1, 1, 0):
                cuda.replay_us(graphs[which])
                times[which].append(min(cuda.replay_us(graphs[which]) for _ in range(2)))
            blocks.append((sum(times[0]) / 2 / launches, sum(times[1]) / 2 / launches))
        for graph in graphs:
            cuda.call("cuGraphExecDestroy", graph)
        ratios = [new / old for old, new in blocks]
        low, high = interval(ratios)
        return {"problem": text, "kernels": [build.kernel for build in builds], "launches": launches,
                "old_us": round(median([old for old, _ in blocks]), 4),
                "new_us": round(median([new for _, new in blocks]), 4), "ratio": round(median(ratios), 4),
                "low": round(low, 4), "high": round(high, 4), "bits_equal": contents[0] == contents[1],
                "largest_difference": largest_difference(dtype, *contents)}
    finally:
        for build in builds:
            build.close(cuda)
        for pointer in inputs + outputs + extra:
            cuda.free(pointer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("problems", nargs="+", metavar="PROBLEM")
    parser.add_argument("-o", "--output", metavar="FILE")
    parser.add_argument("--limit", type=float, default=1.01)
    asked = parser.parse_args()
    problems = []
    for word in asked.problems:
        if word.startswith("@"):
            with open(word[1:], encoding="utf-8") as lines:
                problems += [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
        else:
            problems.append(word)
    cuda = Cuda()
    builds = [Build(asked.old), Build(asked.new)]
    records, slower = [], 0
    for text in problems:
        try:
            record = compare(cuda, builds, text)
        except (RuntimeError, ValueError) as error:
            record = {"problem": text, "error": str(error)}
            print(f"{text:45} {error}", flush=True)
        else:
            verdict = "SLOWER" if record["low"] > asked.limit else "faster" if record["high"] < 0.99 else "same"
            slower += verdict == "SLOWER"
            same_kernel = "" if len(set(record["kernels"])) == 1 else f"  {' -> '.join(record['kernels'])}"
            bits = "bits equal" if record["bits_equal"] else f"differ by {record['largest_difference']:.1e}"
            print(f"{text:45} {record['old_us']:10.3f} {record['new_us']:10.3f} us  {record['ratio']:.4f} "
                  f"({record['low']:.4f} to {record['high']:.4f})  {verdict:6}  {bits}{same_kernel}", flush=True)
        records.append(record)
        if asked.output:
            with open(asked.output, "w", encoding="utf-8") as out:
                json.dump({"device": cuda.device, "limit": asked.limit, "records": records}, out, indent=1)
    print(f"{len(records)} problems, {slower} slower than {asked.limit} with the whole interval")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
