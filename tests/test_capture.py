"""The proof that a step can be captured: its rules catch what a capture refuses, and rewritten models pass them."""

from __future__ import annotations

import copy
import importlib
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import made_package
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from stream_rules import Refused, stream_rules  # noqa: E402
from tolerances import STEPS_IN_FP32  # noqa: E402

from hf_rewrite_runtime.cache.cache_argument import argument_of  # noqa: E402
from hf_rewrite_runtime.cache.layers import INDEXED  # noqa: E402
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache  # noqa: E402
from rewrite.verify.models.configs import small_variants  # noqa: E402
from rewrite.verify.models.model_pair import randomise  # noqa: E402

BATCH, PROMPT, STEPS, WARM, CAPACITY, PADDING = 2, 6, 5, 2, 16, 2
X, INDEX, MASK = torch.arange(6.0), torch.tensor([1, 3]), torch.arange(6) > 2
REFUSED = {
    "item": lambda: X[0].item(),
    "truth": lambda: bool(MASK.any()),
    "int": lambda: torch.arange(INDEX[0], 5),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "unique": lambda: INDEX.unique(),
    "mask": lambda: X[MASK],
    "mask write": lambda: X.clone().__setitem__(MASK, X[:3]),
    "bincount": lambda: INDEX.bincount(),
    "repeats": lambda: X[:2].repeat_interleave(INDEX),
    "constant": lambda: torch.tensor([1.0], device=X.device),
    "classes": lambda: torch.nn.functional.one_hot(INDEX),
}
ALLOWED = {
    "arange": lambda: torch.arange(3, device=X.device) + INDEX[0],
    "index": lambda: X[INDEX],
    "fill": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "scalar": lambda: X * torch.tensor(2.0),
    "full": lambda: torch.full((3,), 1.0, device=X.device),
    "one_hot": lambda: torch.nn.functional.one_hot(INDEX, num_classes=5),
    "topk": lambda: X.topk(2).indices,
    "where": lambda: torch.where(MASK, X, -X),
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_capture_refuses_is_refused(step):
    step()
    with pytest.raises(Refused) as caught, stream_rules():
        step()
    assert caught.value.where.startswith("test_capture.py:")


@pytest.mark.parametrize("step", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_a_capture_allows_is_allowed(step):
    with stream_rules():
        step()


def written(name: str, folder: Path) -> Path:
    """Write the package of a class's file."""
    source = inspect.getsourcefile(getattr(transformers, name))
    assert source is not None
    return made_package.write(source, folder)


def rewritten(name: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """Import the class of a package."""
    monkeypatch.syspath_prepend(package.parent)
    return getattr(importlib.import_module(package.name), name)


def models_of(cls: type, ours: type, experts: str | None) -> tuple[Any, Any]:
    """Return the original and the rewritten model, small and with equal weights."""
    config = small_variants(cls, True, {})[0].config
    pinned = {"attn_implementation": "sdpa" if cls._supports_sdpa else "eager", "dtype": torch.float32}
    pinned |= {} if experts is None else {"experts_implementation": experts}
    made = [side._from_config(copy.deepcopy(config), **pinned).eval() for side in (cls, ours)]
    randomise(made[0], 1)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def error_of_steps(original: Any, model: Any) -> float:
    """Return how far logits of steps under the rules are off the original's over the whole of a padded batch."""
    ids = torch.randint(4, 64, (BATCH, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    known = "position_ids" in inspect.signature(type(original).forward).parameters
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if known else {}
    text = model.config.get_text_config(decoder=True)
    growing = transformers.DynamicCache(config=text).layers
    cache = PreallocatedCache(text.num_hidden_layers, BATCH, CAPACITY, "cpu", growing or None)
    cache.pad(PROMPT - mask[:, :PROMPT].sum(1))
    slots = torch.ones(BATCH, CAPACITY, dtype=torch.int64)
    slots[:, :PROMPT] = mask[:, :PROMPT]
    logits = []
    with torch.no_grad():
        whole = original(ids, attention_mask=mask, use_cache=False, **positions).logits[:, PROMPT:]
        for number, stop in enumerate(range(PROMPT, PROMPT + STEPS + 1)):
            start = stop - 1 if number else 0
            given = {name: value[:, start:stop] for name, value in positions.items()} | {argument_of(model): cache}
            seen = slots if number else mask[:, :PROMPT]
            step = cache.step() if number else nullcontext()
            with step, stream_rules() if number > WARM else nullcontext():
                output = model(ids[:, start:stop], attention_mask=seen, use_cache=True, **given)
            cache.position.fill_(stop)
            logits.append(output.logits[:, -1])
    assert cache.refusal is None
    return float((torch.stack(logits[1:], 1) - whole).abs().max() / whole.abs().max())


CLEAN = [
    ("LlamaForCausalLM", None),
    ("OPTForCausalLM", None),
    ("MixtralForCausalLM", "batched_mm"),
    ("MixtralForCausalLM", "eager"),
    ("TrOCRForCausalLM", None),
    pytest.param(
        "DeepseekV32ForCausalLM",
        "eager",
        marks=pytest.mark.skipif(INDEXED is None, reason="this transformers has no layers with an indexer's keys"),
    ),
]


@pytest.mark.parametrize(("name", "experts"), CLEAN)
def test_rewritten_models_decode_under_the_rules(
    name: str, experts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = written(name, tmp_path / f"captured_{name}_{experts}")
    models = models_of(getattr(transformers, name), rewritten(name, package, monkeypatch), experts)
    assert error_of_steps(*models) <= STEPS_IN_FP32


@pytest.mark.parametrize(
    ("planted", "caught"),
    [
        ("inputs_embeds.sum().item()", Refused),
        ("position_ids = position_ids + position_ids.clamp(max=1)", None),
    ],
    ids=["a host that waits", "other positions"],
)
def test_a_planted_bug_is_caught(
    planted: str, caught: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = written("LlamaForCausalLM", tmp_path / f"captured_{'waits' if caught else 'elsewhere'}")
    file = package / "modeling_llama.py"
    line = "        hidden_states = inputs_embeds\n"
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, f"{line}        {planted}\n"))
    models = models_of(transformers.LlamaForCausalLM, rewritten("LlamaForCausalLM", package, monkeypatch), None)
    if caught is None:
        assert error_of_steps(*models) > STEPS_IN_FP32
    else:
        with pytest.raises(caught):
            error_of_steps(*models)
