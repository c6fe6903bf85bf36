"""Loads and stores: LDS, the device's memory, buffers, spilled registers, atomic operations.

Sources: "MI300 Instruction Set Architecture", "LDS instructions",
"Vector memory buffer instructions" (range checking of raw
buffers), "Global memory"; "CDNA4", DS_READ_B64_TR_B16 and "buffer load to LDS".
"""

from __future__ import annotations

import numpy as np
import pytest

from .assembly_text import M0
from .device_memory import DeviceMemory
from .isa_errors import Fault
from .one_instruction import ALL, execute, pair, scalar, vector, wave, words

M = 0xFFFFFFFF
BYTES = np.arange(4096, dtype=np.int64).astype(np.uint8) ^ (np.arange(4096) // 256 * 37).astype(np.uint8)


def memory(size: int = 4096) -> DeviceMemory:
    return DeviceMemory({"x_ptr": BYTES[:size].copy(), "out_ptr": np.zeros(size, np.uint8)}, {})


def number(data: np.ndarray, at: int, size: int, signed: bool = False) -> int:
    return int.from_bytes(bytes(data[at : at + size]), "little", signed=signed)


READS = {
    "ds_read_b32": (4, False), "ds_read_b64": (8, False), "ds_read_b128": (16, False), "ds_read_u8": (1, False),
    "ds_read_i8": (1, True), "ds_read_u16": (2, False), "ds_read_i16": (2, True),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_lds_reads(name: str) -> None:
    size, signed = READS[name]
    address = [lane * size for lane in range(64)]
    state = wave({0: address})
    state.shared.bytes[:] = BYTES
    count = max(size // 4, 1)
    to = "v4" if count == 1 else f"v[4:{3 + count}]"
    found = execute(state, f"{name} {to}, v0 offset:32")
    for lane in range(64):
        got = sum(vector(found, 4 + register)[lane] << 32 * register for register in range(count))
        assert got == number(BYTES, address[lane] + 32, size, signed) % (1 << 32 * count)


@pytest.mark.parametrize(("name", "unit"), [
    ("ds_read2_b32", 4), ("ds_read2_b64", 8), ("ds_read2st64_b32", 256), ("ds_read2st64_b64", 512),
])  # fmt: skip
def test_two_lds_reads(name: str, unit: int) -> None:
    state = wave({0: [8 * lane for lane in range(64)]})
    state.shared.bytes[:] = BYTES
    size = 8 if "64" in name[-3:] else 4
    words_ = size // 4
    found = execute(state, f"{name} v[4:{3 + 2 * words_}], v0 offset0:3 offset1:1")
    for lane in (0, 17, 63):
        for part, offset in enumerate((3, 1)):
            got = sum(vector(found, 4 + part * words_ + k)[lane] << 32 * k for k in range(words_))
            assert got == number(BYTES, 8 * lane + offset * unit, size)


@pytest.mark.parametrize(("name", "size"), [
    ("ds_write_b8", 1), ("ds_write_b16", 2), ("ds_write_b32", 4), ("ds_write_b64", 8), ("ds_write_b128", 16),
    ("ds_write_b8_d16_hi", 1), ("ds_write_b16_d16_hi", 2),
])  # fmt: skip
def test_lds_writes(name: str, size: int) -> None:
    values = {register: words(register) for register in (4, 5, 6, 7)}
    on = ALL & ~(1 << 9)
    source = "v4" if size <= 4 else f"v[4:{3 + size // 4}]"
    found = execute(wave({0: [16 * lane for lane in range(64)], **values}, on=on), f"{name} v0, {source} offset:5")
    for lane in range(64):
        whole = sum(values[4 + k][lane] << 32 * k for k in range(4))
        whole = whole >> 16 if "hi" in name else whole
        before = int.from_bytes(b"\xcd" * size, "little")
        wanted = before if lane == 9 else whole % (1 << 8 * size)
        assert number(found.shared.bytes, 16 * lane + 5, size) == wanted


@pytest.mark.parametrize(("name", "unit"), [
    ("ds_write2_b32", 4), ("ds_write2_b64", 8), ("ds_write2st64_b32", 256), ("ds_write2st64_b64", 512),
])  # fmt: skip
def test_two_lds_writes(name: str, unit: int) -> None:
    size = 8 if "64" in name[-3:] else 4
    values = {register: words(register) for register in (4, 5, 6, 7)}
    operands = "v4, v5" if size == 4 else "v[4:5], v[6:7]"
    found = execute(
        wave({0: [8 * lane for lane in range(64)], **values}, lds=40000), f"{name} v0, {operands} offset1:65"
    )
    for lane in range(64):
        for part, offset in enumerate((0, 65)):
            wanted = sum(values[4 + part * size // 4 + k][lane] << 32 * k for k in range(size // 4))
            assert number(found.shared.bytes, 8 * lane + offset * unit, size) == wanted


def test_halves_of_registers() -> None:
    state = wave({0: [4 * lane for lane in range(64)], 4: [0x11112222] * 64, 5: [0x11112222] * 64})
    state.shared.bytes[:] = BYTES
    found = execute(state, "ds_read_u16_d16 v4, v0", "ds_read_u16_d16_hi v5, v0")
    assert vector(found, 4)[7] == 0x11110000 | number(BYTES, 28, 2)
    assert vector(found, 5)[7] == 0x2222 | number(BYTES, 28, 2) << 16


def test_transposed_reads() -> None:
    """ds_read_b64_tr_b16: of 16 lanes that read rows of a 4 x 16 tile, lane l gets column l.

    The tile lies in LDS row by row, and lane l reads 4 numbers: of row l / 4, from column 4 (l % 4) on.
    """
    state = wave({0: [8 * lane for lane in range(64)]})
    values = np.arange(2048, dtype=np.uint16)
    state.shared.bytes[:] = values.view(np.uint8)
    found = pair(execute(state, "ds_read_b64_tr_b16 v[4:5], v0", chip="gfx950"), 4)
    for lane in range(64):
        block, column = 64 * (lane // 16), lane % 16
        wanted = [block + 16 * row + column for row in range(4)]
        assert [found[lane] >> 16 * row & 0xFFFF for row in range(4)] == wanted


@pytest.mark.parametrize("offset", [4093, 70000])
def test_lds_ends(offset: int) -> None:
    with pytest.raises(Fault, match=r"LDS \d+ to \+4 in lane 0: the workgroup has 4096 bytes"):
        execute(wave({0: [offset] * 64}), "ds_read_b32 v1, v0")
    execute(wave({0: [offset] * 64}, on=0), "ds_read_b32 v1, v0")


LOADS = {
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False), "ubyte": (1, False),
    "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True),
}  # fmt: skip
"""global_load_dword, global_load_dwordx2, global_load_dwordx4, global_load_ubyte, global_load_ushort,
buffer_load_dword, buffer_load_dwordx2, buffer_load_dwordx4, buffer_load_ubyte, buffer_load_ushort."""


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("kind", ["global", "global with scalars", "buffer"])
def test_loads(name: str, kind: str) -> None:
    size, signed = LOADS[name]
    held = memory()
    base = held.address("x_ptr")
    offsets = [lane * size for lane in range(64)]
    whole = [base + offset for offset in offsets]
    state = wave({0: offsets, 2: [a & M for a in whole], 3: [a >> 32 for a in whole]},
                 {0: base, 1: base >> 32, 2: 4096, 3: 0x27000, 5: 12}, memory=held)  # fmt: skip
    count = max(size // 4, 1)
    to = "v8" if count == 1 else f"v[8:{7 + count}]"
    line = {
        "global": f"global_load_{name} {to}, v[2:3], off offset:20",
        "global with scalars": f"global_load_{name} {to}, v0, s[0:1] offset:20",
        "buffer": f"buffer_load_{name} {to}, v0, s[0:3], s5 offen offset:8",
    }[kind]
    found = execute(state, line)
    for lane in range(64):
        got = sum(vector(found, 8 + register)[lane] << 32 * register for register in range(count))
        assert got == number(BYTES, offsets[lane] + 20, size, signed) % (1 << 32 * count)


def test_offsets_may_be_negative() -> None:
    held = memory()
    base = held.address("x_ptr") + 64
    found = execute(
        wave({0: [0] * 64}, {0: base, 1: base >> 32}, memory=held), "global_load_dword v1, v0, s[0:1] offset:-8"
    )
    assert vector(found, 1)[0] == number(BYTES, 56, 4)


STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short_d16_hi": 2}
"""global_store_byte, global_store_short, global_store_dword, global_store_dwordx2, global_store_dwordx4,
global_store_short_d16_hi, buffer_store_byte, buffer_store_short, buffer_store_dword, buffer_store_dwordx2,
buffer_store_dwordx4."""


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("kind", ["global", "buffer"])
def test_stores(name: str, kind: str) -> None:
    size, held = STORES[name], memory()
    base = held.address("out_ptr")
    values = {register: words(register) for register in (4, 5, 6, 7)}
    state = wave(
        {0: [16 * lane for lane in range(64)], **values},
        {0: base, 1: base >> 32, 2: 4096, 3: 0},
        on=ALL - 2,
        memory=held,
    )
    source = "v4" if size <= 4 else f"v[4:{3 + size // 4}]"
    line = (
        f"global_store_{name} v0, {source}, s[0:1]"
        if kind == "global"
        else f"buffer_store_{name} {source}, v0, s[0:3], 0 offen"
    )
    execute(state, line)
    for lane in range(64):
        whole = sum(values[4 + k][lane] << 32 * k for k in range(4)) >> 16 * ("hi" in name)
        wanted = 0 if lane == 1 else whole % (1 << 8 * size)
        assert number(held.tensor("out_ptr"), 16 * lane, size) == wanted


def test_a_buffer_is_checked() -> None:
    """Beyond its size, as Triton masks lanes by an offset of 2**31: zero is read, nothing is written."""
    held = memory(128)
    base = held.address("x_ptr")
    address = [4 * lane for lane in range(62)] + [0x80000000, 0xFFFFFFFC]
    state = wave({0: address, 4: [9] * 64}, {0: base, 1: base >> 32, 2: 128, 3: 0}, memory=held)
    found = execute(state, "buffer_load_dword v1, v0, s[0:3], 0 offen", "buffer_store_dword v4, v0, s[0:3], 0 offen")
    assert vector(found, 1) == [number(BYTES, 4 * lane, 4) if lane < 32 else 0 for lane in range(64)]
    assert set(held.tensor("x_ptr").view(np.uint32)) == {9}


@pytest.mark.parametrize(("offset", "message"), [
    (4093, "first 1 bytes behind the end of x_ptr"), (-4, "first 4 bytes before the beginning of x_ptr"),
    (1 << 40, "behind the end of"),
])  # fmt: skip
def test_what_is_outside_of_tensors(offset: int, message: str) -> None:
    held = memory()
    at = held.address("x_ptr") + offset
    state = wave({0: [at & M] * 64, 1: [at >> 32] * 64, 2: [0] * 64}, on=0xF0, memory=held)
    with pytest.raises(Fault, match=f"a load of 4 bytes at {at:#x} by 4 lanes.*{message}"):
        execute(state, "global_load_dword v2, v[0:1], off")
    with pytest.raises(Fault, match="a store of 4 bytes"):
        execute(state, "global_store_dword v[0:1], v2, off")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count: int) -> None:
    """s_load_dword, s_load_dwordx2, s_load_dwordx4, s_load_dwordx8, s_load_dwordx16."""
    held = memory()
    base = held.address("x_ptr")
    to = "s8" if count == 1 else f"s[8:{7 + count}]"
    name = "s_load_dword" + (f"x{count}" if count > 1 else "")
    found = execute(wave({}, {0: base, 1: base >> 32, 2: 64}, memory=held), f"{name} {to}, s[0:1], s2 offset:0x10")
    assert [scalar(found, 8 + k) for k in range(count)] == [number(BYTES, 80 + 4 * k, 4) for k in range(count)]


def test_loads_into_lds() -> None:
    """buffer_load_dwordx4 … lds: lane l to M0 + offset + 16 l, once it is waited for; zeros from beyond the buffer."""
    held = memory()
    base = held.address("x_ptr")
    state = wave(
        {0: [32 * lane for lane in range(63)] + [1 << 31]},
        {0: base, 1: base >> 32, 2: 4096, 3: 0, M0: 1024},
        memory=held,
    )
    found = execute(state, "buffer_load_dwordx4 v0, s[0:3], 0 offen lds")
    assert set(found.shared.bytes) == {0xCD}
    execute(found, "s_waitcnt vmcnt(0)")
    for lane in range(64):
        wanted = number(BYTES, 32 * lane, 16) if lane < 63 else 0
        assert number(found.shared.bytes, 1024 + 16 * lane, 16) == wanted
    assert set(found.shared.bytes[:1024]) | set(found.shared.bytes[2048:]) == {0xCD}


def test_spilled_registers() -> None:
    """scratch_store_dword, scratch_load_dword."""
    state = wave({4: words(1), 5: words(2)}, on=ALL - 1)
    state.scratch = np.zeros((4, 1, 64), np.uint32)
    found = execute(state, "scratch_store_dword off, v4, off offset:4", "scratch_store_dword off, v5, off",
                    "scratch_load_dword v6, off, off offset:4", "scratch_load_dword v7, off, off")  # fmt: skip
    assert vector(found, 6)[1:] == words(1)[1:]
    assert vector(found, 7)[1:] == words(2)[1:]


ATOMICS = {
    "add": (7, 5, 12), "sub": (7, 5, 2), "swap": (7, 5, 5), "umax": (7, M, M), "umin": (7, M, 7), "smax": (7, M, 7),
    "smin": (7, M, M), "and": (6, 3, 2), "or": (6, 3, 7), "xor": (6, 3, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_operations(name: str) -> None:
    """global_atomic_add and others give what was there, with sc0 or glc."""
    before, operand, after = ATOMICS[name]
    held = memory()
    held.tensor("out_ptr").view(np.uint32)[3] = before
    base = held.address("out_ptr")
    state = wave({0: [12] * 64, 1: [operand] * 64, 2: [77] * 64}, {0: base, 1: base >> 32}, on=1 << 20, memory=held)
    found = execute(state, f"global_atomic_{name} v2, v0, v1, s[0:1] sc0")
    assert (vector(found, 2)[20], vector(found, 2)[21]) == (before, 77)
    assert held.tensor("out_ptr").view(np.uint32)[3] == after


def test_every_lane_counts() -> None:
    held = memory()
    base = held.address("out_ptr")
    state = wave({0: [0] * 64, 1: [1] * 64}, {0: base, 1: base >> 32}, memory=held)
    found = execute(
        state, "global_atomic_add v2, v0, v1, s[0:1] glc", "global_atomic_add v0, v1, s[0:1]", chip="gfx90a"
    )
    assert sorted(vector(found, 2)) == list(range(64))
    assert held.tensor("out_ptr").view(np.uint32)[0] == 128
