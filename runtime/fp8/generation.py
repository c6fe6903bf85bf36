"""`generate()` through a decode graph for models whose weights are read in 8 bits."""

from __future__ import annotations

from typing import ClassVar

from ..decode.generation import GraphGeneration
from ..decode.policy import GraphPolicy
from .weights import refresh


class Fp8GraphGeneration(GraphGeneration):
    """`GraphGeneration` that knows how products in 8 bits round, and keeps the copies of weights up to date.

    A graph would read a prompt of one token as the first of many. And a bf16 that rounds differently moves an
    activation to its other neighbour in 8 bits: the same prompt with and without a mask differed by 0.11 (H100, 8B
    Llama, random weights), where pads that are seen give 1 and more.
    """

    graph_policy: ClassVar[GraphPolicy] = GraphPolicy(fewest_tokens=2, tolerance=0.5, before_replay=refresh)
