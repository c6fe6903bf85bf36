"""The calls that an execution of a step meets, and what terms cannot show of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from rewrite.analysis.effects import Effect
from rewrite.analysis.terms.computation import NotComputable, subterms
from rewrite.analysis.terms.spelling import Term


@dataclass(frozen=True)
class Called:
    """A call that an execution met, and what it may do besides returning something."""

    term: Term
    effect: Effect

    @property
    def is_quiet(self) -> bool:
        """Whether it is proven to do nothing but return something in evaluation."""
        draws = self.effect.draws and self.term.op != "call"  # modules draw in training
        return not (self.effect.writes or self.effect.stores or self.effect.anything or draws)


def check_calls(calls: Sequence[Called], result: Term, trusted: Container[str] | None = ()) -> None:
    """Refuse what terms cannot show: calls for their effect, calls made twice, arguments written in place.

    Raises:
        NotComputable: saying which call it is.
    """
    loud = [call for call in calls if not call.is_quiet]
    if not loud:
        return
    inside = set(subterms(result))
    seen: set[Term] = set()
    for call in loud:
        if call.term not in inside:
            raise NotComputable(f"{_callee(call.term)} is called for its effect")
        if call.term in seen:
            raise NotComputable(f"{_callee(call.term)} is called twice, and may not do the same twice")
        seen.add(call.term)
        is_trusted = trusted is None or call.term.args[0].value in trusted
        if call.effect.writes and not call.effect.anything and not is_trusted:
            for argument in call.term.args[1:]:
                readers = {term for term in inside if argument in term.args}
                if argument.op in ("parameter", "attribute") or len(readers) > 1:
                    raise NotComputable(f"{_callee(call.term)} writes its argument in place, which is read again")


def _callee(term: Term) -> str:
    return str(term.args[0]) if term.op == "call" else term.op
