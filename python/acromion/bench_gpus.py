"""`acromion bench --gpus N`: attention over several GPUs beside PyTorch's context_parallel, in one job.

    python3 -m acromion.bench_gpus --gpus 4 [options] PROBLEM...

The first process looks whether all is there and starts N ranks under torchrun; every rank runs one side after the
other, and a sample is the slowest rank's time a call. What ours computes is compared with one GPU's output before it
is timed.
Records: docs/manual/several-gpus.md. Exit codes are those of `acromion`; 4 says what is missing here."""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_RUN = 1, 2, 4
LINK_BYTES = 2**28  # that a rank sends to the next to measure the link
DTYPES = ("", "float32", "float16", "bfloat16", "float8_e4m3fn")  # of acr_dtype


def read_arguments():
    options = argparse.ArgumentParser(prog="acromion bench --gpus N", description=__doc__.partition("\n")[0])
    options.add_argument("--gpus", type=int, required=True, metavar="N")
    options.add_argument("--peers", choices=("torch",), help="beside PyTorch's context_parallel")
    options.add_argument("--quick", action="store_true", help="3 samples a side instead of 13")
    options.add_argument("--json", action="store_true")
    options.add_argument("--python-path", help=argparse.SUPPRESS)
    options.add_argument("--library", help="in NCCL's place; with --on cpu")
    options.add_argument("--on", choices=("cuda", "cpu"), default="cuda", dest="device")
    options.add_argument("-o", "--output", metavar="FILE", help="add the records to this JSON file")
    options.add_argument("problems", nargs="+", metavar="PROBLEM")
    return options.parse_args()


def fail(code, text):
    print(f"acromion bench --gpus: {text}", file=sys.stderr)
    sys.exit(code)


# ---- The first process ----

def floors_of(problems):
    """What `acromion roofline` says of each problem on one GPU: microseconds; None where it cannot be asked."""
    program = os.environ.get("ACROMION_PROGRAM")
    if not program:
        return [None] * len(problems)
    done = subprocess.run([program, "roofline", "--json", *problems], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return [None] * len(problems)
    return [record["floor_warm_us"] for record in json.loads(done.stdout)]


def launch(given):
    try:
        import torch
        import acromion.distributed
    except ImportError as error:
        fail(EXIT_CANNOT_RUN, f"{sys.executable} has no PyTorch, or no wheel of acromion: {error}")
    if given.gpus < 1:
        fail(EXIT_USAGE, f"--gpus is {given.gpus}, must be at least 1")
    for problem in given.problems:
        if reason := cannot_measure(problem):
            fail(EXIT_USAGE, f"{problem}: {reason}")
    if given.device == "cuda" and torch.cuda.device_count() < given.gpus:
        fail(EXIT_CANNOT_RUN, f"--gpus {given.gpus}: PyTorch sees {torch.cuda.device_count()} GPUs")
    if given.device == "cpu" and (not given.library or given.peers):
        fail(EXIT_USAGE, "--on cpu needs --library, and has no peers")
    os.environ["ACROMION_FLOORS"] = json.dumps(floors_of(given.problems) if given.device == "cuda" else
                                               [None] * len(given.problems))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can put a shared host's GPUs out of service
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.gpus), "-m",
                 "acromion.bench_gpus", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *arguments])


def cannot_measure(problem):
    """Why a problem has no place here, or None."""
    from acromion import Error, _native
    try:
        text, fields = _native.parse_problem(problem)
    except Error as error:
        return str(error)
    if fields["dtype"] > 3:
        return "8-bit floats are not measured over several GPUs"
    plain = f"b{fields['batch']}:h{fields['q_heads']}"
    plain += f"/{fields['kv_heads']}" if fields["kv_heads"] != fields["q_heads"] else ""
    plain += f":s{fields['q_len']}" + (f"/{fields['kv_len']}" if fields["kv_len"] != fields["q_len"] else "")
    plain += f":d{fields['qk_dim']}"
    left = text.partition(plain)[2] if plain in text else text
    if left not in ("", ":causal"):
        return f"'{left.strip(':')}' is not measured over several GPUs: types, lengths, heads, dims and causal are"
    return None


# ---- Every rank ----

class Rank:
    """What a rank measures with."""

    def __init__(self, given):
        import torch
        import torch.distributed as dist
        import acromion
        import acromion.distributed as several
        self.torch, self.dist, self.acromion, self.several, self.given = torch, dist, acromion, several, given
        self.device = torch.device("cpu")
        if given.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        several.open(device=self.device, library=given.library)
        self.by_nccl = None
        if given.device == "cuda" and self.ranks > 1:
            self.by_nccl = dist.new_group(list(range(self.ranks)))
            several.open(self.by_nccl, device=self.device, transfers="nccl")

    def tell(self, text):
        if self.rank == 0 and not self.given.json:
            print(text, flush=True)

    def slowest(self, seconds):
        number = self.torch.tensor([seconds], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(number, self.dist.ReduceOp.MAX)
        return float(number)

    def sample(self, function, calls):
        """Seconds a call, of the slowest rank."""
        self.dist.barrier()
        if self.device.type == "cpu":
            begun = time.perf_counter()
            for _ in range(calls):
                function()
            return self.slowest((time.perf_counter() - begun) / calls)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return self.slowest(begin.elapsed_time(end) / 1e3 / calls)

    def measure_link(self):
        """Bytes a second that each rank sends to the next while it receives from the one before; None for one rank."""
        if self.ranks == 1:
            return None
        size = LINK_BYTES if self.device.type == "cuda" else 2**16
        out, back = (self.torch.zeros(size, dtype=self.torch.uint8, device=self.device) for _ in range(2))

        def step():
            for work in self.dist.batch_isend_irecv(
                    [self.dist.P2POp(self.dist.isend, out, (self.rank + 1) % self.ranks),
                     self.dist.P2POp(self.dist.irecv, back, (self.rank - 1) % self.ranks)]):
                work.wait()
        self.sample(step, 2)
        return size / min(self.sample(step, 4) for _ in range(3))

    # -- sides: name, the call, what it computed as this rank's rows in zigzag order, bytes that it sends --

    def ours(self, tensors, causal, schedule, group=None):
        mine = [self.several.shard(x) for x in tensors]
        lens = {"q_len": tensors[0].shape[2], "kv_len": tensors[1].shape[2]}

        def call():
            return self.several.sdpa(*mine, group=group, is_causal=causal, enable_gqa=True, schedule=schedule, **lens)
        return call

    def captured(self, function):
        """The same call as a CUDA graph; its output stays where it is. It has run before."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            out = function()

        def call():
            graph.replay()
            return out
        return call

    def decode(self, tensors):
        q, k, v = tensors
        first, end = (k.shape[2] * r // self.ranks for r in (self.rank, self.rank + 1))
        mine = [x[:, :, first:end].contiguous() for x in (k, v)]

        def call():
            return self.several.sdpa(q, *mine, enable_gqa=True, schedule="sharded_keys")
        return call

    @contextlib.contextmanager
    def context_parallel(self, tensors, causal, rotate, backend):
        """PyTorch's own, over the same problem. Its buffers are split by itself."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention, context_parallel
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel
        _attention.set_rotate_method(rotate)
        # PyTorch refuses to balance what has no mask; without a mask the work is balanced as it is.
        _attention._cp_options.enable_load_balance = causal
        q, k, v = (x.clone() for x in tensors)
        mesh = init_device_mesh("cuda", (self.ranks,))
        with self.torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)), \
                context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            # By its module's name: inside, PyTorch has another function there.
            yield lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                                  enable_gqa=q.shape[1] != k.shape[1])

    def samples(self, function, first):
        """Seconds a call, each sample of about 0.1 s."""
        once = self.sample(function, 1)
        calls = min(max(int(0.1 / max(once, 1e-6)), 1), 200)
        return first + [self.sample(function, calls) for _ in range(3 if self.given.quick else 13)]

    def measure(self, problem, floor_us, link):
        torch = self.torch
        text, f = self.acromion._native.parse_problem(problem)
        dtype, causal = getattr(torch, DTYPES[f["dtype"]]), f["mask"] != 0
        generator = torch.Generator(self.device).manual_seed(1)
        tensors = [torch.randn(f["batch"], heads, rows, dim, device=self.device, generator=generator).to(dtype)
                   for heads, rows, dim in ((f["q_heads"], f["q_len"], f["qk_dim"]),
                                            (f["kv_heads"], f["kv_len"], f["qk_dim"]),
                                            (f["kv_heads"], f["kv_len"], f["v_dim"]))]
        align = "bottom_right" if causal and f["q_len"] != f["kv_len"] else None

        def alone():
            return self.acromion.sdpa(*tensors, is_causal=causal, causal_align=align, enable_gqa=True)
        whole = alone()
        pairs = f["q_len"] * f["kv_len"] - (f["q_len"] * (f["q_len"] - 1) // 2 if causal else 0)
        flops = 2 * f["batch"] * f["q_heads"] * pairs * (f["qk_dim"] + f["v_dim"])
        limit = 2 * torch.finfo(dtype).eps * float(tensors[2].abs().max()) + 1e-5
        records = []

        def add(name, function, traffic=None, differs=None, ranks=self.ranks, plan=None):
            seconds = self.samples(function, [])
            middle = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4)
            link_us = traffic / link * 1e6 if traffic and link else None
            floors = [us for us in (floor_us and floor_us / ranks, link_us) if us]
            records.append({
                "problem": text, "side": name, "gpus": ranks, "us": middle * 1e6, "us_low": low * 1e6,
                "us_high": high * 1e6, "samples": len(seconds), "tflops_a_gpu": flops / ranks / middle / 1e12,
                "traffic_bytes": traffic, "link_gb_s": link and link / 1e9, "floor_us": max(floors, default=None),
                "differs": differs, "limit": limit, "plan": plan})
            r = records[-1]
            of_floor = f", {r['us'] / r['floor_us']:.2f} of the floor" if r["floor_us"] else ""
            self.tell(f"  {name:44} {r['us']:12.1f} us {r['tflops_a_gpu']:8.1f} TFLOP/s a GPU{of_floor}")

        self.tell(f"{text} over {self.ranks} GPUs")
        add("one GPU", alone, ranks=1)
        # Name: the group, the call, this rank's rows of what it must compute.
        if f["q_len"] == 1:
            sides = {"sharded keys": (None, self.decode(tensors), whole)}
        else:
            mine = self.several.shard(whole)
            sides = {f"{name} zigzag": (None, self.ours(tensors, causal, name), mine) for name in ("ring", "gather")}
            if self.by_nccl:
                sides["ring zigzag by NCCL"] = (self.by_nccl, self.ours(tensors, causal, "ring", self.by_nccl), mine)
        wrong = False

        def add_ours(name, group, function, want):
            """Whether it computed what it must."""
            out = function()
            self.several.wait(group, device=self.device)
            differs = self.slowest(float((out.float() - want.float()).abs().max()))
            plan = self.several.plan(group, device=self.device)
            if differs > limit:
                self.tell(f"  {name}: differs from one GPU by {differs:.2e}, more than {limit:.2e}: not timed")
                return False
            add(name, function, plan.traffic, differs, plan=plan.text)
            return True
        for name, side in sides.items():
            wrong = not add_ours(name, *side) or wrong
        for rotate in ("allgather", "alltoall") if self.given.peers and f["q_len"] > 1 else ():
            for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
                name = f"torch {rotate} {backend.partition('_')[0].lower()}"
                try:
                    with self.context_parallel(tensors, causal, rotate, backend) as function:
                        # Balanced as zigzag, else in one part.
                        want = self.several.shard(whole, placement="zigzag" if causal else "contiguous")
                        differs = self.slowest(float((function().float() - want.float()).abs().max()))
                        if differs <= limit:
                            add(name, function, differs=differs)
                        else:
                            self.tell(f"  {name}: differs from one GPU by {differs:.2e}: not timed")
                except Exception as error:  # a peer that cannot: said, and on every rank alike
                    self.tell(f"  {name}: not run: {str(error).splitlines()[0][:150]}")
        name, (group, function, want) = next(iter(sides.items()))
        if self.device.type == "cuda" and self.ranks > 1:
            try:
                function = self.captured(function)
            except Exception as error:  # on every rank alike
                self.tell(f"  {name}, graph: not captured: {str(error).splitlines()[0][:150]}")
            else:
                wrong = not add_ours(f"{name}, graph", group, function, want) or wrong
        return records, wrong


def append_records(path, records):
    """To the list that a file holds; whole or not at all."""
    before = []
    if os.path.exists(path):
        with open(path) as file:
            before = json.load(file)
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump(before + records, file, indent=1)
        file.write("\n")
    os.replace(part, path)


def work(given):
    rank = Rank(given)
    link = rank.measure_link()
    rank.tell(f"link: {link / 1e9:.1f} GB/s from each rank to the next" if link else "one rank: no link")
    records, wrong = [], False
    for problem, floor_us in zip(given.problems, json.loads(os.environ["ACROMION_FLOORS"])):
        found, is_wrong = rank.measure(problem, floor_us, link)
        records += found
        wrong = wrong or is_wrong
        if rank.rank == 0 and given.output:
            append_records(given.output, found)
    if rank.rank == 0 and given.json:
        print(json.dumps(records, indent=1))
    if rank.by_nccl:
        rank.several.close(rank.by_nccl, device=rank.device)
    rank.several.close(device=rank.device)
    rank.dist.destroy_process_group()
    return EXIT_FAILED if wrong else 0


def main():
    given = read_arguments()
    if "ACROMION_FLOORS" in os.environ and "RANK" in os.environ:
        return work(given)
    return launch(given)


if __name__ == "__main__":
    sys.exit(main())
