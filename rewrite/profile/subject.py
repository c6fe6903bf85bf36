"""Both models of a profile, and what they are given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.benchmark.benchmark_models import build, from_checkpoint, lock_of, sharing
from rewrite.errors import UsageError
from rewrite.measure.presets import config_for
from rewrite.verify.models import loaded_sides, model_inputs
from rewrite.verify.models.subjects import Subject, find_subjects, paired

from .parts import part_of
from .profiled_calls import DECODE, PROMPT, TRAIN, Call

if TYPE_CHECKING:
    from torch import Tensor

FAILS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    AssertionError,
    NotImplementedError,
)
"""What a model raises that is given something else than it takes, or has sizes that do not go together."""
DEFAULT = "default"
"""The shape that is the configuration class's own defaults."""


class NotProfiled(UsageError):
    """A kind of profile is asked for that the model does not have."""

    def __init__(self, what: str, why: str):
        super().__init__(f"{what} cannot be profiled: {why}.")


@dataclass(frozen=True)
class Plan:
    """What is profiled. `shape` is a preset or `default`; with `weights` a checkpoint, with `config` a config.json."""

    package: Path
    original: str | None
    kind: str | None
    shape: str
    weights: Path | None = None
    config: Path | None = None
    layers: int | None = None
    class_name: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 1
    tokens: int = 512
    """Before decoding, of a prompt, or of a row of a call."""
    rounds: tuple[int, int] = (3, 12)
    seconds: float = 6.0
    seed: int = 0


@dataclass
class Models:
    """The two sides, with one copy of the weights."""

    subject: Subject
    ours: Any
    theirs: Any
    files: tuple[str, str]
    """Of the original and of the rewritten modeling file."""
    lock: Mapping[str, Any]


def load(plan: Plan) -> Models:
    """Import a package and its original, and build both models on the device.

    Raises:
        RewriteError: one cannot be imported or built, or has no class of the name asked for.
    """
    lock = lock_of(plan.package)
    source = lock["source"]
    upstream = plan.original or source["module"] or str(plan.package.resolve() / source["target"])
    theirs, ours = (
        loaded_sides.load(loaded_sides.locate(upstream)),
        loaded_sides.load(loaded_sides.locate(plan.package)),
    )
    subject = _subject(plan, theirs, ours)
    if plan.weights is not None:
        model = from_checkpoint(subject.rewritten, str(plan.weights), plan.dtype, plan.device)
    else:
        model = build(subject.rewritten, _config(plan, subject), plan.dtype, plan.device, plan.seed)
    original = sharing(subject.original, model)
    return Models(subject, model, original, (str(theirs.__file__), str(ours.__file__)), lock)


def _subject(plan: Plan, theirs: Any, ours: Any) -> Subject:
    if plan.class_name is None:
        return find_subjects(theirs, ours).main
    known = {each.name: each for each in paired(theirs, ours)}
    if plan.class_name not in known:
        raise NotProfiled(plan.class_name, f"the file has no such class, but {', '.join(known) or 'none'}")
    return known[plan.class_name]


def _config(plan: Plan, subject: Subject) -> Any:
    from huggingface_hub import errors

    try:
        return _configured(plan, subject)
    except (ValueError, TypeError, getattr(errors, "StrictDataclassError", ValueError)) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise NotProfiled(f"{subject.name} in the shape '{plan.shape}'", why) from error


def _configured(plan: Plan, subject: Subject) -> Any:
    changed = {} if plan.layers is None else {"num_hidden_layers": plan.layers}
    if plan.config is not None:
        try:
            given = json.loads(plan.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotProfiled(str(plan.config), f"it is no configuration that can be read ({error})") from error
        config = subject.config_class.from_dict(given)
    elif plan.shape == DEFAULT:
        config = subject.config_class()
    else:
        return config_for(subject.config_class, plan.shape, **changed)
    for name, value in changed.items():
        kinds = getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = list(kinds)[:value]
        setattr(config, name, value)
    return config


def calls(plan: Plan, models: Models) -> dict[str, Call]:
    """The call of each side: `original` and `ours`.

    Raises:
        NotProfiled: the model has no such call.
    """
    kind = plan.kind or (DECODE if models.subject.causal else "forward")
    generates = hasattr(models.subject.original, "generate") and models.subject.writes
    if kind in (DECODE, PROMPT) and not generates:
        raise NotProfiled(f"{kind} of {models.subject.name}", "it does not generate; --forward profiles one call")
    sides = {"original": models.theirs, "ours": models.ours}
    if kind == TRAIN:
        for model in sides.values():
            model.requires_grad_(True).train()
    reasons = []
    for inputs in _inputs(plan, models, kind):
        call = Call(kind, models.theirs, plan.device, inputs)
        try:
            if kind == TRAIN and getattr(models.theirs(**inputs), "loss", None) is None:
                raise NotProfiled(f"training of {models.subject.name}", "its forward returns no loss for these labels")
            call.run(1)
        except FAILS as error:
            lines = str(error).strip().splitlines() or [""]
            reasons.append(f"given {', '.join(inputs)}: {type(error).__name__}: {lines[0][:200]}")
            continue
        return {name: Call(kind, model, plan.device, inputs) for name, model in sides.items()}
    why = "; ".join(reasons) or "what its forward takes is not known"
    raise NotProfiled(f"{kind} of {models.subject.name} with these sizes", f"the original itself fails, {why}")


def _inputs(plan: Plan, models: Models, kind: str) -> Iterator[dict[str, Tensor]]:
    """What the model may be given: a text first, then what else it takes, images or sound."""
    import torch

    subject, config = models.subject, models.ours.config
    if subject.accepts("input_ids"):
        generator = torch.Generator().manual_seed(plan.seed)
        vocabulary = int(config.get_text_config().vocab_size)
        ids = torch.randint(min(4, vocabulary - 1), vocabulary, (plan.batch, plan.tokens), generator=generator)
        found = {"input_ids": ids.to(plan.device), "attention_mask": torch.ones_like(ids).to(plan.device)}
        if kind not in (DECODE, PROMPT) and getattr(config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = found["input_ids"].clone()
        if kind == TRAIN:
            found["labels"] = found["input_ids"]
        yield found
    if kind in (DECODE, PROMPT, TRAIN):
        return
    for names in model_inputs.kinds_of(subject.original):
        if names != model_inputs.TEXT:
            made = model_inputs.make(names, config, plan.batch, plan.seed, getattr(torch, plan.dtype))
            yield {name: tensor.to(plan.device) for name, tensor in made.items()}


def explanation(model: Any) -> list[str]:
    """What a package says of where its fast path was not taken; nothing of an original."""
    part = part_of(model, "core/explanation")
    return [] if part is None else str(part.explain(model)).splitlines()
