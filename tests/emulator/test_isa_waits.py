"""What is not waited for: registers, LDS between waves, and the parts of a program that others have yet to store."""

from __future__ import annotations

import numpy as np
import pytest

from .assembly_text import listing
from .device_memory import DeviceMemory, WeakMemory
from .isa_errors import Fault, UnknownInstruction
from .machine import ARGUMENTS, Order, Program
from .one_instruction import POISON_NAMES

KERNEL = """
	.amdgcn_target "amdgcn-amd-amdhsa--{chip}"
	.type k,@function
k:
{body}
	s_endpgm
	.section .rodata
		.amdhsa_group_segment_fixed_size 1024
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size 8
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_dispatch_ptr 0
		.amdhsa_user_sgpr_queue_ptr 0
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 0
		.amdhsa_system_sgpr_workgroup_id_z 0
amdhsa.kernels:
"""
"""v0 is the thread, s2 the workgroup, s[0:1] the address of the arguments, of which there is one: that of `x_ptr`."""


def run(
    body: str, *, groups: int = 1, threads: int = 64, weak: bool = False, chip: str = "gfx942", seed: int = 0
) -> np.ndarray:
    """Run a kernel on `x_ptr`, 4 KiB that are 0, 1, 2, … as words of 32 bits; return them."""
    tensors = {"x_ptr": np.arange(1024, dtype=np.uint32).view(np.uint8), ARGUMENTS: np.zeros(128, np.uint8)}
    memory = WeakMemory(tensors, {}, chip) if weak else DeviceMemory(tensors, {})
    memory.tensor(ARGUMENTS).view(np.uint64)[0] = memory.address("x_ptr")
    program = Program(KERNEL.format(chip=chip, body=body))
    program.run((groups, 1, 1), threads, memory, 1024, Order(seed, alone=weak))
    return memory.tensor("x_ptr").view(np.uint32)


ADDRESS = "	s_load_dwordx2 s[4:5], s[0:1], 0x0\n	v_lshlrev_b32_e32 v1, 2, v0\n	s_waitcnt lgkmcnt(0)\n"
USES = {
    "a scalar load": ("	s_load_dwordx2 s[4:5], s[0:1], 0x0\n", "lgkmcnt(0)", "	s_mov_b32 s6, s5\n"),
    "a load": (ADDRESS + "	global_load_dword v2, v1, s[4:5]\n", "vmcnt(0)", "	v_add_u32_e32 v3, v2, v2\n"),
    "a load that is overwritten": (
        ADDRESS + "	global_load_dword v2, v1, s[4:5]\n", "vmcnt(0)", "	v_mov_b32_e32 v2, 0\n",
    ),
    "a read of LDS": ("	v_mov_b32_e32 v1, 0\n	ds_read_b32 v2, v1\n", "lgkmcnt(0)", "	v_mov_b32_e32 v3, v2\n"),
    "a permutation": (
        "	v_mov_b32_e32 v1, 0\n	ds_bpermute_b32 v2, v1, v0\n", "lgkmcnt(0)", "	v_mov_b32_e32 v3, v2\n",
    ),
    "the first of two loads": (
        ADDRESS + "	global_load_dword v2, v1, s[4:5]\n	global_load_dword v3, v1, s[4:5]\n", "vmcnt(1)",
        "	v_mov_b32_e32 v4, v2\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", USES)
def test_a_register_before_its_load(what: str) -> None:
    before, wait, use = USES[what]
    run(f"{before}	s_waitcnt {wait}\n{use}")
    with pytest.raises(Fault, match=r"line \d+, (s_mov_b32|v_\w+).*before the load into it is waited for"):
        run(before + use)
    late = wait.replace("(0)", "(1)").replace("(1)", "(2)") if "(1)" in wait else wait.replace("(0)", "(1)")
    with pytest.raises(Fault, match="before the load"):
        run(f"{before}	s_waitcnt {late}\n{use}")


def test_a_load_into_the_same_register_may_follow() -> None:
    """In order: lanes that another load fills."""
    run(ADDRESS + "	global_load_dword v2, v1, s[4:5]\n	global_load_dword v2, v1, s[4:5]\n")
    with pytest.raises(Fault, match="before the load"):
        run(ADDRESS + "	global_load_dword v1, v1, s[4:5]\n	global_load_dword v2, v1, s[4:5]\n")


def test_scalar_loads_overtake_each_other() -> None:
    two = "	s_load_dwordx2 s[4:5], s[0:1], 0x0\n	s_load_dwordx2 s[6:7], s[0:1], 0x0\n"
    with pytest.raises(Fault, match="before the load"):
        run(f"{two}	s_waitcnt lgkmcnt(1)\n	s_mov_b32 s8, s4\n")


WRITE = "	v_lshlrev_b32_e32 v1, 2, v0\n	ds_write_b32 v1, v0\n"
WAIT, BARRIER = "	s_waitcnt lgkmcnt(0)\n", "	s_barrier\n"
READ = "	v_xor_b32_e32 v1, 0x100, v1\n	ds_read_b32 v2, v1\n" + WAIT
STORE = (
    "	s_load_dwordx2 s[4:5], s[0:1], 0x0\n"
    + WAIT
    + "	v_lshlrev_b32_e32 v3, 2, v0\n	global_store_dword v3, v2, s[4:5]\n"
)


def test_lds_between_waves() -> None:
    """Each of two waves reads what the other has written."""
    found = run(WRITE + WAIT + BARRIER + READ + STORE, threads=128)
    assert list(found[:128]) == [thread ^ 64 for thread in range(128)]


@pytest.mark.parametrize("body", [
    WRITE + WAIT + READ, WRITE + BARRIER + READ, WRITE + BARRIER + WAIT + READ,
    READ.replace("v1, 0x100, v1", "v1, v0, v0") + WRITE,
], ids=["no barrier", "no wait", "wait behind the barrier", "a write after a read"])  # fmt: skip
def test_races_in_lds(body: str) -> None:
    with pytest.raises(Fault, match="with no barrier between"):
        run(body, threads=128)


def test_one_wave_needs_no_barrier() -> None:
    run(WRITE + WAIT + READ)


def test_a_value_that_all_waves_write() -> None:
    body = "	v_mov_b32_e32 v1, 0\n	v_mov_b32_e32 v2, 7\n	ds_write_b32 v1, v2\n" + WAIT
    run(body + "	ds_read_b32 v3, v1\n", threads=256)


LOAD_TO_LDS = (
    "	s_load_dwordx2 s[4:5], s[0:1], 0x0\n	s_mov_b32 s6, 0x1000\n	s_mov_b32 s7, 0\n	s_mov_b32 m0, 0\n"
    "	v_lshlrev_b32_e32 v1, 2, v0\n	s_waitcnt lgkmcnt(0)\n	buffer_load_dword v1, s[4:7], 0 offen lds\n"
)


def test_loads_into_lds_are_waited_for() -> None:
    read = "	ds_read_b32 v2, v1\n" + WAIT
    run(LOAD_TO_LDS + "	s_waitcnt vmcnt(0)\n" + read)
    with pytest.raises(Fault, match="LDS into which a load is on its way"):
        run(LOAD_TO_LDS + read)


COUNT = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_mov_b32_e32 v1, 0
	v_mov_b32_e32 v2, 1
	s_lshl_b32 s6, s2, 2
	v_mov_b32_e32 v5, s6
	v_add_u32_e32 v6, 77, v5
	s_waitcnt lgkmcnt(0)
	global_load_dwordx4 v[8:11], v1, s[4:5] offset:128
	global_store_dword v5, v6, s[4:5] offset:128
	{published}
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_and_saveexec_b64 s[8:9], vcc
	global_atomic_add v3, v1, v2, s[4:5] sc0
	s_waitcnt vmcnt(0)
	{fresh}
	v_cmp_eq_u32_e32 vcc, 3, v3
	s_cbranch_vccz .LEND
	global_load_dwordx4 v[8:11], v1, s[4:5] offset:128
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v1, v[8:11], s[4:5] offset:256
.LEND:
"""
"""Four programs store a number and count themselves in word 0, which is 0; the last copies all four."""
PUBLISHED = "s_waitcnt vmcnt(0)\n	buffer_wbl2 sc1\n	s_waitcnt vmcnt(0)"


@pytest.mark.parametrize("seed", range(5))
def test_the_last_of_several_programs(seed: int) -> None:
    found = run(COUNT.format(published=PUBLISHED, fresh="buffer_inv sc1"), groups=4, weak=True, seed=seed)
    assert list(found[64:68]) == [77, 81, 85, 89]


@pytest.mark.parametrize(("published", "fresh"), [
    ("buffer_wbl2 sc1", "buffer_inv sc1"), ("s_waitcnt vmcnt(0)", "buffer_inv sc1"), (PUBLISHED, ""),
    (PUBLISHED.replace("sc1", "sc0"), "buffer_inv sc1"),
    ("s_waitcnt vmcnt(0)\n	buffer_wbl2 sc1", "buffer_inv sc1"),
], ids=[
    "stores in flight", "no write-back", "stale lines", "a write-back of a workgroup", "a write-back on its way",
])  # fmt: skip
def test_parts_that_are_not_there_yet(published: str, fresh: str) -> None:
    found = [run(COUNT.format(published=published, fresh=fresh), groups=4, weak=True, seed=seed) for seed in range(8)]
    assert any(list(one[64:68]) != [77, 81, 85, 89] for one in found)
    right = run(COUNT.format(published=published, fresh=fresh), groups=4)
    assert list(right[64:68]) == [77, 81, 85, 89], "in a strong memory nothing shows"


def test_one_cache_needs_no_write_back() -> None:
    kernel = COUNT.replace("sc0", "glc")
    found = run(
        kernel.format(published="s_waitcnt vmcnt(0)", fresh="buffer_wbinvl1_vol"), groups=4, weak=True, chip="gfx90a"
    )
    assert list(found[64:68]) == [77, 81, 85, 89]
    found = run(kernel.format(published="s_waitcnt vmcnt(0)", fresh=""), groups=4, weak=True, chip="gfx90a")
    assert list(found[64:68]) != [77, 81, 85, 89]


def test_different_values_of_two_waves_are_counted() -> None:
    body = "	v_mov_b32_e32 v1, 0\n	ds_write_b32 v1, v0\n"
    program = Program(KERNEL.format(chip="gfx942", body=body))
    program.run((1, 1, 1), 128, DeviceMemory({ARGUMENTS: np.zeros(128, np.uint8)}, {}), 1024)
    assert program.undecided == 64


DIVERGE = """
	v_cmp_gt_u32_e32 vcc, 64, v0
	s_cbranch_vccz .LSECOND
	v_mov_b32_e32 v2, 1
	s_branch .LBOTH
.LSECOND:
	v_mov_b32_e32 v2, 2
.LBOTH:
	s_cmp_lg_u32 s2, 0
	s_cbranch_scc1 .LLATER
	v_add_u32_e32 v2, 10, v2
.LLATER:
	s_lshl_b32 s6, s2, 9
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshl_add_u32 v3, v0, 2, s6
	s_waitcnt lgkmcnt(0)
	global_store_dword v3, v2, s[4:5]
"""


def test_waves_part_and_meet() -> None:
    found = run(DIVERGE, groups=2, threads=128)
    assert list(found[:256]) == [11] * 64 + [12] * 64 + [1] * 64 + [2] * 64


def test_what_never_ends_and_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.machine.MOST", 1000)
    with pytest.raises(Fault, match="does not end"):
        run(".LTOP:\n	s_branch .LTOP\n")
    with pytest.raises(UnknownInstruction, match="v_frobnicate_b32 v0, v1"):
        run("	v_frobnicate_b32 v0, v1\n")


@pytest.mark.parametrize("register", ["v7", "s9"])
def test_registers_that_nobody_wrote_show(register: str) -> None:
    body = f"	v_mov_b32_e32 v2, {register}\n{STORE}"
    assert set(run(body)[:64]) == {POISON_NAMES[register[0]]}


def test_a_listing() -> None:
    found = listing(
        KERNEL.format(chip="gfx950", body="	v_add_f32_e64 v1, -|v2|, s[4:5] ; a comment\n.LBB0_1:\n	s_nop 0")
    )
    assert (found.chip, found.shared, found.arguments_size, found.user_scalars) == ("gfx950", 1024, 8, 2)
    assert found.labels == {"k": 0, ".LBB0_1": 1}
    add, _, end = found.instructions
    assert (add.name, add.form, end.name) == ("v_add_f32", "e64", "s_endpgm")
    assert [(o.kind, o.number, o.count, o.negated, o.absolute) for o in add.operands] == [
        ("v", 1, 1, False, False), ("v", 2, 1, True, True), ("s", 4, 2, False, False),
    ]  # fmt: skip
