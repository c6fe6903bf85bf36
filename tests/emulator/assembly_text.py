"""Reads AMD's assembly as LLVM prints it: instructions, their operands and modifiers, and what a kernel asks for."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .isa_errors import UnknownInstruction

VCC, M0, EXEC, SCC = 106, 124, 126, 253
"""Numbers of scalar registers, as operands encode them."""
SCALARS = 128
ACCUMULATORS = 256
"""Where the accumulators begin among the vector registers of a listing that does not say how many others it has."""
SCALAR_KEYS = 1024
"""Added to the number of a scalar register where both kinds are in one set."""

_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "scc": (SCC, 1),
}  # fmt: skip
_FLAGS = [
    "offen",
    "idxen",
    "off",
    "sc0",
    "sc1",
    "nt",
    "glc",
    "slc",
    "lds",
    "clamp",
    "gds",
    "row_mirror",
    "row_half_mirror",
]
_FLAG = re.compile(rf"\s({'|'.join(_FLAGS)})(?=\s|$)")
_MODIFIER = re.compile(r"\s([a-z_]\w*):(\[[^\]]*\]|swizzle\([^)]*\)|[\w.+-]+)")
_COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
_FORM = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")
_RANGE = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d*\.\d+(e[-+]?\d+)?")
_LABEL = re.compile(r"([.\w$]+):")


@dataclass
class Operand:
    """One operand as it is written."""

    text: str
    kind: str = "word"
    """`v` (a vector register or an accumulator), `s`, `constant`, or `word`: a label, `off`, `null`."""
    number: int = 0
    """Of its first register."""
    count: int = 1
    """Registers."""
    value: int | float = 0
    """Of a constant."""
    negated: bool = False
    absolute: bool = False
    extended: bool = False
    """Whether a part of a register is extended by its sign (SDWA)."""


def operand(text: str, accumulators: int = ACCUMULATORS) -> Operand:
    """Read an operand: `v[2:3]`, `-|v4|`, `sext(v1)`, `0x7fff`, `vcc`."""
    found = Operand(text)
    inner = text.strip()
    if match := re.fullmatch(r"neg\((.*)\)", inner):
        found.negated, inner = True, match[1]
    elif re.match(r"-[|vsa]", inner):
        found.negated, inner = True, inner[1:]
    if match := re.fullmatch(r"\|(.*)\|", inner) or re.fullmatch(r"abs\((.*)\)", inner):
        found.absolute, inner = True, match[1]
    if match := re.fullmatch(r"sext\((.*)\)", inner):
        found.extended, inner = True, match[1]
    if match := re.fullmatch(r"lit(?:64)?\((.*)\)", inner):
        inner = match[1]
    if match := _RANGE.fullmatch(inner):
        first = int(match[2] or match[3])
        found.kind, found.number = "s" if match[1] == "s" else "v", first
        found.count = int(match[4] or first) - first + 1
        if match[1] == "a":
            found.number += accumulators
    elif inner in _NAMED:
        found.kind = "s"
        found.number, found.count = _NAMED[inner]
    elif match := re.fullmatch(r"ttmp(\d+)", inner):
        found.kind, found.number = "s", 108 + int(match[1])
    elif _INTEGER.fullmatch(inner):
        found.kind, found.value = "constant", int(inner, 0)
    elif _FLOAT.fullmatch(inner):
        found.kind, found.value = "constant", float(inner)
    return found


@dataclass
class Instruction:
    """One instruction."""

    text: str
    name: str
    """Without its form: `v_add_f32`."""
    form: str
    """`e32`, `e64`, `sdwa`, `dpp`, or nothing."""
    operands: list[Operand]
    modifiers: dict[str, str]
    line: int = 0
    """Its number in the text of the kernel."""

    def flags(self, name: str, default: int, count: int) -> list[int]:
        """Return a modifier with a bit for each operand: `op_sel_hi:[0,1,1]`."""
        given = self.modifiers.get(name)
        bits = [] if given is None else [int(bit) for bit in given.strip("[]").split(",")]
        return bits + [default] * (count - len(bits))

    def number(self, name: str, default: int = 0) -> int:
        """Return a modifier that is a number: `offset:16`."""
        return int(self.modifiers.get(name, str(default)), 0)

    @functools.cached_property
    def registers(self) -> frozenset[int]:
        """Every register that it names; scalar ones at `SCALAR_KEYS`."""
        return _keys(self.operands)

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        """Those but what a load writes: a load into LDS writes none."""
        loads = self.queue and not re.search("store|write", self.name) and "lds" not in self.modifiers
        return _keys(self.operands[1:]) if loads else self.registers

    @property
    def queue(self) -> str:
        """Which counter orders what it brings: `vector`, `local`, or none."""
        if self.name.startswith("ds_"):
            return "local"
        return "vector" if self.name.startswith(("global_", "buffer_", "scratch_")) else ""


def _keys(operands: Sequence[Operand]) -> frozenset[int]:
    return frozenset(
        one.number + (SCALAR_KEYS if one.kind == "s" else 0) + register
        for one in operands
        if one.kind in "vs"
        for register in range(one.count)
    )


def instruction(text: str, accumulators: int = ACCUMULATORS, line: int = 0) -> Instruction:
    """Read one line, without its comment.

    Raises:
        UnknownInstruction: if an operand or a modifier is none that LLVM prints.
    """
    text = " ".join(text.split())
    name, _, rest = text.partition(" ")
    if name == "s_waitcnt":
        counters = dict(_COUNTER.findall(rest))
        if _COUNTER.sub("", rest).strip("& ,"):
            raise UnknownInstruction(text)
        return Instruction(text, name, "", [], counters, line)
    modifiers: dict[str, str] = {}
    rest = _MODIFIER.sub(lambda match: _take(modifiers, match[1], match[2]), f" {rest}")
    for _ in range(2):  # two flags share the blank between them
        rest = _FLAG.sub(lambda match: _take(modifiers, match[1], "1"), rest)
    form = _FORM.search(name)
    return Instruction(
        text,
        name[: form.start()] if form else name,
        form[1] if form else "",
        [operand(part, accumulators) for part in _parts(rest)],
        modifiers,
        line,
    )


def _take(modifiers: dict[str, str], name: str, value: str) -> str:
    modifiers[name] = value
    return " off " if name == "off" else " "


def _parts(text: str) -> list[str]:
    """Return what stands between commas, those inside brackets not counted."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


@dataclass
class Listing:
    """A kernel's instructions, and what it expects of whoever starts it."""

    text: str
    chip: str = ""
    user_scalars: int = 2
    """Scalar registers that are set before the numbers of the workgroup."""
    arguments_at: int = 0
    """The first of two scalar registers with the address of the arguments."""
    workgroup_axes: tuple[bool, bool, bool] = (True, False, False)
    arguments_size: int = 0
    """Bytes."""
    shared: int = 0
    """Bytes of LDS that the kernel itself has."""
    scratch: int = 0
    """Bytes of a lane, for registers that are spilled."""
    hidden: list[tuple[int, int, str]] = field(default_factory=list)
    """Offset, bytes and kind of arguments that the driver adds."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    vectors: int = 0
    """Vector registers in use, accumulators included."""


def listing(text: str) -> Listing:
    """Read the assembly of one kernel."""
    found = Listing(text)
    found.chip = re.findall(r'amdgcn_target ".*-(gfx\w+)', text)[0]

    def directive(name: str) -> int:
        given = re.findall(rf"\.amdhsa_{name} (\d+)", text)
        return int(given[0]) if given else 0

    found.user_scalars = directive("user_sgpr_count")
    before = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
    found.arguments_at = sum(count * directive(f"user_sgpr_{name}") for name, count in before.items())
    x, y, z = (bool(directive(f"system_sgpr_workgroup_id_{axis}")) for axis in "xyz")
    found.workgroup_axes = (x, y, z)
    found.arguments_size = directive("kernarg_size")
    found.shared = directive("group_segment_fixed_size")
    found.scratch = directive("private_segment_fixed_size")
    metadata = text[text.index("amdhsa.kernels:") :]
    arguments = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(hidden_\w+)", metadata)
    found.hidden = [(int(offset), int(size), kind) for offset, size, kind in arguments]
    _read_body(found, text[text.index(",@function") :])
    return found


def _read_body(found: Listing, body: str) -> None:
    lines: list[tuple[int, str]] = []
    for number, raw in enumerate(body.split("\n")[1:], 1):
        line = raw.split(";")[0].split("//")[0].strip()
        if line.startswith(".section") and lines:
            break
        if label := _LABEL.match(line):
            found.labels[label[1]] = len(lines)
            line = line[label.end() :].strip()
        if line and not line.startswith("."):
            lines.append((number, line))
    code = "\n".join(line for _, line in lines)
    most = dict.fromkeys("va", 0)
    for kind, one, first, last in _RANGE.findall(code):
        if kind != "s":
            most[kind] = max(most[kind], int(last or first or one) + 1)
    found.vectors = most["v"] + most["a"] + 1
    found.instructions = [instruction(line, most["v"], number) for number, line in lines]
