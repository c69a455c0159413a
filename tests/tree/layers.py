#!/usr/bin/env python3
"""Checks who may include whom (docs/internals/design.md, section 3): data flows one way, and each part sees no more
than it must.

Every #include of the tree is looked at; one that no rule allows is an error, so a new kind of dependency has to be
decided on here. Rooms are in an order: none includes a higher one. No two modules (NAME.c with NAME.h, NAME.py) include
each other, by however many steps."""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
SOURCES = {".c", ".h", ".cu", ".cuh", ".cpp"}

C_LIBRARY = {"ctype.h", "errno.h", "float.h", "inttypes.h", "limits.h", "math.h", "setjmp.h", "signal.h", "stdarg.h",
             "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h", "time.h"}
POSIX = {"dirent.h", "dlfcn.h", "fcntl.h", "fnmatch.h", "ftw.h", "getopt.h", "glob.h", "pthread.h", "sched.h",
         "strings.h", "unistd.h"}
PROCESSOR = {"cpuid.h", "immintrin.h"}
LINUX = {"elf.h", "linux/audit.h", "linux/filter.h", "linux/futex.h", "linux/seccomp.h", "poll.h"}
CUDA = {"cuda.h", "cudaTypedefs.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "math_constants.h", "mma.h"}

# Folders in order, the lowest first: a file may include headers of its own folder and of those before it. The public
# header and the library's internal interface (src/core/internal.h) stand below all of them.
ROOMS = ["workbench/base", "workbench/machine", "workbench/kernels", "workbench/check", "workbench/bench",
         "workbench/bench/peers", "workbench/profile", "workbench/report", "workbench/commands", "search",
         "search/commands", "cli"]
# Modules that may not include each other, in folders apart from the rooms: Python's package and its extension.
PYTHON_MODULES = ["python/src", "python/acromion"]


def is_posix(name):
    return name in C_LIBRARY or name in POSIX or name.startswith("sys/")


def headers(folder):
    """The headers of a folder and those below it, as their paths below it."""
    return {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder).rglob("*.h")}


CORE = {name for name in headers("src/core") if "/" not in name}
DIST = headers("src/dist")
MACHINE = {"ptxvm/" + name for name in headers("ptxvm")}
WORKBENCH = headers("workbench")
TESTS = headers("tests")
INTEGRATIONS = {pathlib.PurePosixPath(name).name for name in headers("integrations")}
EXTENSION = headers("python/src")


def allowed_public(path, name, quoted):
    """include: stddef.h and stdint.h only, and libacromion's header in that of the library beside it."""
    own = {"stddef.h", "stdint.h"} | ({"acromion.h"} if path.name != "acromion.h" else set())
    return not quoted and name in own


def allowed_core(path, name, quoted):
    """src/core: the library above its backends; sees neither of them, nor anything outside."""
    if quoted:
        return name == "acromion.h" or name in CORE or name == "kernels_built.def"
    return is_posix(name) or name == "xxhash.h"


def allowed_cpu(path, name, quoted):
    """src/cpu: the core's contracts and its own headers; never cuda."""
    if quoted:
        own = {"threads.h", "cpu/threads.h", "cpu/block.h", "cpu/entry.h", "cpu/simd.h", "cpu/ops.h",
               "cpu/ops/element.h"}
        return name == "acromion.h" or name in CORE or name in own
    return is_posix(name) or name in PROCESSOR


def allowed_cuda(path, name, quoted):
    """src/cuda: the core's contracts, its own headers, and CUDA's; image.c zstd's; never cpu."""
    if quoted:
        own = {
            str(p.relative_to(ROOT / "src"))
            for p in (ROOT / "src/cuda").rglob("*.*")
            if p.suffix in (".h", ".cuh", ".def")
        }
        return name == "acromion.h" or name in CORE or name in own or "cuda/device/" + name in own
    return is_posix(name) or name in CUDA or name == "zstd.h" and path.name == "image.c"


def allowed_dist(path, name, quoted):
    """src/dist: the public headers, and its own; what any user of libacromion has."""
    if quoted:
        return name in DIST
    return is_posix(name) or name in {"acromion.h", "acromion_nccl.h"}


def room_of(header):
    return pathlib.PurePosixPath(header).parent.as_posix()


def allowed_rooms(path, name, quoted):
    """workbench, search, cli: the libraries' public headers and the internal interface, their own folder, those
    below it in the order of ROOMS; JSON, SQLite."""
    if not quoted:
        return is_posix(name) or name in PROCESSOR | LINUX | {"jansson.h", "xxhash.h", "sqlite3.h"}
    here = room_of(path.relative_to(ROOT))
    if "/" not in name:
        ours = {"acromion.h", "acromion_nccl.h", "internal.h", "kernels.def", "build_info.h"}
        return name in ours or (path.parent / name).exists()
    room = room_of("workbench/" + name if name in WORKBENCH else name)
    return (ROOT / room).is_dir() and room in ROOMS and here in ROOMS and ROOMS.index(room) < ROOMS.index(here)


def allowed_device(path, name, quoted):
    """device code of the workbench and the tests: what the library's has, and its own headers."""
    return allowed_cuda(path, name, quoted) or quoted and name in {"exploit.cuh"}


def allowed_tests(path, name, quoted):
    """tests: anything of ours; cmocka, JSON and SQLite to read what the workbench writes, xxHash for digests, and XLA's
    header, with which python/src/xla_ffi.h is compared; what the build takes out of a page."""
    if quoted:
        own = {pathlib.PurePosixPath(header).name for header in TESTS}
        ours = own | CORE | WORKBENCH | MACHINE | TESTS | INTEGRATIONS | EXTENSION | {"acromion.h", "cuda/driver.h"}
        ours |= {"cuda/ops/ops.h", "cuda/image.h", "cuda/device/attention/bias_boxes.h", "fork/function.h",
                 "fork/lines.h"}
        ours |= {"dist/" + header for header in DIST}
        return name in ours or name.startswith("search/") and (ROOT / name).exists()
    return is_posix(name) or name in LINUX | {"malloc.h", "cmocka.h", "jansson.h", "sqlite3.h", "xxhash.h",
                                              "xla/ffi/api/c_api.h"}


def allowed_machine(path, name, quoted):
    """ptxvm: itself and C; it knows nothing of what it executes."""
    return name in {"ptxvm.h", "vm.h"} if quoted else is_posix(name)


def allowed_fake_driver(path, name, quoted):
    """ptxvm/driver: the machine, and what the library asks a driver for."""
    if quoted:
        return name in MACHINE | {"fake_driver.h", "fake_program.h", "acromion.h", "cuda/driver.h"} or name in CORE
    return is_posix(name) or name in CUDA


def allowed_candidates(path, name, quoted):
    """tests/exploits/*.cu: what search/admission.c lets candidates include."""
    return name in ({"fwd_args.h"} if quoted else {"stdint.h", "cuda_fp16.h", "math_constants.h"})


def allowed_integrations(path, name, quoted):
    """integrations: what a user has, and their own headers; never the library's insides."""
    return name in INTEGRATIONS if quoted else name in C_LIBRARY or name == "acromion.h"


def allowed_examples(path, name, quoted):
    """examples: what a user has."""
    own = {"acromion.h", "acromion_nccl.h"}
    return not quoted and (is_posix(name) or name in own or "." not in name or name.startswith("cuda"))


def allowed_consumer(path, name, quoted):
    """tests/consumer: what a project has that takes the tree as a part of itself."""
    return not quoted and (is_posix(name) or name == "acromion.h" or name in INTEGRATIONS)


RULES = [  # the first folder that matches
    ("include", allowed_public),
    ("src/cpu", allowed_cpu),
    ("src/cuda", allowed_cuda),
    ("src/core", allowed_core),
    ("src/dist", allowed_dist),
    ("workbench", allowed_rooms),
    ("search/tests", allowed_tests),
    ("search", allowed_rooms),
    ("cli", allowed_rooms),
    ("ptxvm/tests", allowed_tests),
    ("ptxvm/driver", allowed_fake_driver),
    ("ptxvm", allowed_machine),
    ("tests/consumer", allowed_consumer),
    ("tests", allowed_tests),
    ("integrations", allowed_integrations),
    ("examples", allowed_examples),
]


def files_of(folder):
    """The sources of a rule's folder that belong to no rule before it."""
    for path in sorted((ROOT / folder).rglob("*")):
        relative = path.relative_to(ROOT).as_posix()
        if path.suffix in SOURCES and next(f for f, _ in RULES if relative.startswith(f + "/")) == folder:
            yield path


def broken_includes():
    for folder, allowed in RULES:
        for path in files_of(folder):
            relative = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            rule = allowed_device if path.suffix in {".cu", ".cuh"} else allowed
            if relative.startswith("tests/exploits/") and path.suffix == ".cu":
                rule = allowed_candidates
            for match in INCLUDE.finditer(text):
                if not rule(path, match[2], match[1] == '"'):
                    line = text.count("\n", 0, match.start()) + 1
                    yield f"{relative}:{line}: may not include {match[2]}. {' '.join(rule.__doc__.split())}"


# ---- modules that include each other ----


def included(path, name):
    """The file of the tree that an include names, or None."""
    for folder in (path.parent, ROOT / "workbench", ROOT, ROOT / "src", ROOT / "src/core"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def imported(path):
    """The modules of its own package that a Python file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (path.parent / f"{name}.py" for name in names if (path.parent / f"{name}.py").is_file())


def modules():
    """What each module includes: paths without endings."""
    found = {}
    for folder in [room.split("/")[0] for room in ROOMS] + PYTHON_MODULES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py":
                uses = list(imported(path))
            elif path.suffix in SOURCES:
                names = INCLUDE.findall(path.read_text(encoding="utf-8"))
                uses = [file for _, name in names if (file := included(path, name))]
            else:
                continue
            module = path.resolve().with_suffix("")
            found.setdefault(module, set()).update(u.with_suffix("") for u in uses if u.with_suffix("") != module)
    return found


def cycle(uses, start):
    """A way from a module back to itself, or None."""
    way, seen = [(start, iter(sorted(uses[start])))], {start}
    while way:
        for following in way[-1][1]:
            if following == start:
                return [module for module, _ in way] + [start]
            if following in uses and following not in seen:
                seen.add(following)
                way.append((following, iter(sorted(uses[following]))))
                break
        else:
            way.pop()
    return None


def cycles():
    uses, told = modules(), set()
    for module in sorted(uses):
        way = cycle(uses, module) if module not in told else None
        if way:
            told.update(way)
            yield "modules include each other: " + " -> ".join(m.relative_to(ROOT).as_posix() for m in way)


def main():
    broken = [*broken_includes(), *cycles()]
    for line in broken:
        print(line)
    files = sum(1 for folder, _ in RULES for _ in files_of(folder))
    print(f"{files} files, {len(broken)} broken rules")
    return 1 if broken or files < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
