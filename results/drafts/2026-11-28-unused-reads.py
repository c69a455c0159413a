#!/usr/bin/env python3
"""Of machine code of sm_90: which reads of shared memory have not been used where a thread arrives at an mbarrier of
another CTA (SYNCS.ARRIVE...RED). It follows the 250 instructions before each, in the order of the text: branches are
not followed, so that it may name a read too many.

    cuobjdump --dump-sass IMAGE | unused-reads.py"""
import re
import sys

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
ONLY_READS = ("ST", "SYNCS", "RED", "ATOM", "R2UR", "ISETP", "FSETP", "HGMMA")


def count_registers(name):
    return 4 if ".128" in name or name.endswith(".4") else 2 if ".64" in name else 1


def read_by(name, operands):
    """Registers that an instruction reads: all but the first operand's, unless that is read, too."""
    read = [int(r) for i, o in enumerate(operands) if i > 0 or name.startswith(ONLY_READS)
            for r in re.findall(r"\bR(\d+)", o)]
    if name.startswith("HGMMA") and len(operands) > 1 and re.fullmatch(r"R\d+", operands[1]):
        read += range(int(operands[1][1:]), int(operands[1][1:]) + 4)
    return read


def main():
    code = [m.groups() for m in map(INSTRUCTION.search, sys.stdin) if m]
    for at, (address, text) in enumerate(code):
        if not (text.startswith("SYNCS.ARRIVE") and ".RED" in text):
            continue
        unused = {}
        for place, before in code[max(0, at - 250):at + 1]:
            name, _, rest = before.partition(" ")
            operands = [o.strip() for o in rest.split(",")]
            if name.startswith("LDS"):
                first = int(re.match(r"R(\d+)", operands[0])[1])
                unused |= dict.fromkeys(range(first, first + count_registers(name)), f"{place} {before}")
            else:
                for register in read_by(name, operands):
                    unused.pop(register, None)
        print(f"arrival at {address}: unused {sorted(set(unused.values()))}")


if __name__ == "__main__":
    main()
