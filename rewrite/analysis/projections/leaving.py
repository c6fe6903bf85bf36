"""Whether a projection's result leaves a `forward` as it is: whoever called that may rely on how it lies in memory.

What only this file reads is looked at by `strides`. Outside, a result of `nn.Linear` is contiguous, and a slice of a
larger product is not: it is copied where it leaves, unless something was computed from it before.
"""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.effects import Scope, known
from rewrite.analysis.projections.linear_calls import LinearCall
from rewrite.analysis.projections.strides import REORDERS, Follower, Tracked


def leaves_forward(scope: Scope, call: LinearCall) -> bool:
    """Return whether the result of a projection, or a view of it, may be returned by a method `forward`."""
    follower = _Leaving()
    follower.expression(call.node, Tracked(scope, call))
    return follower.leaves


class _Leaving(Follower):
    """Follows views and nothing else, and minds nobody who reads them."""

    def __init__(self) -> None:
        super().__init__(split_alike=True)
        self.leaves = False

    def notices(self, text: str) -> None:
        """Leave what is read in this file to `strides`."""

    def _attribute(self, above: cst.Attribute, what: Tracked) -> None:
        call = what.scope.module.parent(above)
        if isinstance(call, cst.Call) and call.func is above:
            self._operation(above.attr.value, call, above.attr, what)
        elif above.attr.value in REORDERS or above.attr.value in ("data", "real", "imag"):
            self.expression(above, what.other())

    def _operation(self, name: str, call: cst.Call, spelled: cst.Name | None, what: Tracked) -> None:
        views = name in known.VIEWS or name in known.RANDOM or name.endswith("_")
        if views and name != "contiguous":  # a copy of a slice lies as what is copied there
            self.expression(call, what.other())

    def _returned(self, what: Tracked) -> None:
        if what.entry is None and what.scope.function.name.value == "forward":
            self.leaves = True
        elif not self.leaves:
            super()._returned(what)
