#!/usr/bin/env python3
"""The spaces of a search against the sources they stand beside: what a .space file calls legal, the assertions of the
family's file accept; for the CPU's families, whose conditions are all assertions, also the other way round.

    evolve_spaces.py UNIT_EVOLVE
    evolve_spaces.py UNIT_EVOLVE --compile N [FAMILY...]

The assertions are taken out of the sources, with the enums and defaults they need, and compiled for points that
`unit_evolve --points` draws. With --compile nvcc builds N legal points of each CUDA family as the search's gates do,
the portable ones for sm_80 and sm_90, and what became of them is counted: how tight the spaces are (minutes; not a
part of ctest).
"""
import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
POINTS = 24
EXACT = {"fwd_simd", "bwd_simd"}  # every condition of their spaces is an assertion of their sources
HEADERS = "#include <stddef.h>\n#include <stdint.h>\n"
# What the assertions of CPU kernels use from our headers.
CONSTANTS = "enum { ACR_F32, ACR_F16, ACR_BF16, ACR_E4M3 }; enum { ACR__ISA_PORTABLE = 1, ACR__ISA_AVX2 = 2, " \
            "ACR__ISA_AVX512 = 4, ACR__ISA_AVX512BF16 = 8 };\n"
# What shared memory may hold of src/core/visible.h.
VISIBLE = "".join(t + "\n" for t in re.findall(r"^typedef struct visible_(?:rows|keys) \{.*?^\} \w+;",
                                               (ROOT / "src/core/visible.h").read_text(), re.M | re.S))
# As attention/visible.cuh has it.
TERMS = "static constexpr bool has_term(int terms) { return (TERMS & terms) != 0; }\n"
BLOCKS = re.compile(r"^(?:#ifndef \w+\n#define [^\n]*\n#endif|#define [A-Z_]+ \([^\n]*\)"
                    r"|#(?:if|elif|ifdef|ifndef|else|endif)[^\n]*"
                    r"|enum \{.*?^\};|typedef (?:struct|union) \w+ \{.*?^\} \w+;|typedef [^\n{]*;"
                    r"|(?:_Static_assert|static_assert)\(.*?\);)$",
                    re.M | re.S)


def device_constants():
    """NAME = number of the enums in the device headers."""
    found = {}
    for header in [ROOT / "src/core/fwd_args.h", *sorted(ROOT.glob("src/cuda/device/**/*.cuh"))]:
        for enum in re.findall(r"^enum \{.*?^\};", header.read_text(), flags=re.M | re.S):
            found.update(re.findall(r"\b([A-Z][A-Z0-9_]*) = (\d+)\b(?=\s*(?:,|\n|/\*))", enum))
    return "".join(f"enum {{ {name} = {value} }};\n" for name, value in found.items())


def whole_text(source):
    """A family's file with the headers of its own folder, and the plain C ones of attention/, in place of their
    #include."""
    places = rf"\w+/(?:kernels/)?{source.stem}/[\w.]+|cpu/\w+\.h|cuda/device/attention/\w+\.h"
    own = re.compile(rf'^#include "({places})"$', re.M)
    seen, text = set(), source.read_text()
    while include := own.search(text):
        header = "" if include[1] in seen else (ROOT / "src" / include[1]).read_text()
        header = re.sub(r"^#(?:ifndef|define) ACR_\w+_(?:H|CUH)$|^#endif\Z", "", header.rstrip(), flags=re.M)
        text = text[:include.start()] + header + text[include.end():]
        seen.add(include[1])
    return text


def shared_assertions(source):
    """What the device headers that a family includes assert about its parameters alone."""
    text = source.read_text()
    declared = re.search(r"PARAMETERS:([A-Za-z0-9_=* \n]*)\*/", text)[1]
    parameters = set(re.findall(r"[A-Z][A-Z0-9_]*", declared))
    found = []
    for include in re.findall(r'^#include "(cuda/device/[\w/]+\.cuh)"$', text, flags=re.M):
        header = re.sub(r"/\*.*?\*/", "", (ROOT / "src" / include).read_text(), flags=re.S)
        for condition, reason in re.findall(r'^ *static_assert\(([^;"]*), *("[^"]*")\);', header, flags=re.M):
            if set(re.findall(r"[A-Za-z_]\w*", condition)) <= parameters:
                found.append(f"static_assert({condition}, {reason});")
    return found


def is_repeated(block, blocks):
    """Whether an enum says what one before it has said: a number that the host's half repeats."""
    def names(of):
        return set(re.findall(r"\b([A-Z]\w*) =", of)) if of.startswith("enum") else set()
    return any(names(block) & names(other) for other in blocks[:blocks.index(block)])


def assertions_of(source):
    """The part of a family's file that decides which parameters are legal, as C++ or C of its own."""
    text = re.sub(r"/\*.*?\*/", "", whole_text(source), flags=re.S)
    host = text.find("#ifdef __CUDACC__")  # layouts of shared memory stand before it, beside the enums that need them
    found = list(BLOCKS.finditer(text))
    kept = [m[0] for m in found if not m[0].startswith("typedef") or m.start() < host]
    types = [k for k in kept if k.startswith(("enum", "typedef")) and "static" not in k and not is_repeated(k, kept)]
    asserts = [k for k in kept if "tatic_assert(" in k] + shared_assertions(source)
    defaults = [k for k in kept if k.startswith("#ifndef") and "#define" in k]
    defaults += [k for k in kept if k.startswith("#define")]  # what follows from parameters
    if any("has_term(" in k for k in asserts):
        defaults.append(TERMS)
    constants = device_constants() if source.suffix == ".cu" else CONSTANTS
    return (HEADERS + constants + VISIBLE + "namespace family {\n" + "\n".join(defaults + types + asserts) + "\n}\n",
            len(asserts))


def compiles(text, arch, parameters):
    defines = [f"-D{word}" for word in parameters] + [f"-DKERNEL_ARCH_{arch}=1", "-D__CUDACC__=1"]
    command = ["g++", "-std=c++17", "-D_Static_assert=static_assert", "-fsyntax-only", "-x", "c++", *defines, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def draw(program, count):
    """Lines of `family arch legal|illegal NAME=value...`."""
    return subprocess.run([program, "--points", str(count)], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.splitlines()


def source_of(family):
    places = [ROOT / f"src/cpu/{family}/{family}.c", ROOT / f"src/cuda/kernels/{family}/{family}.cu"]
    return next(p for p in places if p.exists())


# ---- building points ----


def build(folder, line):
    """What becomes of a point: (its line, an outcome, details)."""
    family, arch, _, *parameters = line.split()
    image = pathlib.Path(folder) / hashlib.sha256(line.encode()).hexdigest()[:16]
    portable = "80 90" if arch == "80" else ""
    nvcc = os.environ.get("ACR_NVCC", "nvcc")
    done = subprocess.run(["sh", ROOT / "cmake/compile_image.sh", nvcc, image, arch, portable, "SPILLS_OK=counted",
                           source_of(family), f"-I{ROOT / 'include'}", f"-I{ROOT / 'src'}",
                           f"-I{ROOT / 'src/core'}", "-DKERNEL_NAME=acr_point",
                           *(f"-D{p}" for p in parameters)], capture_output=True, text=True)
    said = image.with_suffix(".ptxas").read_text() if image.with_suffix(".ptxas").exists() else ""
    said += done.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    spilled = sum(int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said))
    if "wgmma is serialised" in said:
        return line, "wgmma serialised", ""
    if done.returncode:
        errors = re.findall(r"error\s*:? *(.*)", said) or said.splitlines()[-1:]
        return line, "refused", errors[0] if errors else "?"
    if spilled:
        return line, "spills", f"{spilled} bytes, {max(registers)} registers"
    return line, "built", f"{max(registers)} registers"


def compile_points(program, count, families):
    drawn = {}
    for line in draw(program, 8 * count):
        family, arch, verdict = line.split()[:3]
        if verdict == "legal" and arch[0].isdigit() and (not families or family in families):
            drawn.setdefault(family, {})[line] = None
    chosen = []
    for family, lines in sorted(drawn.items()):
        # By a hash, so that all problems have their share of the points.
        chosen += sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())[:count]
    counts = {}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for line, outcome, detail in pool.map(lambda line: build(folder, line), chosen):
            family = line.split()[0]
            counts.setdefault(family, {}).setdefault(outcome, 0)
            counts[family][outcome] += 1
            print(f"{outcome:16} {detail:28} {line}", flush=True)
    for family, outcomes in counts.items():
        total = sum(outcomes.values())
        print(f"{family}: {total} points, " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
    return 0


# ---- the assertions ----


def check_assertions(program):
    listed = draw(program, POINTS)
    texts, wrong, seen = {}, [], {}
    for line in listed:
        family = line.split()[0]
        if family not in texts:
            texts[family], count = assertions_of(source_of(family))
            if count == 0:
                wrong.append(f"{family}: no assertion was found in its source")

    def judge(line):
        family, arch, verdict, *parameters = line.split()
        return line, family, verdict, compiles(texts[family], arch, parameters)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for line, family, verdict, result in pool.map(judge, listed):
            accepted = result.returncode == 0
            if not accepted and "static assertion failed" not in result.stderr:
                wrong.append(f"{line}: {result.stderr[:600]}")
            elif verdict == "legal" and not accepted:
                wrong.append(f"{line}: the source refuses it: {result.stderr[:300]}")
            elif verdict == "illegal" and accepted and family in EXACT:
                wrong.append(f"{line}: the source accepts it")
            seen.setdefault((family, verdict), 0)
            seen[family, verdict] += 1
    print("\n".join(wrong[:10]))
    print(", ".join(f"{family}: {count} {verdict}" for (family, verdict), count in sorted(seen.items())),
          f"{len(wrong)} wrong", sep="; ")
    families = {p.stem for p in ROOT.glob("src/**/*.space")}
    missing = [f for f in families if not seen.get((f, "legal"))]
    if missing:
        print(f"no legal point was drawn of {missing}")
    return 1 if wrong or missing else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--compile", type=int, metavar="N")
    parser.add_argument("families", nargs="*")
    given = parser.parse_intermixed_args()
    if given.compile:
        return compile_points(given.program, given.compile, given.families)
    return check_assertions(given.program)


if __name__ == "__main__":
    sys.exit(main())
