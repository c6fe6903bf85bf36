"""What the ranks of a model have agreed upon before a call generates, so that all replay the same number of steps."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..tensor_parallel.ranks import Ranks
from .eligibility import Call, keeps_cache


@dataclass(frozen=True)
class Plan:
    """How a call runs on every rank."""

    reason: str | None
    """Why the loop cannot take it, a key of `loop_reasons.REASONS`."""
    streams: bool
    """Whether tokens are wanted soon, here or on another rank."""
    keeps_cache: bool
    """Whether the cache is wanted afterwards, here or on another rank."""
    ranks: Any = None
    """The `Ranks` that share the model; None for a model of one process."""

    def watched(self) -> AbstractContextManager[None]:
        """Look for ranks that die."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.peers.watched()

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for the device, as long as all ranks live.

        Raises:
            RankDied: if one does not.
        """
        if self.ranks is None:
            event.synchronize()
        else:
            self.ranks.peers.wait(event)

    def share_randomness(self) -> None:
        """Let all ranks draw the same."""
        if self.ranks is not None:
            self.ranks.share_randomness()


def planned(call: Call, ranks: Any, reason: str | None) -> Plan:
    """Return how a call runs, as all ranks agree.

    Args:
        call: its arguments.
        ranks: that share the model.
        reason: why this rank cannot take the loop.

    Raises:
        DifferentCalls: if the ranks were given different calls.
    """
    streams, keeps = call.streamer is not None, keeps_cache(call)
    if isinstance(ranks, Ranks):
        return _agreed(call, ranks, Plan(reason, streams, keeps))
    return Plan(reason, streams, keeps)


def _agreed(call: Call, ranks: Ranks, own: Plan) -> Plan:
    """Return what all ranks do where this one has a plan of its own."""
    reason = own.reason
    values = {
        "fits": reason is None,
        "streams": own.streams,
        "keeps the cache": own.keeps_cache,
        "the batch size": call.input_ids.shape[0],
        "the length of the prompt": call.input_ids.shape[1],
        "the number of tokens": call.steps if reason is None else 0,
        "do_sample": bool(call.config.do_sample),
    }
    same = ["the batch size", "the length of the prompt", "do_sample"]
    found = ranks.agree({name: int(value) for name, value in values.items()}, same)
    if not all(found["fits"]):
        reason = reason or "another_rank"
    return Plan(reason, any(found["streams"]), any(found["keeps the cache"]), ranks)
