"""A file that takes its cache by a name of before, and a release whose loop has another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rewrite_runtime.cache.cache_argument import passed_on
from rewrite.verify import Options, verify

MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"
BOTH = ("        cache=None,  # its name from transformers 5.24 on\n", "past_key_values if cache is None else cache")


@pytest.mark.slow
@pytest.mark.skipif(passed_on() != "cache", reason="the loop of this release asks for `past_key_values`")
def test_an_original_that_loses_its_cache_is_said_and_not_compared(tmp_path: Path) -> None:
    text = MODEL.read_text()
    assert all(part in text for part in BOTH)
    older = tmp_path / "modeling_older.py"
    older.write_text(text.replace(BOTH[0], "").replace(BOTH[1], "past_key_values"))
    options = Options(quick=True, gates=("generation",), others=False, clean_process=False)
    (said,) = verify(older, older, options).gates[-1].checks
    assert said.status == "not run"
    assert "as `cache`, and the file takes `past_key_values`: nothing is written to it" in said.detail
    assert len(verify(MODEL, MODEL, options).gates[-1].checks) > 1
