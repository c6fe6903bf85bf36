"""Models replay a captured graph of their forward where they get the same shapes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_BASE = "CapturedForward"


class CaptureForward(Transform):
    """Let calls of a model replay a graph of its whole forward.

    What it does:
        Puts `CapturedForward` before `PreTrainedModel` among the bases of a file's model classes. In evaluation
        without gradients on a GPU, the second call with arguments of the same shapes captures the forward; later ones
        replay it, and copy the outputs out. Texts of several lengths are padded to buckets that share a graph, where
        that is proved to change nothing.

    Why:
        A forward of one text or image is bound by the host, which launches its kernels one by one: 8.4 ms for 1 × 128
        tokens of BERT-large, of which the device works for less than two (H200).

    What it needs:
        A class that builds on `PreTrainedModel`. At run time: a forward that asks the host for no value of a tensor,
        draws no random numbers, changes neither its arguments nor the model, and returns tensors that it made. A graph
        is kept where it gave the same outputs and took less time; `explain(model)` says where there is none.

    Numerics:
        A replay computes what the capture did. A mask that hides nothing is left out by transformers, except in a
        graph: there attention with a mask rounds in another order. So do operators that run as one kernel in a graph,
        and as torch's own two outside of it. A padded text is summed over more keys, the last of which count nothing.

    Known limits:
        What a forward does besides, to something outside of the model, a replay does not do. Each shape, or bucket of
        texts, has a graph of its own, 24 a model. Calls that are given a cache or asked for one (`use_cache=True`),
        under autocast, torch.compile or hooks run as they did. `REWRITE_FORWARD_GRAPHS=never` switches it off, `exact`
        pads nothing.
    """

    name = "capture_forward"
    summary = "A forward that gets the same shapes again replays a captured graph."
    numerics = Numerics.REORDERED
    stage = Stage.GRAPH
    reasons: ClassVar[Mapping[str, str]] = {
        "own_call": "the class has a `__call__` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class whose base is a `PreTrainedModel` of another file."""
        for info in module.classes.values():
            if _base(info, module) is not None:
                yield Candidate(info.node, info.name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Put the mixin before that base."""
        info = module.classes[candidate.where]
        base = _base(info, module)
        if base is None:
            raise TypeError(f"{info.name} has no PreTrainedModel")
        if "__call__" in info.methods:
            return Skip("own_call")
        bases = []
        for argument in info.node.bases:
            if argument is base:
                comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
                bases.append(cst.Arg(cst.Name(_BASE), comma=comma))
            bases.append(argument)
        new = info.node.with_changes(bases=bases)
        return Found((Edit(info.node, (new,)),), (_BASE,))


def _base(info: ClassInfo, module: Module) -> cst.Arg | None:
    """Return the base that is a `PreTrainedModel` of another file, where the class is not captured yet."""
    if any(module.qualified(base.value).rpartition(".")[2] == _BASE for base in info.node.bases):
        return None
    for base in info.node.bases:
        name = module.qualified(base.value)
        if base.keyword is None and not base.star and name.endswith("PreTrainedModel") and name not in module.classes:
            return base
    return None
