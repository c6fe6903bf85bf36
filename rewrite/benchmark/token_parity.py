"""Greedy tokens of the rewritten model against the original's, where only a near-tie excuses a difference.

Two runs of the original are compared with each other first: token by token through its cache, and the same tokens fed
at once. How far the difference of the two best logits moves between them is what rounding does to a choice of this
model in this precision, measured on the very prompts. Then the original is fed what the rewritten model generated, and
at every token, also after a first difference, the token chosen must be the original's best or less than twice that
noise below it. Random weights make flat logits, so near-ties are common: the rewritten model must not choose another
token more than twice as often as the original's two runs do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rewrite.verify.judging.tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor

    from rewrite.measure.contender import Contender

CHANCE = 4
"""Standard deviations of a count that are left to chance."""
RARE = 0.02
"""Share of the tokens below which the original's own count says nothing: a short text may hold no near-tie."""


@dataclass(frozen=True)
class Parity:
    """The outcome.

    `noise` is the largest movement of the original's leading gap between its own runs, `noise_rms` its RMS; `deficit`
    is how far below the original's best logit a chosen token was at most. `different` counts tokens that are not the
    original's best, `different_own` those of the original's own run token by token; `beyond` counts deficits that the
    noise does not explain. `first` is the step at which each row differs from what the original generates, or -1.
    """

    passed: bool
    rows: int
    tokens: int
    noise: float
    noise_rms: float
    deficit: float
    beyond: int
    different: int
    different_own: int
    first: tuple[int, ...]

    @property
    def summary(self) -> str:
        """One line."""
        apart = sum(step >= 0 for step in self.first)
        parts = [f"{self.rows - apart} of {self.rows} rows the same"]
        total = self.rows * self.tokens
        parts.append(
            f"{self.different} of {total} tokens another of a near-tie (its own two runs: {self.different_own})"
        )
        if self.beyond:
            parts.append(f"{self.beyond} BEYOND THE NOISE")
        return f"{', '.join(parts)}; noise {self.noise:.2g}, largest deficit {self.deficit:.2g}"


@dataclass(frozen=True)
class Truth:
    """What the original generates: `tokens` `[R, n]`, and its rounding on them; `mask` where prompts are padded."""

    prompts: Tensor
    mask: Tensor | None
    tokens: Tensor
    noise: float
    noise_rms: float
    different: int


def truth(model: Any, prompts: Tensor, new: int, mask: Tensor | None = None, rows_at_once: int = 16) -> Truth:
    """Let the original generate `new` tokens after `prompts` `[R, L]`, and measure its noise.

    A `mask` `[R, L]` says which prompts are padded on the left. The tokens are fed at once without the padding.
    """
    import torch

    found, movements, different = [], [], 0
    real = torch.ones_like(prompts) if mask is None else mask
    with torch.no_grad():
        for rows, valid in zip(prompts.split(rows_at_once), real.split(rows_at_once), strict=True):
            settings = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
            output = model.generate(rows, attention_mask=valid, output_logits=True, **settings)
            tokens = output.sequences[:, rows.shape[1] :]
            steps = output.logits
            del output
            for row, at_once in _forced(model, rows, tokens, valid):
                stepped = torch.stack([step[row] for step in steps]).float()
                best = stepped.topk(2).indices
                leading = stepped.gather(1, best) - at_once.gather(1, best)
                movements.append((leading[:, 0] - leading[:, 1]).abs())
                different += int((at_once.argmax(-1) != tokens[row]).sum())
            found.append(tokens)
    noise = torch.cat(movements).double()
    rms = float(noise.square().mean().sqrt())
    return Truth(prompts, mask, torch.cat(found), float(noise.max()), rms, different)


def compare(model: Any, expected: Truth, given: Tensor) -> Parity:
    """Compare generated tokens `[R, n]` with the original `model`'s."""
    import torch

    rows, tokens = expected.tokens.shape
    if given.shape != expected.tokens.shape:
        return Parity(False, rows, tokens, expected.noise, expected.noise_rms, float("inf"), -1, -1, -1, ())
    deficits = []
    with torch.no_grad():
        for row, logits in _forced(model, expected.prompts, given, expected.mask):
            chosen = logits.gather(1, given[row][:, None])[:, 0]
            deficits.append(logits.amax(-1) - chosen)
    deficit = torch.stack(deficits).double()
    beyond = int((~(deficit <= bound("near tie") * expected.noise)).sum())
    different = int((deficit > 0).sum())
    usual = bound("near ties taken") * max(expected.different, RARE * rows * tokens)
    return Parity(
        beyond == 0 and different <= usual + CHANCE * (usual + 1) ** 0.5,
        rows,
        tokens,
        expected.noise,
        expected.noise_rms,
        float(deficit.max()),
        beyond,
        different,
        expected.different,
        tuple(first_differences(expected.tokens, given)),
    )


def generated(side: Contender, prompts: Tensor, new: int, batch: int, mask: Tensor | None = None) -> Tensor:
    """Tokens `[R, new]` of a side that takes `batch` rows at once."""
    import torch

    masks = [None] * len(prompts.split(batch)) if mask is None else mask.split(batch)
    with torch.no_grad():
        return torch.cat([side.generate(rows, new, m) for rows, m in zip(prompts.split(batch), masks, strict=True)])


def first_differences(expected: Tensor, given: Tensor) -> Sequence[int]:
    """The first step at which each row differs, -1 where none does."""
    different = (expected != given).cpu()
    return [int(row.int().argmax()) if bool(row.any()) else -1 for row in different]


def _forced(model: Any, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """For each row, the fp32 logits `[n, V]` that `tokens` `[R, n]` are chosen from when everything is fed at once."""
    import torch

    new = tokens.shape[1]
    for row in range(prompts.shape[0]):
        prompt = prompts[row] if mask is None else prompts[row][mask[row].bool()]
        full = torch.cat([prompt, tokens[row]])[None, :-1]
        yield row, model(input_ids=full, use_cache=False, **keeping(model, new)).logits[0, -new:].float()


def keeping(model: Any, count: int) -> dict[str, int]:
    """The argument that leaves out all logits but those of the last `count` positions, where the model has it."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if known else {}
