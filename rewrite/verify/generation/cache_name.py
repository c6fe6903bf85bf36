"""Whether `generate()` of the installed transformers hands its cache over under a name that the original takes.

Release 5.24 calls it `cache`. A file written before, with `past_key_values`, raises then, or, where `forward` takes
any keyword, goes on without a cache: it sees one token at a time. A package's own loop asks for the name that
`forward` has, so there is nothing to compare it with.
"""

from __future__ import annotations

import inspect
from typing import Any

from hf_rewrite_runtime.cache.cache_argument import NAMES, passed_on

from ..judging.compare import NotRun
from ..models.model_pair import Workbench, on_original


def lost_cache(bench: Workbench) -> str:
    """Return how the original loses the cache that the generation loop makes, `""` where it does not."""
    try:
        return on_original(_lost_cache, bench)
    except NotRun:  # the original cannot be asked, as each check of its generation finds
        return ""


def _lost_cache(bench: Workbench) -> str:
    passed = passed_on()
    if passed != NAMES[0] or bench.subject.accepts(passed):
        return ""
    model = bench.pair(bench.base, bench.implementations()[0], "float32").original
    old = next((name for module in model.modules() for name in NAMES[1:] if _takes(module, name)), "")
    if not old or not (problem := _lost(model, passed)):
        return ""
    import transformers

    return (
        f"transformers {transformers.__version__} hands the cache to {bench.subject.name}.forward as `{passed}`, and "
        f"the file takes `{old}`: {problem}. Let `forward` take both names"
    )


def _takes(module: Any, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def _lost(model: Any, passed: str) -> str:
    """Return what comes of a call that is given a cache by that name, `""` if tokens come to lie in it."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.tensor([[3, 4, 5]], device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{passed: cache})
    except TypeError as error:
        return f"generate() raises ({error})" if passed in str(error) else ""
    return "" if cache.get_seq_length() else "nothing is written to it, and generate() sees one token at a time"
