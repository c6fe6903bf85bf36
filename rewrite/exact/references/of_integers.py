"""References of kernels whose results are tokens, slots and places."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs


def _starts(a: Arguments) -> Tensor:
    return torch.arange(a.values["starts_ptr"].shape[0]) * 5 % 13


_PLACES = {"position_ptr": lambda a: torch.tensor(100), "starts_ptr": _starts}


def _slot_lists(a: Arguments) -> Outputs:
    rows = [torch.arange(int(start), 101) + row * a.capacity for row, start in enumerate(a.starts_ptr)]
    slots, ends = torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0)
    return {"slots_ptr": torch.cat((slots, torch.zeros(a.slots_ptr.shape[0] - len(slots)))), "ends_ptr": ends}


def _page_tables(a: Arguments) -> Outputs:
    first = torch.arange(a.starts_ptr.shape[0]) * a.row_size + a.starts_ptr
    table = first[:, None] + torch.arange(a.pages) * a.PAGE
    return {"table_ptr": table, "lengths_ptr": a.position_ptr + 1 - a.starts_ptr}


def _best_of_block(a: Arguments) -> Outputs:
    rows = a.logits_ptr.view(-1, a.vocabulary)
    blocks = [block.max(-1) for block in rows.split(a.BLOCK, -1)]
    best = torch.stack([value for value, _ in blocks], -1)
    return {
        "best_ptr": best,
        "index_ptr": torch.stack([at + number * a.BLOCK for number, (_, at) in enumerate(blocks)], -1),
    }


def _take_best(a: Arguments) -> Outputs:
    block = a.best_ptr.view(a.rows, a.blocks).argmax(-1, keepdim=True)
    token = a.index_ptr.view(a.rows, a.blocks).gather(-1, block)[:, 0].long()
    token = torch.where(a.finished_ptr, a.pad_ptr, token)
    sequence = a.sequence_ptr
    sequence[:, a.position_ptr + 1] = token[:, None]
    ended = a.finished_ptr | (token[:, None] == a.eos_ptr).any(-1)
    return {
        "finished_ptr": ended, "position_ptr": a.position_ptr + 1, "position_ids_ptr": a.position_ids_ptr + 1,
        "input_ids_ptr": token, "sequence_ptr": sequence,
    }  # fmt: skip


def _text(a: Arguments) -> Tensor:
    rows, slots = a.values["text_ptr"].shape
    return (torch.arange(rows)[:, None] * 11 + torch.arange(slots) ** 2) % 9


def _look_up(a: Arguments) -> Outputs:
    """The longest match first, and of several the leftmost, as `generate()` looks for candidates."""
    drafts, drafted, matched = a.drafts_ptr.clone(), a.drafted_ptr.clone(), a.matched_ptr.clone()
    last = int(a.position_ptr)
    for row, start in enumerate(a.starts_ptr.tolist()):
        text = a.text_ptr[row, : last + 1].tolist()
        length, at = next(
            ((n, at) for n in range(a.NGRAM, 0, -1) for at in range(start + n - 1, last)
             if text[at - n + 1 : at + 1] == text[last - n + 1 : last + 1]), (0, 0),
        )  # fmt: skip
        draft = text[at + 1 : at + 1 + a.TOKENS] if length else []
        ends = [place for place, token in enumerate(draft) if token in a.eos_ptr.tolist()]
        matched[row], drafted[row] = length, min([len(draft), *ends])
        drafts[row, : a.TOKENS] = torch.tensor(draft + [0] * (a.TOKENS - len(draft)))
    return {"drafts_ptr": drafts, "drafted_ptr": drafted, "matched_ptr": matched}


def _zeros(a: Arguments) -> Tensor:
    return torch.tensor(0)


_TAKEN = {
    "index_ptr": lambda a: torch.arange(a.rows * a.blocks) * 3 + 5,
    "eos_ptr": lambda a: torch.tensor([5, 8]),
    "pad_ptr": lambda a: torch.tensor(1),
    "position_ptr": lambda a: torch.tensor(20),
    "position_ids_ptr": _zeros,
    "input_ids_ptr": _zeros,
    "sequence_ptr": _zeros,
}
_LOOKED_UP = _PLACES | {
    "text_ptr": _text,
    "eos_ptr": lambda a: torch.tensor([4, 8]),
    **{f"{name}_ptr": lambda a: torch.tensor(-5) for name in ("drafts", "drafted", "matched")},
}
_LISTS = {f"{name}_ptr": lambda a: torch.tensor(-5) for name in ("slots", "ends", "table", "lengths")}
INTEGERS = (
    Reference("slot_lists", _slot_lists, _PLACES | _LISTS),
    Reference("page_tables", _page_tables, _PLACES | _LISTS),
    Reference("best_of_block", _best_of_block, {"index_ptr": lambda a: torch.tensor(-5)}),
    Reference("take_best", _take_best, _TAKEN),
    Reference("look_up", _look_up, _LOOKED_UP),
)
