"""The first tokens of a model, in torch's own operators while the kernels of its step are compiled.

In a new process no kernel is compiled, and compiling takes longer than a short answer. So the prompt is read as the
original reads it, and tokens are chosen by such steps, one by one, with the cache that the graph will have; beside
them threads compile what the prompt and the step launch. Once they are done, the step is proved and captured behind
the tokens so far, and the call goes on with replays. A call that ends before leaves the threads at it; the next one
goes on alike.

A token of either kind of step takes the same numbers from the random generator, so that a seed gives the tokens that
it gives in a graph; where rounding in another order meets a near-tie they may differ, as those of two shapes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core import backend
from ..decode.policy import policy_of
from ..device.compile_ahead import Compilation
from ..sampling.greedy import choose
from ..sampling.sampling import Sampling

if TYPE_CHECKING:
    from ..decode.step_graph import DecodeGraph


class PlainStep:
    """A step as `Program` has it, by the model's ordinary forward in torch's own operators.

    Args:
        graph: whose cache and state it takes further.
        sampling: what follows the logits.
    """

    def __init__(self, graph: DecodeGraph, sampling: Sampling):
        self._graph, self._sampling = graph, sampling
        self.logits: Tensor | None = None
        """`[B, V]` of the last replay."""
        self.scores: Tensor | None = None

    def replay(self) -> None:
        """Run one step; the cache is told of its token by the caller, as after a replay."""
        with backend.plainly():
            logits = self._graph.call.plain_step()
            self.logits, self.scores = choose(logits, self._graph.state, self._sampling)


def has_head_start(model: Any, graph: DecodeGraph, compilation: Compilation | None) -> bool:
    """Return whether a call begins in torch's own operators: its kernels are not there yet.

    Models with states take the graph from the first token on, and so does what `starts_plainly` rules out.

    Args:
        model: with that setting; None is to begin so wherever steps are captured.
        graph: that the call will have.
        compilation: of its kernels, as far as one was begun.
    """
    wanted: bool | None = model.starts_plainly
    if wanted is False or (wanted is None and not graph.captures):
        return False
    if compilation is not None and compilation.is_done():
        return False
    copies = policy_of(model).before_replay is not None  # of the weights, for kernels: torch's operators read both
    return not (copies or graph.cache.stateful_layers or graph.carried)
