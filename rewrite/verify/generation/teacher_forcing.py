"""Gate 3: a real checkpoint, teacher-forced on text it wrote itself, in KL, top-1 agreement and perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..calls import approximate
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.inputs import tokens
from ..models.model_pair import Workbench

if TYPE_CHECKING:
    from torch import Tensor

ROWS, LENGTH = 16, 512


@dataclass(frozen=True)
class Scores:
    """Log-probabilities [tokens, vocab] at every position but the last, and the tokens that followed."""

    log_probs: Tensor
    targets: Tensor

    @property
    def perplexity(self) -> float:
        """Of the text under this model."""
        return float((-self.log_probs.gather(1, self.targets[:, None])).mean().exp())


def teacher_checks(bench: Workbench) -> Iterator[CheckRun]:
    """One check: 8k tokens sampled from the model itself."""
    yield CheckRun("KL against the checkpoint", lambda: _teacher(bench), essential=True)


def _teacher(bench: Workbench) -> Mapping[str, Figure]:
    import torch

    options = bench.options
    truth_model = _load(bench.subject.original, bench, torch.float32)
    text = _text(truth_model, bench)
    truth = original = _scores(truth_model, text)
    low = getattr(torch, options.dtype)
    new_model, own_model = (_load(side, bench, low) for side in (bench.subject.rewritten, bench.subject.original))
    if bench.rounding is not None:
        truth = _scores(bench.rounding.apply(truth_model, new_model), text)
        bench.rounding.apply(own_model, new_model)
    del truth_model
    own, new = (_scores(model, text) for model in (own_model, new_model))
    figures = judged(truth, own, new)
    if bench.rounding is None:
        return figures
    moved = approximate.judged(divergence(original, own), divergence(original, new), divergence(own, new))
    change = new.perplexity / original.perplexity - 1
    return figures | {f"approximate, {name}": value for name, value in moved.items()} | {"perplexity change": change}


def _load(model_class: Any, bench: Workbench, dtype: Any) -> Any:
    return model_class.from_pretrained(bench.options.weights, dtype=dtype).to(bench.options.device).eval()


def _text(model: Any, bench: Workbench) -> Tensor:
    import torch

    vocab = int(model.config.get_text_config().vocab_size)
    start = tokens(bench.seed_for("teacher"), vocab, ROWS, 4, bench.options.device)
    torch.manual_seed(bench.seed_for("text"))
    mask = torch.ones_like(start)
    with torch.no_grad():
        text: Tensor = model.generate(start, attention_mask=mask, do_sample=True, max_new_tokens=LENGTH, top_k=0)
    return text


def _scores(model: Any, text: Tensor) -> Scores:
    import torch

    rows = []
    with torch.no_grad():
        for row in text.split(1):
            rows.append(model(input_ids=row).logits[:, :-1].float().log_softmax(-1).flatten(0, 1).cpu())
    return Scores(torch.cat(rows), text[:, 1:].flatten().cpu())


def judged(truth: Scores, own: Scores, new: Scores) -> dict[str, Figure]:
    """The gate's figures.

    Raises:
        Mismatch: the rewrite moves the model more than the low precision did.
    """
    moved, already = divergence(own, new), divergence(truth, own)
    agreement = _agreement(truth, own), _agreement(truth, new)
    change = abs(new.perplexity / own.perplexity - 1)
    figures: dict[str, Figure] = {
        "bound": bound("kl mean") * float(already.mean()),
        "KL mean": float(moved.mean()),
        "KL mean, original's own": float(already.mean()),
        "KL 99.9%": float(moved.quantile(0.999)),
        "KL 99.9%, original's own": float(already.quantile(0.999)),
        "top-1": agreement[1],
        "top-1, original": agreement[0],
        "perplexity change": change,
        "tokens": int(truth.targets.numel()),
    }
    for name, value, limit in (
        ("mean KL", figures["KL mean"], float(figures["bound"])),
        ("99.9% KL", figures["KL 99.9%"], bound("kl 99.9%") * float(already.quantile(0.999))),
        ("top-1 loss", agreement[0] - agreement[1], bound("top-1 agreement")),
        ("perplexity change", change, bound("perplexity")),
    ):
        if not float(value) <= limit:
            raise Mismatch(f"{name} {value:.3g} > {limit:.3g}", figures)
    return figures


def divergence(first: Scores, second: Scores) -> Tensor:
    """KL(first || second) per token."""
    return (first.log_probs.exp() * (first.log_probs - second.log_probs)).sum(-1).clamp(min=0)


def _agreement(first: Scores, second: Scores) -> float:
    return float((first.log_probs.argmax(-1) == second.log_probs.argmax(-1)).double().mean())
