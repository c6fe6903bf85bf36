"""One rank of a verification whose package has a bug planted in it, one after the other; run by torchrun.

python -m torch.distributed.run … tests/verify/rank_bugs.py PACKAGE ORIGINAL OUT [experts]
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.tensor_parallel_checks import SWITCH, Dealt


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def missing_sum(package: str) -> contextlib.AbstractContextManager[None]:
    return replaced(
        runtime_part(package, "tensor_parallel/ranks").Ranks, "_summed", lambda right: lambda self, part: part
    )


def summed_twice(package: str) -> contextlib.AbstractContextManager[None]:
    return replaced(
        runtime_part(package, "tensor_parallel/ranks").Ranks,
        "_summed",
        lambda right: lambda self, part: right(self, right(self, part)),
    )


def bias_on_every_rank(package: str) -> contextlib.AbstractContextManager[None]:
    def finished(self: Any, part: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        bias = self.module._parameters["bias"]
        total: torch.Tensor = self.ranks.sum(part + bias)
        return total if residual is None else residual + total

    return replaced(runtime_part(package, "tensor_parallel/forwards").RowForward, "finished", lambda right: finished)


def heads_of_another_rank(package: str) -> contextlib.AbstractContextManager[None]:
    def changes(right: Any) -> Any:
        def init(self: Any, model: Any) -> None:
            right(self, model)
            heads = {id(m.k_proj): m.head_dim for m in model.modules() if hasattr(m, "k_proj")}
            self._parameters = [
                (m, name, dealt, torch.roll(part, heads[id(m)], 0) if id(m) in heads and name == "weight" else part)
                for m, name, dealt, part in self._parameters
            ]

        return init

    return replaced(runtime_part(package, "tensor_parallel/shards")._Changes, "__init__", changes)


def columns_in_another_order(package: str) -> contextlib.AbstractContextManager[None]:
    def gather(right: Any) -> Any:
        return lambda self, part, size: right(self, part, size).flip(-1)

    return replaced(runtime_part(package, "tensor_parallel/ranks").Ranks, "gather", gather)


def experts_of_another_rank(package: str) -> contextlib.AbstractContextManager[None]:
    def own(right: Any) -> Any:
        return lambda self, index, weights: right(self, (index + self.count) % (2 * self.count), weights)

    return replaced(runtime_part(package, "tensor_parallel/forwards").ExpertsForward, "own", own)


def experts_on_every_rank(package: str) -> contextlib.AbstractContextManager[None]:
    def own(right: Any) -> Any:
        return lambda self, index, weights: (index % self.count, weights)

    return replaced(runtime_part(package, "tensor_parallel/forwards").ExpertsForward, "own", own)


BUGS = (missing_sum, summed_twice, bias_on_every_rank, heads_of_another_rank, columns_in_another_order)
BUGS_OF_EXPERTS = (missing_sum, summed_twice, experts_of_another_rank, experts_on_every_rank)


def main() -> None:
    package, original, out, *plan = sys.argv[1:]
    dist.init_process_group("gloo")
    module, rewritten = (
        loaded_sides.load(loaded_sides.locate(original)),
        loaded_sides.load(loaded_sides.locate(Path(package))),
    )
    main = find_subjects(module, rewritten).main
    name = main.rewritten.__module__.rpartition(".")[0]
    found: dict[str, Any] = {}
    sound = Dealt(main.original, main.rewritten, experts=bool(plan))
    found["sound"] = [check.to_json() for check in sound.checks()]
    whole, ours = sound.whole(), sound.dealt(main.rewritten)
    setattr(main.rewritten, SWITCH, True)
    for bug in BUGS_OF_EXPERTS if plan else BUGS:
        with bug(name):
            found[bug.__name__] = sound.steps(whole, ours).to_json()
    if not plan:
        found["uneven"] = uneven(main.original, main.rewritten)
    found["explain"] = str(runtime_part(name, "core/explanation").explain(ours))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def uneven(original: Any, rewritten: Any) -> str:
    """What `generate` says of heads that two ranks cannot share evenly."""
    dealt = Dealt(original, rewritten, more={"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96})
    model = dealt.dealt(rewritten)
    said = "it generates"
    try:
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4)
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()  # the first rank's folder goes with `dealt`, and the other may still read it
    return said


if __name__ == "__main__":
    main()
