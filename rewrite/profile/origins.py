"""Where each activity of a step comes from: line, module, operator, work.

The full recording has all of it for one step, the light one has the times of many. They are brought together by the
order of names: the same step launches the same kernels in the same order. Kernels of a replayed graph get what the
same step has without a graph. What has no partner keeps its time and has no line.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rewrite.measure import categories

from .kernel_work import WORK
from .operator_work import Amount, amount_of
from .places import Place, Places
from .trace import Activity, Enclosing, Operator, Trace

LONGEST = 6000
"""Activities of a step that are matched one by one; beyond, only an equal order counts."""


@dataclass(frozen=True)
class Origin:
    """Where an activity comes from."""

    name: str
    place: Place | None = None
    """Of a line in the modeling file."""
    module: str | None = None
    """The innermost module; None outside the model's `forward`."""
    operator: str = ""
    amount: Amount | None = None
    """Of the whole operator, at one of its activities."""


def of_device(trace: Trace, places: Places, amounts: dict[int, Amount]) -> list[Origin]:
    """The origins of a recording's activities, in order."""
    finder = _Finder(trace, places, amounts)
    return [
        finder.origin(activity.name, activity.launch.thread, activity.launch.start)
        if activity.launch is not None and not activity.launch.graph  # the line of a replay is nobody's in it
        else Origin(activity.name)
        for activity in trace.activities
    ]


def of_host(trace: Trace, places: Places, start: float, end: float) -> list[Origin]:
    """The origins of the operators in a span of a recording, in order."""
    finder = _Finder(trace, places, {})
    inside = [operator for operator in trace.operators if start <= operator.start < end]
    found = [finder.origin(operator.name, operator.thread, operator.start, operator) for operator in inside]
    stack: list[int] = []
    for number, operator in enumerate(inside):
        while stack and inside[stack[-1]].end <= operator.start:
            stack.pop()
        if found[number].amount is not None:
            moves = categories.operator_category(operator.name) == categories.COPIES
            for (
                outer
            ) in stack:  # the work of an operator that calls others is theirs, but for what only brings operands
                computes = categories.operator_category(inside[outer].name) != categories.COPIES
                if found[outer].amount is not None and moves and computes:
                    found[number] = replace(found[number], amount=None)
                else:
                    found[outer] = replace(found[outer], amount=None)
        stack.append(number)
    return found


class _Finder:
    def __init__(self, trace: Trace, places: Places, amounts: dict[int, Amount]):
        self._places, self._amounts = places, amounts
        self._marks = Enclosing(mark for mark in trace.marks if places.of(mark.name) is not None)
        self._operators = Enclosing(trace.operators)
        self._counted: set[int] = set()
        self._forward: dict[int, tuple[Place | None, str | None]] = {}
        for operator in trace.operators:
            if operator.sequence is not None and operator.sequence >= 0 and "Backward" not in operator.name:
                found = self._place(operator.thread, operator.start)
                if found[0] is not None:
                    self._forward.setdefault(operator.sequence, found)

    def origin(self, name: str, thread: object, moment: float, own: Operator | None = None) -> Origin:
        stack: tuple[Operator, ...] = self._operators.at(thread, moment)
        place, module = self._place(thread, moment)
        for operator in stack if place is None else ():  # a backward has the place of its forward
            if operator.sequence in self._forward and operator.sequence is not None:
                place, module = self._forward[operator.sequence]
        innermost = own or (stack[-1] if stack else None)
        amount = self._launched(thread, moment)
        if amount is None:
            amount = self._amount((own,) if own is not None else stack, name)
        return Origin(name, place, module, innermost.name if innermost is not None else "", amount)

    def _place(self, thread: object, moment: float) -> tuple[Place | None, str | None]:
        around = [self._places.of(mark.name) for mark in self._marks.at(thread, moment)]
        known = [place for place in around if place is not None and place.function != WORK]
        line = next((place for place in reversed(known) if place.line), None)
        module = next((place.module for place in reversed(known) if place.module != "?"), None)
        if module is None:  # launched after the model's own code has run: what was put off
            launched = [place.module for place in around if place is not None and place.function == WORK]
            module = next((name for name in reversed(launched) if name != "?"), None)
        return line, module

    def _launched(self, thread: object, moment: float) -> Amount | None:
        """The work of one of our kernels, once."""
        for mark in reversed(self._marks.at(thread, moment)):
            place = self._places.of(mark.name)
            if place is not None and place.function == WORK and id(mark) not in self._counted:
                self._counted.add(id(mark))
                return self._amounts.get(place.line)
        return None

    def _amount(self, stack: Sequence[Operator], kernel: str) -> Amount | None:
        """The work of the innermost operator that has one, at the first activity of its kind."""
        for operator in reversed(stack):
            amount = amount_of(operator)
            if amount is None:
                continue
            same = (
                categories.category(kernel) == categories.operator_category(operator.name) or operator.name == kernel
            )
            if id(operator) in self._counted or not (same or len(stack) == 1 or "copy" in operator.name):
                return None
            self._counted.add(id(operator))
            return amount
        return None


class Matcher:
    """Gives the activities of a step, by their names in order, the origins of another recording of that step."""

    def __init__(self, origins: Sequence[Origin]):
        self._origins = origins
        self._names = [origin.name for origin in origins]
        self._known: dict[tuple[str, ...], list[Origin | None]] = {}

    def match(self, names: Sequence[str]) -> list[Origin | None]:
        """Return an origin, or None, for each name."""
        key = tuple(names)
        if key not in self._known:
            self._known[key] = self._matched(key)
        return self._known[key]

    def _matched(self, names: tuple[str, ...]) -> list[Origin | None]:
        if list(names) == self._names:
            return list(self._origins)
        found: list[Origin | None] = [None] * len(names)
        if max(len(names), len(self._names)) <= LONGEST:
            pairs = difflib.SequenceMatcher(None, self._names, names, autojunk=False).get_matching_blocks()
            for theirs, ours, length in pairs:
                found[ours : ours + length] = self._origins[theirs : theirs + length]
        return found


def category_of(origin: Origin | None, name: str, *, operator: bool) -> str:
    """The category of an activity: by its name, and by who asked for it.

    What `generate()` computes outside the model is for choosing the next token. A copy stays one wherever it is: the
    category is what is done, the line is what for.
    """
    found = categories.operator_category(name) if operator else categories.category(name)
    outside = origin is not None and origin.place is None and origin.module is None
    return categories.SAMPLING if outside and found == categories.ELEMENTWISE else found


def label(activity: Activity | Operator) -> str:
    """A kernel's name, short enough to be read: templates and parameters left out, what they do kept."""
    import re

    name = activity.name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    functor = re.search(r"(\w+?)(?:_kernel_cuda|_kernel_impl|CUDAKernelImpl|_kernel)\(", name)
    inner = re.search(r"<[^<>]*?(\w*(?:Functor|Ops|functor)\w*)", name)
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    what = functor[1] if functor and functor[1] not in head else inner[1] if inner else ""
    if "elementwise" in head or "reduce_kernel" in head:
        return f"{what or head} ({'reduction' if 'reduce' in head else 'elementwise'})"
    return head if len(head) <= 64 else f"{head[:52]}…{head[-8:]}"
