"""Statements that stand around the places that transforms look for: harmless ones, and ones that write what is read.

Templates name what they need: `{s}` and `{r}` are tensors of one shape, `{t}` is a local to assign, `{p}` and `{o}`
are modules. What else they name is a local that the method starts with, or comes from `SUPPORT`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st

Lines = list[str]
Draw = Callable[[st.SearchStrategy[str]], str]

SUPPORT = (
    ("imports", "functools", "import functools"),
    ("imports", "math.", "import math"),
    ("imports", "random", "import random"),
    ("before", "bump", "def bump(t):\n    t.mul_(1.5)\n    return t"),
    ("before", "same", "def same(t):\n    return t"),
    ("before", "fresh", "def fresh(t):\n    return t * 2"),
    ("before", "clip", "class Clip(nn.Module):\n    def forward(self, t):\n        return t.clamp_(-1, 1)"),
    ("init", "self.relu", "self.relu = nn.ReLU(inplace=True)"),
    ("init", "self.soft", "self.soft = nn.Tanh()"),
    ("init", "self.drop", "self.drop = nn.Dropout(0.5)"),
    ("init", "self.clip", "self.clip = Clip()"),
    ("init", "self.count", "self.count = 0"),
    ("init", "self.next", "self.count = 0"),
    ("init", "self.log", "self.log = []"),
    ("methods", "self.bump(", "def bump(self, t):\n    return t.mul_(1.5)\n"),
    ("methods", "self.bump_kept", "def bump_kept(self):\n    self.kept.mul_(1.5)\n"),
    ("methods", "self.next", "def next(self):\n    self.count += 1\n    return self.count\n"),
    ("methods", "self.bumped", "@property\ndef bumped(self):\n    self.kept.add_(1)\n    return 1.0\n"),
)
"""What statements may name: the hole that it goes into, the word that asks for it, and its text."""


def supported(holes: dict[str, str]) -> dict[str, str]:
    """Return the holes of a case with all that their texts name."""
    text = "\n".join(holes.values())
    for hole, word, snippet in SUPPORT:
        if word in text and snippet not in holes.get(hole, ""):
            holes[hole] = f"{snippet}\n{holes[hole]}" if holes.get(hole) else snippet
    return holes


PURE = (
    "{t} = {s} + {r}",
    "{t} = {s} * {r}",
    "{t} = {s}",
    "{t} = {s}[:]",
    "{t} = {s}.tanh()",
    "{t} = {s}.clone()",
    "{t} = fresh({s})",
    "{t} = same({s})",
    "{t} = self.soft({s})",
    "{t} = {s} if flag else {r}",
    "{t} = (lambda v: v + {s})({r})",
    "{t} = sum(v for v in ({s}, {r}))",
    "{t} = [v * 2 for v in ({s}, {r})][0]",
    "{t}, z = {s}, {r}",
    "{t} = z = {s}",
    "n = {s}.shape[0]",
    "self.log.append({s}.shape[0])",
    "self.kept = {s}",
    "xs.append({s})",
    "d['k'] = {s}",
    "{t} = d.get('k', {s})",
    "{t} = xs[0]",
    "{t} = {s}  # why",
    "del z",
    "z = {s}",
)
WRITES = (
    "{s} += 1",
    "{s} *= 1.5",
    "{s}.mul_(1.5)",
    "{s}[0] = 0",
    "{s}[..., 0] += 1",
    "{s}.data.mul_(1.5)",
    "{s}.view(-1)[0] = 3",
    "{s}.detach().add_(1)",
    "torch.add({s}, 1, out={r})",
    "F.relu({s}, inplace=True)",
    "F.relu({s}, True)",
    "torch.relu_({s})",
    "{t} = self.relu({s})",
    "{t} = self.clip({s})",
    "self.relu({s})",
    "bump({s})",
    "{t} = bump({s})",
    "self.bump({s})",
    "self.bump_kept()",
    "{t} = {s} * self.bumped",
    "self.kept.mul_(1.5)",
    "xs[0].mul_(1.5)",
    "xs[-1] += 1",
    "d['k'].add_(1)",
    "exec('{s}.mul_(1.5)')",
    "getattr({s}, 'mul_')(1.5)",
    "list(map(bump, [{s}]))",
    "functools.partial(bump, {s})()",
    "nn.init.ones_({s})",
    "torch._foreach_mul_([{s}], 1.5)",
)
ORDER = (
    "{t} = {s} + torch.rand_like({s})",
    "{t} = self.drop({s})",
    "{t} = F.dropout({s}, 0.5, True)",
    "{t} = {s} * random.random()",
    "{t} = {s} * self.next()",
    "{t} = xs.pop()",
    "xs.reverse()",
    "xs.insert(0, {s})",
    "torch.manual_seed(3)",
)
SCOPE = (
    "def f():\n    {s}.mul_(1.5)\nf()",
    "def f():\n    nonlocal {s}\n    {s} = {r} + 1\nf()",
    "def f():\n    return {s} + {r}\n{t} = f()",
    "late = lambda: {s} * 1",
    "{t} = late()",
    "for {s} in ({r}, {r} + 1):\n    pass",
    "match {r}:\n    case torch.Tensor() as {s}:\n        pass",
    "{t} = ({s} := {r} + 1)",
    "(({s}, z), w) = ({r} * 2, 1), 2",
    "try:\n    {t} = {s} + 1\nfinally:\n    {r}.mul_(1.5)",
    "with torch.no_grad():\n    {t} = {s} * 2",
    "class Local:\n    {s}.mul_(1.5)",
)
LEAVE = (
    "if flag:\n    return {s}, {r}",
    "if flag:\n    raise ValueError",
    "assert flag",
    "if n > 2:\n    return {s}",
)
WEIGHTS = (
    "self.{p}.weight.data.mul_(1.5)",
    "with torch.no_grad():\n    self.{p}.weight.mul_(1.5)",
    "nn.init.constant_(self.{p}.weight, 0.3)",
    "self.{p}.reset_parameters()",
    "self.{p} = self.{o}",
    "setattr(self, '{p}', self.{o})",
    "self._modules['{p}'] = self.{o}",
    "self.{p}.weight = nn.Parameter(self.{o}.weight.data * 1.5)",
    "self.{p}.forward = lambda v: v * 2",
    "self.apply(lambda part: part.weight.data.mul_(1.1) if part is self.{p} else None)",
)
LAYOUT = (
    "{t} = {s}.view(-1).view({s}.shape)",
    "n = {s}.stride(0)",
    "{t} = {s} if {s}.is_contiguous() else {s} * 2",
    "{s}.reshape(-1)[0] = 2",
    "{s}.flatten()[1] = 2",
    "{t} = {s}.as_strided({s}.shape, {s}.contiguous().stride())",
)
COMPOUND = (
    "if flag:",
    "if not flag:",
    "for _ in range(2):",
    "with torch.no_grad():",
    "for {s} in ({s}, {r}):",
    "while flag:",
    "if n is not None:",
    "try:",
)


@dataclass(frozen=True)
class Names:
    """What templates are filled with."""

    sources: Sequence[str]
    targets: Sequence[str]
    modules: Sequence[str] = ()
    layout: bool = True
    owner: bool = True
    """Whether there is a `self`."""

    def templates(self) -> tuple[str, ...]:
        """Return the statements that these names can fill; those that change nothing twice as often."""
        weights = WEIGHTS if self.modules else ()
        every = (*PURE, *PURE, *WRITES, *ORDER, *SCOPE, *LEAVE, *weights, *(LAYOUT if self.layout else ()))
        return every if self.owner else tuple(template for template in every if "self." not in template)


def filled(draw: Draw, template: str, names: Names) -> Lines:
    """Return a template with names for its holes."""
    modules = names.modules or ("relu",)
    holes = {"s": names.sources, "r": names.sources, "t": names.targets, "p": modules, "o": modules}
    chosen = {hole: draw(st.sampled_from(among)) for hole, among in holes.items() if f"{{{hole}}}" in template}
    return template.format(**chosen).splitlines()


@st.composite
def noise(draw: Draw, names: Names) -> Lines:
    """Return the lines of one statement, simple or compound."""
    templates = st.sampled_from(names.templates())
    if draw(st.integers(0, 7)):
        return filled(draw, draw(templates), names)
    head = filled(draw, draw(st.sampled_from(COMPOUND)), names)
    body = [line for _ in range(draw(st.integers(1, 2))) for line in filled(draw, draw(templates), names)]
    tail = ["finally:", "    pass"] if head == ["try:"] else []
    return [*head, *(f"    {line}" for line in body), *(["    break"] if head == ["while flag:"] else []), *tail]


@st.composite
def around(draw: Draw, site: Lines, names: Names, most: int = 2) -> Lines:
    """Return the statements of a site with others before, between and after."""
    lines: Lines = []
    for statement in ("", *site):
        lines += statement.splitlines()
        for _ in range(draw(st.integers(0, most))):
            lines += draw(noise(names))
    return lines
