"""What the graphs of a model have to know of its operators: its class says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class GraphPolicy(NamedTuple):
    """How a model is read in graphs."""

    fewest_tokens: int = 1
    """Of a prompt in a graph; more where a single token is computed in another way than one of many."""
    before_replay: Callable[[nn.Module], None] | None = None
    """Is given the model before its graphs are replayed, maybe with other weights: a replay runs no Python."""


def policy_of(model: Any) -> GraphPolicy:
    """Return what the class of a model says as `graph_policy`, or what holds for most."""
    policy = getattr(type(model), "graph_policy", None)
    return policy if isinstance(policy, GraphPolicy) else GraphPolicy()
