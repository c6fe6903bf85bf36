"""`generate()` through a decode graph for models whose weights are read in 8 bits."""

from __future__ import annotations

from typing import ClassVar

from ..decode.policy import GraphPolicy
from ..generate.generation import GraphGeneration
from .fp8_weights import refresh


class Fp8GraphGeneration(GraphGeneration):
    """`GraphGeneration` that keeps the copies of weights up to date.

    A graph would read a prompt of one token as the first of many.
    """

    graph_policy: ClassVar[GraphPolicy] = GraphPolicy(fewest_tokens=2, before_replay=refresh)
