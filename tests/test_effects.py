"""The analysis of effects: what may be moved past what, and what is said where that cannot be proven."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.effects import Scope, between, effects_of, why_not_move
from rewrite.analysis.effects.identity import Identity
from rewrite.analysis.tree.module import Module, walk

HEADER = """\
import math
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN


def scaled(x, by):
    return x * by


def halve(x):
    x.mul_(0.5)
    return x


def keep(x, into=[]):
    into.append(x)
    return x


def stepwise(x):
    yield x


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        x = x.float()
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Counting(Norm):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Subject(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.own_norm = Norm(8)
        self.counting = Counting(8)
        self.act = ACT2FN[config.hidden_act]
        self.relu = nn.ReLU(inplace=True)
        self.silu = nn.SiLU()
        self.dropout = nn.Dropout(0.1)
        self.maybe = nn.LayerNorm(8) if config.norm else nn.Identity()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.given = config.module
        self.buffer = torch.zeros(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.op = F.silu

    @property
    def counter(self):
        self.count += 1
        return self.count

    def helper(self, x):
        y = x + 1
        y.mul_(2)
        return self.norm(y)

    def writer(self, x):
        self.buffer.add_(x)

    def rebinder(self):
        self.k_proj = nn.Linear(8, 8)

    def recursive(self, x):
        return self.recursive(x)

    def forward(self, x, other, flag, items, cache, act):
        view = x.view(-1)
        fresh = x - 1
        module = self.k_proj
        called = []
        called_by = act(x)
{lines}
        result = {moved}
"""

PROVEN = (
    "pass",
    "y = other + 1",
    "y = x.view(-1, 2).transpose(0, 1)",
    "y = torch.cat((x, other), dim=-1)",
    "y = F.softmax(x, dim=-1, dtype=torch.float32)",
    "y = self.norm(x)",
    "y = self.own_norm(x)",
    "y = self.act(x)",
    "y = self.silu(x)",
    "y = self.maybe(x)",
    "y = self.blocks(x)",
    "y = self.dropout(x)",
    "torch.manual_seed(0)",
    "y = math.sqrt(8)",
    "y = self.helper(x)",
    "y = scaled(x, by=2)",
    "y = self.op(x)",
    "b, s, _ = x.shape",
    "fresh.mul_(2)",
    "y = other.clip(0, 1) if other.is_floating_point() else other.mT",
    "fresh += 1",
    "fresh[0] = 0",
    "y = torch.matmul(x, other) * 2\ny += other\ny[0] = other[0]\ny.zero_()",
    "called.append(fresh)",
    "for i in range(3): y = x[i]",
    "for i, layer in enumerate(self.layers): y = i",
    "with torch.no_grad(): y = x * 2",
    "if flag: y = other",
    "y = torch.relu(x)",
    "y = F.relu(x, inplace=False)",
    "y = [len(item) for item in (x, other)]",
    "y = getattr(other, 'shape', None)",
    "y = x.to(torch.float32)",
    "y = self.buffer.to(x.device)",
    "def inner(t): return t.view(-1)\ny = inner(x)",
    "y = [*x.shape[:-1], 8]",
    "y = lambda t: t.mul_(2)",
    "other = y = x",
)


def scope_of(lines: str, moved: str = "self.q_proj(x)", header: str = HEADER, extra: str = ""):
    body = "\n".join(f"        {line}" for line in lines.split("\n"))
    module = Module(cst.parse_module(header.replace("{lines}", body).replace("{moved}", moved) + extra))
    owner = module.classes["Subject"]
    function = owner.methods["forward"]
    return module, effects_of(module).scope(function, owner), function


def may_move(scope: Scope, expression: cst.BaseExpression, up_to: cst.BaseStatement) -> str | None:
    """Return None if `expression` may be evaluated right before the statement `up_to`, else what was missing."""
    past = between(scope, up_to, expression)
    return "it stands in another block" if past is None else why_not_move(scope, scope.of(expression), past)


def asked(lines: str, moved: str = "self.q_proj(x)", **more: str) -> str | None:
    _, scope, function = scope_of(lines, moved, **more)
    statements = function.body.body
    value = next(n.value for n in walk(statements[-1]) if isinstance(n, cst.Assign))
    return may_move(scope, value, statements[5])


@pytest.mark.parametrize("lines", PROVEN)
def test_a_projection_may_move_past(lines: str) -> None:
    assert asked(lines) is None


REFUSED = {
    # written in place
    "x.mul_(2)": "`x` is written in place",
    "view.mul_(2)": "`view` is written in place",
    "other += 1": "`other` is written in place",
    "other[0] = 0": "`other` is written in place",
    "torch.add(x, 1, out=view)": "written in place",
    "F.relu(view, inplace=True)": "written in place",
    "F.relu(view, inplace=flag)": "written in place",
    "F.relu(view, True)": "written in place",
    "self.relu(x)": "written in place",
    "self.buffer.add_(1)": "written in place",
    "self.k_proj.weight.data.mul_(0.5)": "written in place",
    "self.q_proj.weight.data = other": "written in place",
    "self.q_proj.half()": "written in place",
    "self.q_proj.to(x.dtype)": "written in place",
    "module.half()": "written in place",
    "halve(view)": "written in place",
    "def inner(t): return t.mul_(2)\ninner(view)": "written in place",
    "def inner(): return view.mul_(2)\ninner()": "`view.mul_` is not known",
    "y = fresh.view(-1)\nz = y if flag else view\nz.zero_()": "written in place",
    "nn.init.zeros_(self.q_proj.weight)": "`nn.init.zeros_` is not known",
    "torch.nn.init.zeros_(fresh)": "`torch.nn.init.zeros_` is not known",
    "self.writer(x)": "written in place",
    "called.append(x)\ncalled[0].zero_()": "written in place",
    "for y in (x, other): y.zero_()": "written in place",
    "y = [t.zero_() for t in (x, other)]": "written in place",
    "(y := view).zero_()": "written in place",
    # bound anew
    "x = other": "`x` is bound anew",
    "x, y = other": "`x` is bound anew",
    "for x in (x, other): pass": "`x` is bound anew",
    "with torch.no_grad() as x: pass": "`x` is bound anew",
    "del x": "`x` is bound anew",
    "y = (x := other)": "`x` is bound anew",
    "if flag: x = other": "`x` is bound anew",
    "self.q_proj = module": "self.q_proj is not known",
    "self.rebinder()": "`rebinder`: ",
    "self.q_proj.weight = other": "`.weight` is set",
    "del self.q_proj": "`q_proj` is also set from outside",
    # leaves the block
    "if flag: return other": "`return` stands before it",
    "if flag: raise ValueError(flag)": "`raise` stands before it",
    "assert x.shape[-1] == 8, 'size'": "`assert` stands before it",
    "if flag: raise": "`raise` stands before it",
    "yield other": "others run in between",
    # runs what nobody knows
    "cache.update(x)": "`.update(…)` is not known",
    "act(x)": "`act`, a local",
    "self.given(x)": "self.given is not known",
    "unknown(x)": "`unknown`, which may mean several things",
    "y = cache.layers\ncache.clip(x)": "`.clip(…)` of what is no tensor",
    "y = cache.layers\nz = cache\nz.norm(x)": "`.norm(…)` of what is no tensor",
    "self.counting(x)": "written in place",
    "self.recursive(x)": "nested too deeply",
    "keep(x)": "`keep`: `.append(…)`",
    "stepwise(x)": "`stepwise`: it is a generator",
    "y = self.counter": "reading .counter runs code",
    "for y in items: pass": "iterating over items may run code",
    "next(items)": "`next` is not known",
    "with cache: pass": "`with cache` may run code",
    "match flag:\n    case y: y.zero_()": "a match statement",
    "import torch.utils.cpp_extension": "an import runs code",
    "def inner():\n    nonlocal x\n    x = other": "it has `nonlocal x`",
    "global scaled": "it has `global scaled`",
    "self = other": "it binds `self` anew",
    "setattr(self, 'q_proj', other)": "not known to write nothing",
    "getattr(self, flag)": "`getattr` of a computed name",
    "y = (t.zero_() for t in (x, other))": "a generator runs later",
    "y = called_by[0]": "indexing `called_by` may run code",
    "y = sorted(items, key=act)": "a function of its own",
    "def inner(t=halve(view)): pass": "written in place",
    "y = [other]\ny += [x]\ny[0].zero_()": "written in place",
    "y = fresh if flag else [other]\ny += [x]\ny[0].zero_()": "written in place",
    "@act\ndef inner(): pass": "may run code",
    "y = F.relu(x, **items)": "iterating over items may run code",
    "y = F.relu(x, **{'inplace': flag})": "keywords that are not written out",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_a_projection_may_not_move_past(lines: str) -> None:
    assert REFUSED[lines] in (asked(lines) or "")


@pytest.mark.parametrize(
    "extra",
    [
        "\n\ndef scaled(x, by):\n    return x.mul_(by)\n",
        "\nscaled = halve\n",
        "\nfor scaled in (halve,): pass\n",
        "\nfrom elsewhere import scaled\n",
        "\nfrom elsewhere import *\n",
        "\ndef change():\n    global scaled\n    scaled = halve\n",
        "\nglobals()['scaled'] = halve\n",
        "\ndel scaled\n",
        "\nif scaled:\n    def scaled(x, by): return x\n",
        "\ntry: scaled\nexcept NameError as scaled: pass\n",
    ],
)
def test_a_name_with_two_meanings_is_unknown(extra: str) -> None:
    assert asked("y = scaled(x, by=2)", "x + 1") is None
    assert "`scaled`, which may mean several things" in str(asked("y = scaled(x, by=2)", "x + 1", extra=extra))


def test_an_attribute_that_is_read_may_not_be_set_before() -> None:
    assert asked("self.count = 1", "self.buffer + x") is None
    assert "`.buffer` is set" in str(asked("self.buffer = other", "self.buffer + x"))


@pytest.mark.parametrize(
    "extra",
    [
        "\nNorm.forward = halve\n",
        "\nsetattr(Norm, 'forward', halve)\n",
        "\nclass Norm(nn.Module): pass\n",
        "\n@halve\nclass Other: pass\nNorm = Other\n",
        "\ndef change(subject):\n    subject.own_norm = halve\n",
        "\ndef change(subject, name):\n    setattr(subject, name, halve)\n",
        "\nclass Heir(Subject):\n    def __init__(self):\n        self.own_norm = halve\n",
        "\nclass Heir(Subject):\n    own_norm = halve\n",
        "\nclass Heir(Subject):\n    def __getattr__(self, name): return halve\n",
        "\ndef change(subject):\n    subject.__dict__['own_norm'] = halve\n",
    ],
)
def test_a_module_that_may_be_another_is_unknown(extra: str) -> None:
    assert asked("y = self.own_norm(x)") is None
    assert asked("y = self.own_norm(x)", extra=extra) is not None


def test_a_module_of_a_class_that_is_replaced_everywhere_is_unknown() -> None:
    change = "\ndef change(model):\n    if isinstance(model, {}):\n        model._modules['x'] = halve(model)\n"
    assert asked("y = self.own_norm(x)", extra=change.format("nn.BatchNorm2d")) is None
    assert asked("y = self.own_norm(x)", extra=change.format("Norm")) is not None


def test_a_method_of_torchs_module_is_known_through_super() -> None:
    heir = "\nclass Own(nn.LayerNorm):\n    def forward(self, x):\n        return super().forward(x.float())\n"
    heir += "\nclass Heir(Subject):\n    def __init__(self):\n        self.own_norm = Own(8)\n"
    assert asked("y = self.own_norm(x)", extra=heir) is None
    assert asked("y = self.own_norm(x)", extra=heir.replace("x.float()", "x.mul_(2)")) is not None
    assert asked("y = self.own_norm(x)", extra=heir.replace("nn.LayerNorm", "nn.LSTM")) is not None


def test_an_heirs_method_counts() -> None:
    heir = "\nclass Heir(Subject):\n    def helper(self, x):\n        return x.mul_(2)\n"
    assert asked("y = self.helper(x)", extra=heir) is not None
    assert asked("y = self.helper(x)", extra=heir.replace("mul_", "mul")) is None


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("def __add__(self, other): return other.zero_()", "y = other + 1"),
        ("def view(self, *sizes): return sizes", "y = other.view(-1)"),
        ("def __setattr__(self, name, value): pass", "self.count = 1"),
        ("def __iter__(self): pass", "for layer in self.layers: pass"),
    ],
)
def test_a_class_with_operators_of_its_own_makes_them_unknown(method: str, call: str) -> None:
    assert asked(call) is None
    assert asked(call, extra=f"\nclass Strange:\n    {method}\n") is not None


def test_random_numbers_keep_their_order() -> None:
    assert asked("y = self.dropout(other)", "self.q_proj(x)") is None
    assert "draws random numbers" in str(asked("y = self.dropout(other)", "self.dropout(x)"))
    assert "draws random numbers" in str(asked("y = torch.rand_like(other)", "F.dropout(x, 0.1)"))


def test_what_a_function_inside_captures_is_read() -> None:
    inside = "def inner(t): return t + fresh\n"
    assert asked(inside, "inner(x)") is None
    assert "`fresh` is bound anew" in str(asked(inside + "fresh = other", "inner(x)"))


def test_what_writes_does_not_move_before_what_reads() -> None:
    assert "read before it" in str(asked("y = other + view", "x.mul_(2)"))
    assert asked("y = other + view", "fresh.mul_(2)") is None


def test_parts_of_one_statement_run_from_left_to_right() -> None:
    for line, free in (("y = fresh + {}", True), ("y = x.mul_(2) + {}", False), ("y = {} + x.mul_(2)", True)):
        module, scope, function = scope_of(line.format("self.k_proj(x)"), "x")
        call = next(
            n for n in walk(function.body.body[5]) if isinstance(n, cst.Call) and "k_proj" in module.code(n.func)
        )
        assert (may_move(scope, call, function.body.body[5]) is None) == free


def test_two_locals_share_memory_where_one_is_a_view() -> None:
    lines = (
        "a = fresh.transpose(0, 1)\nb = a.contiguous()\nc = a.clone()\nd = self.own_norm(fresh)\ne = self.norm(fresh)"
    )
    _, scope, _ = scope_of(lines)
    roots = {name: scope.root(name) for name in ("fresh", "a", "b", "c", "e", "x", "view")}
    assert roots["fresh"] == roots["a"] == roots["b"]
    assert len({roots["fresh"], roots["c"], roots["e"], roots["x"]}) == 4 - (roots["fresh"] == roots["x"])
    assert roots["x"] == roots["view"]


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        ("y = x", True),
        ("z = x\ny = z", True),
        ("y = x\nif flag: other = 1", True),
        ("y = x\nif flag: y = other", False),
        ("y = x\nfor y in (other,): pass", False),
        ("y = x\ny += 1", False),
        ("y = x\ndef y(): pass", False),
        ("y = x\nimport torch as y", False),
        ("y = x\ndef other(y): y = 1", True),
        ("y = x\nwhile flag: y = other", False),
        ("y = x\ntry: y = other\nexcept ValueError: pass", False),
        ("y = x\nif (y := other) is None: pass", False),
        ("if flag: y = x\nelse: y = other", False),
        ("y = x + 0", False),
    ],
)
def test_copies_are_the_same_object_unless_something_may_bind_them_anew(lines: str, same: bool) -> None:
    _, scope, function = scope_of(f"{lines}\nresult = (x, y)", "0")
    pair = next(n for n in walk(function.body.body[-2]) if isinstance(n, cst.Tuple))
    first, second = (Identity(scope).term(element.value) for element in pair.elements)
    assert (first == second) == same


def test_one_analysis_for_each_module() -> None:
    module, scope, function = scope_of("pass")
    assert effects_of(module).scope(function, module.classes["Subject"]) is scope


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("y.neg_()\n    return torch.cat((y, x))", "fill(fresh, x)"),
        ("y.neg_()\n    return torch.cat((y, x))", "fill(x=x, y=fresh)"),
        ("z = y[0]\n    for i in range(2): z[i] = y[i]\n    return z", "fill(fresh)"),
        ("z = torch.zeros(8)\n    z[0] = x[0]\n    return z", "fill(x, x).mul_(2)"),
        ("parts = [x.clone()]\n    parts.append(y)\n    parts[0].add_(1)\n    return parts", "fill(fresh, x)"),
        ("def inner(t): t.add_(1)\n    z = x.clone()\n    z.add_(1)\n    return z + inner(x + 1)", "fill(x, x)"),
    ],
)
def test_writing_into_what_nobody_else_has_is_no_effect(body: str, call: str) -> None:
    assert asked(call, extra=f"\ndef fill(y, x=None):\n    {body}\n") is None


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("y[0] = x[1]\n    return y", "fill(x, fresh)"),
        ("y[0] = x[1]\n    return y", "fill(fresh, view, view)"),
        ("y[0] = x[1]\n    return y", "fill(x=fresh, y=view)"),
        ("y[0] = x[1]\n    return y", "fill(*(x, fresh))"),
        ("x[0] = y[1]\n    return y", "fill(fresh, self.buffer)"),
        ("return x", "fill(fresh, view).mul_(2)"),
        ("z = y if flag else x\n    z.add_(1)", "fill(fresh, view)"),
        ("z = y.view(-1)\n    z.add_(1)", "fill(view)"),
        ("y.append(x)\n    y[0].zero_()", "fill(called, view)"),
        ("y.append(x)", "fill(called, view)\ncalled[0].zero_()"),
        ("rest[0].zero_()", "fill(fresh, fresh, fresh, view)"),
        ("named['z'].zero_()", "fill(fresh, z=view)"),
        ("def inner(t): t.add_(1)\n    return inner(x)", "fill(fresh, view)"),
    ],
)
def test_writing_into_what_is_handed_in_is_one(body: str, call: str) -> None:
    extra = f"\ndef fill(y, x=None, flag=True, *rest, **named):\n    {body}\n"
    assert asked(call, extra=extra) is not None


@pytest.mark.parametrize("own", ["self.kept = y", "self.layers[0] = y", "kept.append(y)", "self.kept = [y]"])
def test_what_a_helper_keeps_is_in_reach_of_others(own: str) -> None:
    extra = f"\nkept = []\n\n\nclass Heir(Subject):\n    def helper(self, y):\n        {own}\n        return y\n"
    assert asked("fresh.mul_(2)", "self.kept + x", extra=extra) is None
    assert asked("fresh.mul_(2)\nself.helper(fresh)", "self.kept + x", extra=extra) is not None
    _, scope, _ = scope_of("self.helper(fresh)", extra=extra)
    assert scope.root("fresh") == scope.root("self")


@pytest.mark.parametrize("decorator", ["", "@staticmethod"])
def test_a_methods_first_parameter_is_self_unless_it_is_static(decorator: str) -> None:
    method = "def helper({}y, x=None):\n        x.add_(1)\n"
    extra = "\nclass Heir(Subject):\n    " + f"{decorator}\n    " * bool(decorator)
    extra += method.format("" if decorator else "self, ")
    assert asked("self.helper(x, fresh)", extra=extra) is None
    assert asked("self.helper(fresh, x)", extra=extra) is not None


def test_parts_of_what_a_helper_returns_may_share_memory() -> None:
    extra = "\ndef pair(x):\n    z = x.clone()\n    return z, z.view(-1)\n"
    _, scope, _ = scope_of("a, b = pair(x)\nc, d = pair(x)", extra=extra)
    assert scope.root("a") == scope.root("b") != scope.root("c") == scope.root("d") != scope.root("x")
