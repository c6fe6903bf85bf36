"""A class beside the main one: what is cheap and tells most."""

from __future__ import annotations

from .calls.argument_checks import asked_alone
from .calls.single_forward import forward_parity
from .judging.compare import NotRun
from .judging.verdict import Figure
from .models.model_pair import Workbench
from .state.checkpoints import round_trip
from .state.declarations import built_alike
from .state.embeddings import embeddings_alone
from .state.initial import initial_alike


def class_alone(bench: Workbench) -> dict[str, Figure]:
    """A forward pass, every argument, initial weights, embeddings and a checkpoint round trip, in one check.

    Of a large model the forward pass and the round trip alone.

    Raises:
        Mismatch: one of them differs.
        NotRun: the original's forward pass or its checkpoints do not run.
    """
    figures = forward_parity(bench)
    more = (built_alike, embeddings_alone, asked_alone, initial_alike)
    for part in () if bench.large else more:
        try:
            figures |= part(bench)
        except NotRun as reason:
            figures |= {part.__name__: f"not run: {reason}"}
    return {**figures, **round_trip(bench, bench.base)}
