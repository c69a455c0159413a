#!/usr/bin/env python3
"""Checks who may include whom (docs/internals/design.md, section 3): data flows one way, and each part sees no more
than it must.

Every #include of the tree is looked at; one that no rule allows is an error, so a new kind of dependency has to be
decided on here.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)

C_LIBRARY = {"ctype.h", "errno.h", "float.h", "inttypes.h", "limits.h", "math.h", "setjmp.h", "signal.h", "stdarg.h",
             "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h", "time.h"}
POSIX = {"dirent.h", "dlfcn.h", "fcntl.h", "fnmatch.h", "ftw.h", "getopt.h", "glob.h", "pthread.h", "sched.h",
         "malloc.h", "strings.h", "unistd.h"}
PROCESSOR = {"cpuid.h", "immintrin.h"}
LINUX = {"elf.h", "linux/audit.h", "linux/filter.h", "linux/seccomp.h", "poll.h"}  # search: sandbox, objects
CUDA = {"cuda.h", "cudaTypedefs.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "math_constants.h", "mma.h"}


def is_posix(name):
    return name in C_LIBRARY or name in POSIX or name.startswith("sys/")


def own_headers(folder):
    return {p.name for p in (ROOT / folder).glob("*.h")}


CORE = own_headers("src/core")
SEARCH = {"search/" + name for name in own_headers("search")} | own_headers("search")
BENCH = {p.relative_to(ROOT / "workbench").as_posix() for p in (ROOT / "workbench").rglob("*.h")}
WORKBENCH = BENCH | {pathlib.PurePosixPath(name).name for name in BENCH} | SEARCH | {"build_info.h"}  # generated
MACHINE = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ptxvm").rglob("*.h")}
TESTS = {p.relative_to(ROOT / "tests").as_posix() for p in (ROOT / "tests").rglob("*.h")} | MACHINE


def allowed_public(name, quoted):
    """include: stddef.h and stdint.h only."""
    return not quoted and name in {"stddef.h", "stdint.h"}


def allowed_core(name, quoted):
    """src/core: the library above its backends; sees neither of them, nor anything outside."""
    if quoted:
        return name == "acromion.h" or name in CORE or name == "kernels_built.def"
    return is_posix(name) or name == "xxhash.h"


def allowed_cpu(name, quoted):
    """src/cpu: the core's contracts and its own headers; never cuda."""
    if quoted:
        return name == "acromion.h" or name in CORE or name in {"threads.h", "cpu/threads.h"}
    return is_posix(name) or name in PROCESSOR


def allowed_cuda(name, quoted):
    """src/cuda: the core's contracts, its own headers, and CUDA's; never cpu."""
    if quoted:
        own = {
            str(p.relative_to(ROOT / "src"))
            for p in (ROOT / "src/cuda").rglob("*.*")
            if p.suffix in (".h", ".cuh", ".def")
        }
        return name == "acromion.h" or name in CORE or name in own or "cuda/device/" + name in own
    return is_posix(name) or name in CUDA


def allowed_workbench(name, quoted):
    """workbench: the public header and the side door of the library; JSON."""
    if quoted:
        return name in {"acromion.h", "internal.h", "kernels.def"} or name in WORKBENCH
    return is_posix(name) or name in PROCESSOR | LINUX | {"jansson.h", "xxhash.h", "sqlite3.h"}


def allowed_device(name, quoted):
    """device code of the workbench and the tests: what the library's has, and its own headers."""
    return allowed_cuda(name, quoted) or quoted and name in {"exploit.cuh"}


def allowed_tests(name, quoted):
    """tests: anything of ours; cmocka, and JSON and SQLite to read what the workbench writes."""
    if quoted:
        own = {pathlib.PurePosixPath(header).name for header in TESTS - MACHINE}
        return name in {"acromion.h", "cuda/driver.h"} or name in own | CORE | WORKBENCH | TESTS
    return is_posix(name) or name in {"cmocka.h", "jansson.h", "sqlite3.h"}


def allowed_machine(name, quoted):
    """ptxvm: itself and C; it knows nothing of what it executes."""
    return name in {"ptxvm.h", "vm.h"} if quoted else is_posix(name)


def allowed_fake_driver(name, quoted):
    """ptxvm/driver: the machine, and what the library asks a driver for."""
    if quoted:
        return name in MACHINE | {"fake_driver.h", "fake_program.h", "acromion.h", "cuda/driver.h"} or name in CORE
    return is_posix(name) or name in CUDA


def allowed_candidates(name, quoted):
    """tests/exploits/*.cu: what search/admission.c lets candidates include."""
    return name in ({"fwd_args.h"} if quoted else {"stdint.h", "cuda_fp16.h", "math_constants.h"})


def allowed_examples(name, quoted):
    """examples: what a user has."""
    return not quoted and (is_posix(name) or name == "acromion.h" or "." not in name or name.startswith("cuda"))


RULES = [  # the first folder that matches
    ("include", allowed_public),
    ("src/cpu", allowed_cpu),
    ("src/cuda", allowed_cuda),
    ("src/core", allowed_core),
    ("workbench", allowed_workbench),
    ("search/tests", allowed_tests),
    ("search", allowed_workbench),
    ("cli", allowed_workbench),
    ("ptxvm/tests", allowed_tests),
    ("ptxvm/driver", allowed_fake_driver),
    ("ptxvm", allowed_machine),
    ("tests", allowed_tests),
    ("examples", allowed_examples),
]


def main():
    files = broken = 0
    for folder, allowed in RULES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".c", ".h", ".cu", ".cuh", ".cpp"}:
                continue
            relative = path.relative_to(ROOT).as_posix()
            if next(f for f, _ in RULES if relative.startswith(f + "/")) != folder:
                continue
            files += 1
            text = path.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                candidate = relative.startswith("tests/exploits/") and path.suffix == ".cu"
                rule = allowed_device if path.suffix in {".cu", ".cuh"} else allowed
                rule = allowed_candidates if candidate else rule
                if not rule(match[2], match[1] == '"'):
                    line = text.count("\n", 0, match.start()) + 1
                    print(f"{relative}:{line}: may not include {match[2]}. {rule.__doc__}")
                    broken += 1
    print(f"{files} files, {broken} broken rules")
    return 1 if broken or files < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
