"""Values away from neutral for the arguments of a `forward`, chosen by what their names mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..judging.compare import NotRun
from ..models.inputs import Batch, tokens
from ..models.model_inputs import make, vocabulary
from .scenarios import Setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Arguments = dict[str, Any]
ROWS, LENGTH, PACKED = 2, 12, 5
IDS, DECODER_IDS = "input_ids", "decoder_input_ids"
EMBEDDED = {IDS: "inputs_embeds", DECODER_IDS: "decoder_inputs_embeds"}


@dataclass
class Call:
    """One call in the making: a model, the plain arguments that its class runs on, and a source of random values."""

    model: Any
    setting: Setting
    kind: tuple[str, ...]
    length: int = LENGTH
    rows: int = ROWS
    plain: Arguments = field(init=False)

    def __post_init__(self) -> None:
        device, config = self.setting.device, self.model.config
        made = make(self.kind, config, self.rows, self.setting.seed, self.model.dtype)
        for number, name in enumerate(name for name in (IDS, DECODER_IDS) if name in made):
            first = made[name][:, :1]  # a classifier's end token
            rest = tokens(self.setting.seed + number, vocabulary(config), self.rows, self.length - 1, "cpu")
            made[name] = _concatenated(first, rest)
        self.plain = {name: value.to(device) for name, value in made.items()}

    def random(self, *shape: int, salt: int = 0) -> Tensor:
        """Normal values in the model's dtype."""
        import torch

        generator = torch.Generator().manual_seed(self.setting.seed + salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.setting.device, self.model.dtype)

    def integers(self, high: int, *shape: int, salt: int = 0) -> Tensor:
        """Integers from 0 up to, without, `high`."""
        import torch

        generator = torch.Generator().manual_seed(self.setting.seed + salt)
        return torch.randint(max(high, 1), shape, generator=generator).to(self.setting.device)

    def embedded(self, name: str = IDS) -> Tensor:
        """Random embeddings `[rows, length, width]`, as large as the model's own."""
        width = int(self.model.get_input_embeddings().weight.shape[-1])
        return self.random(self.rows, self.length, width) * 2 * width**-0.5

    def padded(self, side: str = "right", dtype: Any = None) -> Tensor:
        """A mask `[rows, length]` with three tokens of padding in every row but the first, one more in each."""
        import torch

        positions = torch.arange(self.length, device=self.setting.device).expand(self.rows, self.length)
        pads = torch.tensor([[0 if row == 0 else 2 + row] for row in range(self.rows)], device=self.setting.device)
        mask = positions >= pads if side == "left" else positions < self.length - pads
        return mask.to(dtype or torch.long)

    def seen(self, heads: int = 1, rows: int | None = None) -> Tensor:
        """Which keys each query sees `[rows, heads, length, length]`: causal with holes that differ by head."""
        import torch

        rows = self.rows if rows is None else rows
        mask = self.integers(4, rows, heads, self.length, self.length, salt=11) > 0
        own = torch.eye(self.length, dtype=torch.bool, device=self.setting.device)
        return (mask & own.new_ones(self.length, self.length).tril()) | own

    def logits(self) -> Tensor:
        """What the loss of this model is made of: its plain scores `[…, classes]`."""
        result = self.model(**self.plain)
        scores = [value for name, value in result.items() if name.endswith("logits") and hasattr(value, "shape")]
        if not scores:
            raise NotRun(f"{type(result).__name__} has no logits, so nothing says what its labels look like")
        return scores[0]

    @property
    def heads(self) -> int:
        """How many attention heads the text part has."""
        config = self.model.config.get_text_config()
        found = next((getattr(config, name, None) for name in ("num_attention_heads", "num_heads", "n_head")), None)
        if not found:
            raise NotRun("the configuration does not say how many attention heads there are")
        return int(found)


def _concatenated(first: Tensor, rest: Tensor) -> Tensor:
    import torch

    return torch.cat([first, rest], 1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: 0 where a key is seen, the dtype's lowest value elsewhere."""
    import torch

    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def labels(call: Call) -> Tensor:
    """A class for every row of the scores, every fifth ignored where there are rows of them."""
    scores = call.logits()
    found = call.integers(scores.shape[-1], *scores.shape[:-1], salt=5)
    if found.dim() > 1:
        found[:, ::5] = -100
    return found


def several_labels(call: Call) -> Tensor:
    """A share for every class of every row: what regression and several labels at once are trained on."""
    scores = call.logits()
    if scores.dim() != 2:
        raise NotRun("only a score a row can be trained on shares")
    return call.integers(2, *scores.shape, salt=6).to(scores.dtype)


def restarted(call: Call) -> Tensor:
    """Positions of two sequences in each row: the second begins again at 0."""
    import torch

    parts = [torch.arange(PACKED), torch.arange(call.length - PACKED)]
    return torch.cat(parts).expand(call.rows, -1).contiguous().to(call.setting.device)


def packed(call: Call) -> Arguments:
    """Everything that says where packed sequences begin."""
    import torch

    ends = torch.tensor([0, PACKED, call.length], dtype=torch.int32, device=call.setting.device)
    longest = call.length - PACKED
    numbers = torch.tensor([0] * PACKED + [1] * longest, dtype=torch.int32, device=call.setting.device)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": numbers.expand(call.rows, -1),
    }


def as_batch(call: Call, side: str = "left") -> Batch:
    """The plain ids with padding at a side, and the positions that go with it."""
    mask = call.padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Batch(call.plain[IDS].masked_fill(mask == 0, 0), mask, positions)


def without(arguments: Arguments, names: Iterable[str]) -> Arguments:
    """The arguments but those of these names."""
    return {name: value for name, value in arguments.items() if name not in set(names)}


Value = Callable[[Call], Any]
