"""Greedy tokens of the rewritten model against the original's, where only a near-tie excuses a difference.

Two runs of the original are compared with each other first: token by token through its cache, and the same tokens fed
at once. The difference of their logits is what rounding does to this model in this precision, measured on the very
prompts. Then the original is fed what the rewritten model generated, and at every token, also after a first
difference, the token chosen must be the original's best or less than twice that noise below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..verify.tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor

    from .contenders import Contender

NOISE_QUANTILE = 0.99
"""Of the tokens' largest logit differences. Where tokens are routed to experts the very largest is a flipped choice."""


@dataclass(frozen=True)
class Parity:
    """The outcome. `noise` and `deficit` are differences of logits; `first` is where rows first differ, or -1."""

    passed: bool
    rows: int
    tokens: int
    noise: float
    largest_noise: float
    deficit: float
    beyond: int
    near_ties: int
    first: tuple[int, ...]

    @property
    def summary(self) -> str:
        """One line."""
        apart = sum(step >= 0 for step in self.first)
        same = f"{self.rows - apart} of {self.rows} rows the same"
        near = f"{self.near_ties} of {self.rows * self.tokens} tokens at a near-tie"
        beyond = f", {self.beyond} BEYOND" if self.beyond else ""
        return f"{same}, {near}{beyond} (noise {self.noise:.2g}, largest deficit {self.deficit:.2g})"


@dataclass(frozen=True)
class Truth:
    """What the original generates: `tokens` `[R, n]`, and the size of its rounding on them."""

    prompts: Tensor
    tokens: Tensor
    noise: float
    largest_noise: float


def truth(model: Any, prompts: Tensor, new: int, rows_at_once: int = 16) -> Truth:
    """Let the original generate `new` tokens after `prompts` `[R, L]` and measure its noise."""
    import torch

    found, differences = [], []
    with torch.no_grad():
        for rows in prompts.split(rows_at_once):
            settings = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
            output = model.generate(rows, attention_mask=torch.ones_like(rows), output_logits=True, **settings)
            tokens = output.sequences[:, rows.shape[1] :]
            steps = output.logits
            del output
            for row, at_once in _forced(model, rows, tokens):
                stepped = torch.stack([step[row] for step in steps])
                differences.append((stepped.float() - at_once).abs().amax(-1))
            found.append(tokens)
    noise = torch.cat(differences).double()
    return Truth(prompts, torch.cat(found), float(noise.quantile(NOISE_QUANTILE)), float(noise.max()))


def compare(model: Any, expected: Truth, given: Tensor) -> Parity:
    """Compare generated tokens `[R, n]` with the original `model`'s."""
    import torch

    prompts, tokens = expected.prompts, expected.tokens
    if given.shape != tokens.shape:
        return Parity(False, *tokens.shape, expected.noise, expected.largest_noise, float("inf"), -1, 0, ())
    deficits = []
    with torch.no_grad():
        for row, logits in _forced(model, prompts, given):
            chosen = logits.gather(1, given[row][:, None])[:, 0]
            deficits.append(logits.amax(-1) - chosen)
    deficit = torch.stack(deficits)
    allowed = bound("near tie") * expected.noise
    beyond = int((~(deficit <= allowed)).sum())
    return Parity(
        beyond == 0,
        *tokens.shape,
        expected.noise,
        expected.largest_noise,
        float(deficit.max()),
        beyond,
        int(((deficit > 0) & (deficit <= allowed)).sum()),
        tuple(first_differences(tokens, given)),
    )


def generated(side: Contender, prompts: Tensor, new: int, batch: int) -> Tensor:
    """Tokens `[R, new]` of a side that takes `batch` rows at once."""
    import torch

    with torch.no_grad():
        return torch.cat([side.generate(rows, new) for rows in prompts.split(batch)])


def first_differences(expected: Tensor, given: Tensor) -> Sequence[int]:
    """The first step at which each row differs, -1 where none does."""
    different = (expected != given).cpu()
    return [int(row.int().argmax()) if bool(row.any()) else -1 for row in different]


def _forced(model: Any, prompts: Tensor, tokens: Tensor) -> Any:
    """For each row, the fp32 logits `[n, V]` that `tokens` `[R, n]` are chosen from when everything is fed at once."""
    import torch

    new = tokens.shape[1]
    for row in range(prompts.shape[0]):
        full = torch.cat([prompts[row], tokens[row]])[None, :-1]
        yield row, model(input_ids=full, use_cache=False, logits_to_keep=new).logits[0].float()
