"""Random methods around projections: whatever is rewritten computes what it computed before.

The statements between the calls reassign, write in place, alias, branch, loop, call in closures and generators, change
weights, and use one module under two names; a rewrite that moves a call over any of these would change the result,
which is compared in fp64 after running both texts.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from rewrite.codemod.passes import rewrite_text
from rewrite.transforms import select

PACKAGE = "property_package"
TRANSFORMS = select(("fuse_qkv", "fuse_gate_up", "fuse_gated_activation", "fuse_add_norm", "route_gemm"))
PROJECTIONS = ("q_proj", "k_proj", "value", "wo", "shared")
INPUTS = ("x", "y")
LOCALS = ("a", "b", "c")
FRESH = ("d", "e", "g")  # assigned once, by the calls themselves

HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn


class Subject(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.k_proj = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)
        self.wo = nn.Linear(8, 8, bias=False)
        self.shared = self.q_proj
        self.act = nn.SiLU()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, y, flag):
        a, b, c = x + 1, y + 1, x - y
"""

projection = st.sampled_from(PROJECTIONS)
source = st.sampled_from(INPUTS + LOCALS)
target = st.sampled_from(LOCALS + INPUTS)


def lines():
    """Return a strategy for one simple statement."""
    return st.one_of(
        st.builds("{} = self.{}({})".format, target, projection, source),
        st.builds("{} = self.{}({}).view(-1, 2, 4).transpose(0, 1).reshape(-1, 8)".format, target, projection, source),
        st.builds("{} = self.{}({}) + self.{}({})".format, target, projection, source, projection, source),
        st.builds("{} = self.act(self.{}({})) * self.{}({})".format, target, projection, source, projection, source),
        st.builds("{} = self.act({})".format, target, source),
        st.builds("{} = {} * {}".format, target, source, source),
        st.builds("{} = {}".format, target, source),
        st.builds("{} = {} + {}".format, target, source, source),
        st.builds("{} = self.norm({})".format, target, source),
        st.builds("{0} = {1}; {0}.mul_(2)".format, target, source),
        st.builds("{0} = {1}; {0} += 1".format, target, source),
        st.builds("{} += 1".format, source),
        st.builds("{}.mul_(2)".format, source),
        st.builds("{}[0] = 0".format, source),
        st.builds("{0} = {0}[:]".format, source),
        st.builds("{} = self.{}({}) if flag else {}".format, target, projection, source, source),
        st.builds("{} = F.silu({}) * {}".format, target, source, source),
        st.builds("{} = (lambda t: self.{}(t) + {})({})".format, target, projection, source, source),
        st.builds("{} = sum(self.{}(t) for t in ({}, {}))".format, target, projection, source, source),
        st.builds("{} = self.{}(  # why\n            {}\n        )".format, target, projection, source),
        st.builds("self.{}.weight.data.mul_(0.5); {} = {}".format, projection, target, source),
    )


def blocks():
    """Return a strategy for a statement, simple or compound."""
    compound = st.builds(
        lambda head, body: [
            head,
            *(f"    {line}".replace("\n", "\n    ") for line in body),
            *(["    break"] if head.startswith("while") else []),
        ],
        st.sampled_from(
            (
                "if flag:",
                "if not flag:",
                "for _ in range(2):",
                "with torch.no_grad():",
                "for x in (x, y):",
                "while flag:",
            )
        ),
        st.lists(lines(), min_size=1, max_size=4),
    )
    return st.one_of(lines().map(lambda line: [line]), lines().map(lambda line: [line]), compound)


def bodies():
    """Return a strategy for a body with two projections of one input and anything before, between and after."""
    around = st.lists(blocks(), max_size=3)
    calls = st.tuples(source, st.permutations(PROJECTIONS), st.permutations(FRESH))
    return st.builds(
        lambda before, between, after, call: [
            *(line for part in before for line in part),
            f"{call[2][0]} = self.{call[1][0]}({call[0]})",
            *(line for part in between for line in part),
            f"{call[2][1]} = self.{call[1][1]}({call[0]})",
            f"{call[2][2]} = self.act({call[2][0]})",
            *(line for part in after for line in part),
            f"a = {call[2][2]} * {call[2][1]} + {call[2][0]}",
        ],
        around,
        around,
        around,
        calls,
    )


@pytest.fixture(scope="module", autouse=True)
def _package():
    """Make relative imports work in executed texts."""
    package = types.ModuleType(PACKAGE)
    sys.modules[PACKAGE] = package
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def subject(text, name):
    spec = importlib.util.spec_from_loader(f"{PACKAGE}.{name}", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, name, "exec"), module.__dict__)
    torch.manual_seed(0)
    return module.Subject().double().eval()


def outcome(model, flag):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    with torch.no_grad():
        result = model(x, y, flag)
    return (*result, x, y)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(bodies())
def test_a_rewritten_method_computes_what_it_did(body):
    text = HEADER + "".join(f"        {line}\n" for line in [*body, "return a, b, c"])
    rewritten = rewrite_text(text, TRANSFORMS)
    assert rewrite_text(rewritten.text, TRANSFORMS).sites == 0, rewritten.text
    before, after = subject(text, "before"), subject(rewritten.text, "after")
    for flag in (True, False):
        for wanted, got in zip(outcome(before, flag), outcome(after, flag), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{m}\n{rewritten.text}")
