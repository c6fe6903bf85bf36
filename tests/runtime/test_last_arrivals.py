"""Assembly in which the last program to count itself may read what is not stored yet, and in which it may not."""

from __future__ import annotations

import pytest

from rewrite.kernels.last_arrivals import Arrivals, of_amd

GFX90A, GFX942 = "gfx90a", "gfx942"
COUNT = """
    s_and_saveexec_b64 s[6:7], s[0:1]
    s_cbranch_execz .LBB0_2
    {release}
    s_waitcnt vmcnt(0)
    global_atomic_add v3, v3, v4, s[4:5] {result}
    {acquire}
.LBB0_2:
    s_or_b64 exec, exec, s[6:7]
    s_waitcnt lgkmcnt(0)
    s_barrier
"""
FORMS = {
    GFX90A: {"release": "", "result": "glc", "acquire": "s_waitcnt vmcnt(0)\n    buffer_wbinvl1_vol"},
    GFX942: {"release": "buffer_wbl2 sc1", "result": "sc0", "acquire": "s_waitcnt vmcnt(0)\n    buffer_inv sc1"},
}
STORE = "    buffer_store_dword v3, v2, s[28:31], 0 offen\n"
WAIT = "    ;;#ASMSTART\n    s_waitcnt vmcnt(0)\n    ;;#ASMEND\n"
BARRIER = "    s_waitcnt lgkmcnt(0)\n    s_barrier\n"
LOAD = "    global_load_dwordx4 v[4:7], v[2:3], off nt\n"


def kernel(chip: str, before: str, after: str = LOAD, threads: int = 256, **other: str) -> Arrivals:
    return of_amd(
        f'    .amdgcn_target "amdgcn-amd-amdhsa--{chip}"\nkernel:\n{before}'
        f"{COUNT.format(**(FORMS[chip] | other))}{after}    s_endpgm\n    .section .rodata\n"
        f"    .max_flat_workgroup_size: {threads}\n"
    )


@pytest.mark.parametrize("chip", FORMS)
def test_stores_that_are_waited_for_can_be_read(chip: str) -> None:
    good = Arrivals(1, 0, 0)
    assert kernel(chip, STORE + WAIT + BARRIER) == good
    assert kernel(chip, STORE + WAIT + BARRIER + BARRIER) == good
    assert kernel(chip, STORE + STORE + "    s_waitcnt vmcnt(0) lgkmcnt(0)\n    s_barrier\n") == good
    assert kernel(chip, "") == good
    assert kernel(chip, STORE, threads=64) == good, "one wave waits for its own"


@pytest.mark.parametrize("chip", FORMS)
@pytest.mark.parametrize(
    "before",
    [
        STORE + BARRIER,  # what Triton makes of a barrier alone
        STORE + BARRIER + WAIT,
        WAIT + STORE + BARRIER,
        STORE + WAIT + BARRIER + STORE,
        STORE + WAIT,
        STORE + "    s_waitcnt vmcnt(1)\n" + BARRIER,
        STORE + "    s_cbranch_execz .LBB0_1\n" + WAIT + ".LBB0_1:\n" + BARRIER,  # not every wave
        f"    s_cbranch_scc1 .LBB0_1\n{WAIT}.LBB0_0:\n{BARRIER}    s_cbranch_scc0 .LBB0_3\n.LBB0_1:\n{STORE}"
        "    s_branch .LBB0_0\n.LBB0_3:\n",  # around a loop, backwards
    ],
)
def test_stores_on_their_way_are_found(chip: str, before: str) -> None:
    assert kernel(chip, before) == Arrivals(1, 1, 0)


def test_each_die_has_a_cache_to_write_back() -> None:
    assert kernel(GFX942, STORE + WAIT + BARRIER, release="").early == 1
    assert kernel(GFX942, STORE + WAIT + BARRIER, release="buffer_wbl2 sc0").early == 1


@pytest.mark.parametrize("chip", FORMS)
def test_loads_of_what_is_stale_are_found(chip: str) -> None:
    before = STORE + WAIT + BARRIER
    assert kernel(chip, before, acquire="s_waitcnt vmcnt(0)").early_reads == 1
    assert kernel(chip, before, acquire=FORMS[chip]["acquire"] + "\n" + LOAD).early_reads == 1
    assert kernel(chip, LOAD + before).early_reads == 0
