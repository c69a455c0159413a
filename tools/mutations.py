"""The edits that tools/mutate.py makes: one changed place each, in the C code of src/ and in the PTX of kernels.

An edit's key is a digest of its file, the lines around it and what it makes of them, so that it is the same edit in
another run and another checkout, and another one where the code has changed."""
import bisect
import dataclasses
import fnmatch
import hashlib
import re
import struct

CONTEXT_LINES = 3


@dataclasses.dataclass(frozen=True)
class Edit:
    kind: str  # host or device
    file: str  # of the tree, or NAME.ptx
    line: int
    operator: str
    start: int  # in the file's text
    end: int
    replacement: str
    before: str  # the line, without the blanks around it
    after: str
    key: str

    def apply(self, text):
        return text[:self.start] + self.replacement + text[self.end:]


class Lines:
    """A text with where its lines begin."""

    def __init__(self, text):
        self.text, self.lines, self.starts, at = text, text.splitlines(), [], 0
        for line in text.splitlines(keepends=True):
            self.starts.append(at)
            at += len(line)


def make_edit(kind, file, lines, operator, start, end, replacement):
    """`lines`: of the file. The edit is within one line."""
    number = bisect.bisect_right(lines.starts, start) - 1
    before, first = lines.lines[number], lines.starts[number]
    after = before[:start - first] + replacement + before[end - first:]
    around = [*lines.lines[max(0, number - CONTEXT_LINES):number], before, after,
              *lines.lines[number + 1:number + 1 + CONTEXT_LINES]]
    digest = hashlib.sha256("\0".join([file, *around]).encode()).hexdigest()
    return Edit(kind, file, number + 1, operator, start, end, replacement, before.strip(), after.strip(), digest[:16])


# ---- C --------------------------------------------------------------------------------------------------------------

def blanked(match):
    return re.sub(r"[^\n]", " ", match[0])


def bare_c(text):
    """C in which comments, strings, characters and what the preprocessor reads are blanks."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", blanked, text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blanked, text, flags=re.M)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', blanked, text)
    return re.sub(r"\b(?:_Static_assert|static_assert)\s*\([^;]*;", blanked, text)


def host_part(file, text):
    """A kernel's file with what only the device's compiler reads as blanks. The outermost `#ifdef __CUDACC__` of a
    family ends with an `#else`, behind which the host's description is; a file without one has no host's part."""
    if not file.endswith(".cu"):
        return text
    if "#ifdef __CUDACC__" not in text:
        return re.sub(r"[^\n]", " ", text)
    kept, depth, device_depth, in_device = [], 0, None, False
    for line in text.splitlines(keepends=True):
        directive = re.match(r"\s*#\s*(ifdef|ifndef|if|else|elif|endif)\b\s*(\w*)", line)
        if directive and directive[1] in ("if", "ifdef", "ifndef"):
            depth += 1
            if directive[2] == "__CUDACC__":
                device_depth, in_device = depth, True
        elif directive and directive[1] == "else" and depth == device_depth:
            in_device = False
        elif directive and directive[1] == "endif":
            in_device = in_device and depth != device_depth
            depth -= 1
        kept.append(re.sub(r"[^\n]", " ", line) if in_device else line)
    return "".join(kept)


def without_functions(text, names):
    """`text` with these functions' bodies as blanks."""
    for name in names:
        text = re.sub(rf"^[a-z][^\n;]*\b{name}\([^;{{]*\)\n\{{\n.*?^\}}", blanked, text, flags=re.M | re.S)
    return text


# Any value of these is a right one: an estimate of speed, judged as a whole by the test cost_model.
SPEED_ONLY = ["cost"]

RELATIONAL = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
              "+=": "-=", "-=": "+=", "|=": "&="}
LOGICAL = {"&&": "||", "||": "&&"}
STATUSES = {"ACR_INVALID": "ACR_UNSUPPORTED", "ACR_UNSUPPORTED": "ACR_INVALID", "ACR_NO_MEMORY": "ACR_INVALID"}
SYMMETRIC = re.compile(r"""(?:min|max|fmin|fmax|memcmp|strcmp|min_\w+|max_\w+|acr__min\w*|acr__max\w*
                       |__builtin_add_overflow|__builtin_mul_overflow)$""", re.X)
BUFFER_BYTES_MIN = 16  # `char text[N]`: one byte more changes nothing


def changed_number(match):
    digits, suffix = match[1], match[2]
    return f"{1 if digits == '0' else 0 if digits == '1' else int(digits) + 1}{suffix}"


def changed_float(match):
    suffix = "f" if match[0].endswith("f") else ""
    return repr(float(match[0].rstrip("f")) * 1.01 or 1.0) + suffix


def edits_of_line(code, line, first):
    """(operator, start, end, replacement) for one line; `code` is the line without strings and comments."""
    def each(pattern, operator, replacement, group=0):
        for m in re.finditer(pattern, code):
            yield operator, first + m.start(group), first + m.end(group), replacement(m)

    yield from each(r" (<=|>=|<|>|==|!=) ", "relational", lambda m: RELATIONAL[m[1]], 1)
    yield from each(r" (&&|\|\|) ", "logical", lambda m: LOGICAL[m[1]], 1)
    yield from each(r" (\+=|-=|\|=|<<|>>|[-+*/%&|]) ", "arithmetic", lambda m: ARITHMETIC[m[1]], 1)
    yield from each(r"\bif \((.*)\) \{$", "condition", lambda m: f"!({m[1]})", 1)
    yield from each(r"\b(true|false)\b", "constant", lambda m: "false" if m[1] == "true" else "true")
    for m in re.finditer(r"(?<![\w.])(\d+)(u?l{0,2}|U?L{0,2})\b(?!\.\d)(?![\w.])", code):
        if not (code[m.start() - 1:m.start()] == "[" and int(m[1]) >= BUFFER_BYTES_MIN):
            yield "number", first + m.start(), first + m.end(), changed_number(m)
    yield from each(r"(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?f?(?!\w)", "number", changed_float)
    yield from each(r"\b(ACR_(?:INVALID|UNSUPPORTED|NO_MEMORY))\b", "status", lambda m: STATUSES[m[1]])
    if not code.startswith(" "):
        return  # what a function is called, not what it does
    if (re.match(r"\s+(?:\+\+|--|\*)?[a-z_][\w.\[\]>-]*(?: [-+*/|&%]?= .*|\(.*\)|\+\+|--);\s*$", code)
            and code.count("(") == code.count(")")):
        yield "dropped statement", first + len(line) - len(line.lstrip()), first + len(line.rstrip()), ";"
    for m in re.finditer(r"\b([a-z_]\w*)\(([^(),]+), ([^(),]+)(?=[,)])", code):
        if m[2] != m[3] and not SYMMETRIC.match(m[1]) and line[m.start():m.end()] == m[0]:
            yield "exchanged arguments", first + m.start(2), first + m.end(3), f"{m[3]}, {m[2]}"


def host_edits(file, text):
    """Every edit of a C file, or of the host's part of a kernel's."""
    bare = without_functions(bare_c(host_part(file, text)), SPEED_ONLY)
    first, edits, lines = 0, [], Lines(text)
    for line, code in zip(text.splitlines(keepends=True), bare.splitlines(keepends=True)):
        for operator, start, end, replacement in edits_of_line(code.rstrip("\n"), line, first):
            edits.append(make_edit("host", file, lines, operator, start, end, replacement))
        first += len(line)
    return edits


# ---- PTX ------------------------------------------------------------------------------------------------------------

# What changes no result in the PTX machine: hints, register budgets, the order of global memory between CTAs, of which
# it says that it cannot judge it (ptxvm/README.md), and the meeting of lanes that it keeps together anyway.
NO_RESULT = re.compile(r"(?:prefetch|createpolicy|applypriority|discard|setmaxnreg|griddepcontrol|membar|fence\.acq_rel"
                       r"|fence\.sc|nanosleep|bar\.warp\.sync|cvta|ret|exit|pragma)\b")
INTEGER_COMPARISON = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq",
                      "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}
FLOAT_COMPARISON = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq", "ltu": "geu", "leu": "gtu",
                    "gtu": "leu", "geu": "ltu", "equ": "neu", "neu": "equ", "num": "nan", "nan": "num"}
BARRIER = re.compile(r"(?:bar\.sync|bar\.arrive|barrier\.|mbarrier\.arrive|mbarrier\.init|fence\.proxy"
                     r"|cp\.async\.commit_group|cp\.async\.bulk\.commit_group|wgmma\.fence|wgmma\.commit_group)")
COPY_OR_STORE = re.compile(r"(?:st\.|cp\.async\.c[ag]|cp\.async\.bulk\.tensor|atom\.|red\.|stmatrix|st\.async)")


def changed_float_bits(bits):
    value, largest = struct.unpack(">f", bytes.fromhex(bits))[0], 3.0e38  # what is larger has no place above it
    if value == 0:
        return "3F800000"
    return struct.pack(">f", value * 1.0625).hex().upper() if abs(value) < largest else "00000000"


def split_operands(text):
    """Operands between commas that no bracket holds, with where they begin."""
    found, depth, begin = [], 0, 0
    for i, c in enumerate(text + ","):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            part = text[begin:i]
            found.append((begin + len(part) - len(part.lstrip()), part.strip()))
            begin = i + 1
    return found


def edits_of_instruction(line, first):
    """(operator, start, end, replacement) for one instruction of PTX."""
    m = re.match(r"\s*(?:\{\s*)?(@!?%\w+\s+)?([a-z][\w.:]*)(\s+[^;]*)?;", line)
    if not m or NO_RESULT.match(m[2]):
        return
    guard, name, at = m[1], m[2], first + (m.start(3) if m[3] else m.end(2))
    operands = split_operands(m[3] or "")
    parts = name.split(".")

    def operand(i):
        begin, text = operands[i]
        return at + begin, at + begin + len(text), text

    if guard:
        where = first + m.start(1)
        flipped = guard.replace("@!", "@") if "@!" in guard else guard.replace("@", "@!")
        yield "predicate", where, where + len(guard), flipped
    if parts[0] == "setp" and len(parts) > 2:
        table = FLOAT_COMPARISON if parts[-1] in ("f32", "f16", "f64") else INTEGER_COMPARISON
        if parts[1] in table:
            where = first + m.start(2) + len("setp.")
            yield "predicate", where, where + len(parts[1]), table[parts[1]]
    if BARRIER.match(name):
        yield "dropped barrier", first + m.start(2), first + m.end(), ""
    if COPY_OR_STORE.match(name):
        yield "dropped store or copy", first + m.start(2), first + m.end(), ""
    if re.match(r"cp\.async\.wait_group|cp\.async\.bulk\.wait_group|wgmma\.wait_group", name) and operands:
        begin, end, text = operand(-1)
        if text.isdigit():
            yield "dropped barrier", begin, end, str(int(text) + 1)
    if parts[0] in ("sub", "div", "rem", "selp", "shl", "shr") and len(operands) >= 3:
        begin, _, left = operand(1)
        _, end, right = operand(2)
        if left != right:
            yield "exchanged operands", begin, end, f"{right}, {left}"
    if parts[0] in ("fma", "mad") and len(operands) == 4:
        begin, _, factor = operand(2)
        _, end, term = operand(3)
        if factor != term:
            yield "exchanged operands", begin, end, f"{term}, {factor}"
    if parts[0] in ("st", "mma", "wgmma", "stmatrix", "ldmatrix"):  # two registers of a list
        for begin, text in operands:
            registers = re.match(r"\{\s*(%\w+)\s*,\s*(%\w+)", text)
            if registers and registers[1] != registers[2]:
                yield ("exchanged operands", at + begin + registers.start(1), at + begin + registers.end(2),
                       f"{registers[2]}, {registers[1]}")
    for address in re.finditer(r"\[[^\]]*?(?:\+(-?\d+))?\]", m[3] or ""):
        if name.startswith("ld.param"):
            step = 4 if parts[-1] in ("u32", "s32", "f32", "b32") else 8
        else:
            step = 16 if ".v4" in name or "matrix" in name or parts[0] == "cp" else 4
            step = 2 if parts[-1] in ("u16", "b16") else 1 if parts[-1] in ("u8", "b8", "s8") else step
        if address[1]:
            yield "offset", at + address.start(1), at + address.end(1), str(int(address[1]) + step)
        elif "%" in address[0] and "," not in address[0]:
            yield "offset", at + address.end() - 1, at + address.end(), f"+{step}]"
    if parts[0] in ("add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "mov", "selp", "setp", "min", "max"):
        for begin, text in operands[1:]:
            if re.fullmatch(r"-?\d+", text):
                yield "constant", at + begin, at + begin + len(text), str(int(text) + 1)
    for begin, text in operands[1:]:
        bits = re.fullmatch(r"0f([0-9A-Fa-f]{8})", text)
        if bits:
            yield "constant", at + begin, at + begin + len(text), "0f" + changed_float_bits(bits[1])
    if parts[0] == "shfl" and len(operands) == 5 and operand(2)[2].isdigit():
        begin, end, text = operand(2)
        yield "constant", begin, end, str(int(text) * 2 % 32 or 1)


def without_dead_code(text):
    """PTX in which what follows a jump that is always taken, up to the next label, is blanks."""
    return re.sub(r"(mov\.pred\s+(%p\d+), -1;\n\s*@\2 bra\s+\S+;\n)((?:(?!\$)[^\n]*\n)*)",
                  lambda m: m[1] + re.sub(r"[^\n]", " ", m[3]), text)


def device_edits(file, text):
    """Every edit of a kernel's PTX."""
    text, whole = without_dead_code(text), text
    first, edits, lines = text.find("\n", text.find(".entry")) + 1, [], Lines(whole)
    for line in text[first:].splitlines(keepends=True):
        for operator, start, end, replacement in edits_of_instruction(line, first):
            edits.append(make_edit("device", file, lines, operator, start, end, replacement))
        first += len(line)
    return edits


# ---- drawing --------------------------------------------------------------------------------------------------------

def drawn(edits, seed, turns):
    """The edits in an order that the seed gives and that an edit keeps when others come or go. `turns(edit)`: each of
    its values takes its turn."""
    queues = {}
    for edit in sorted(edits, key=lambda e: hashlib.sha256(f"{seed}:{e.key}".encode()).hexdigest()):
        queues.setdefault(turns(edit), []).append(edit)
    seen, order = set(), []

    def turn(name):
        return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()

    while queues:
        for name in sorted(queues, key=turn):
            edit = queues[name].pop(0)
            if not queues[name]:
                del queues[name]
            if edit.key not in seen:
                seen.add(edit.key)
                order.append(edit)
    return order


def matching(name, patterns):
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
