"""What Triton emits for AMD's chips the emulator knows, and a test of the instruction is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import test_isa_floats, test_isa_integers, test_isa_pairs, test_isa_scalars
from .mnemonics import RECORDS, emitted, recorded

TESTS = "\n".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("test_isa_*.py")))
TABLES = {
    *(f"v_{name}" for name in (*test_isa_integers.WORD, *test_isa_integers.LONG, *test_isa_integers.CARRIES)),
    *(f"v_pk_{name}" for name in test_isa_integers.PACKED),
    *(f"v_{name}_{kind}" for name in test_isa_floats.EXACT for kind in test_isa_floats.KINDS.values()),
    *(f"v_pk_{name}_f32" for name in test_isa_pairs.PACKED_FLOATS),
    *(
        f"v_cmp_{name}_{kind}"
        for name in test_isa_integers.RELATIONS
        for kind in ["u16", "i16", "u32", "i32", "u64", "i64"]
    ),
    *(f"v_cmp_{name}_{k}" for name in test_isa_floats.FLOAT_RELATIONS for k in test_isa_floats.KINDS.values()),
    *(f"s_{name}" for name in (*test_isa_scalars.TWO, *test_isa_scalars.LONG, *test_isa_scalars.ONE)),
}
"""Names that tests put together."""


def test_every_instruction_that_is_emitted_has_a_test() -> None:
    assert len(list(RECORDS.glob("mnemonics-*.json"))) >= 2
    names = recorded()
    assert len(names) > 250
    assert [
        name for name in sorted(names - TABLES) if not re.search(rf"\b{name}(_e32|_e64|_sdwa|_dpp)?\b", TESTS)
    ] == []


@pytest.mark.parametrize("chip", ["gfx950"])
def test_the_installed_triton_emits_what_is_known(chip: str) -> None:
    pytest.importorskip("triton")
    found = emitted(chip, ["rms_norm", "decode_attention", "fp8_rows"])
    assert found["emitted"]
    assert found["unknown"] == {}
