"""Random modules for each transform: the place that it looks for, with anything around it that a file could have."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st

from soundness.case import Case, case_of
from soundness.noise import Draw, Lines, Names, around, supported

_ARGUMENTS = {"args": "self, x, y, flag", "inputs": "randn(b, 3, 8), randn(b, 3, 8), b == 2"}
PROLOGUE = [
    "a, c, xs, d, n, z, w = x + 1, x - y, [y, x], {'k': y}, None, None, None",
    "self.kept = y",
    "late = lambda: y",
]
_TENSORS = ("x", "y", "a", "c")
_ODD_INITS = (
    "",
    "",
    "",
    "self.{p} = self.{o}",
    "self.{p}.weight = self.{o}.weight",
    "self.{p}.register_forward_hook(lambda module, args, result: result * 2)",
    "self.{p}.register_forward_pre_hook(lambda module, args: bump(args[0]) and None if False else None)",
    "self.{p}.forward = lambda v: v * 2",
    "self.{p} = nn.Sequential(self.{p}, nn.Tanh())",
    "setattr(self, '{p}', nn.Sequential(self.{p}, nn.Tanh()))",
    "self.{p}.requires_grad_(False)",
    "self.{p}.weight.data = self.{p}.weight.data.t().contiguous().t()",
)


def _case(name: str, scaffold: str, body: Lines, holes: Mapping[str, str]) -> Case:
    """Return a case of a scaffold whose method starts with the locals and attributes that the noise reads."""
    text = "\n".join((*PROLOGUE, *body))
    return case_of(f"random/{scaffold}.{name}", scaffold, supported({**_ARGUMENTS, **holes, "body": text}))


def _method(draw: Draw, site: Lines, modules: tuple[str, ...], layout: bool = True) -> Lines:
    names = Names(_TENSORS, ("a", "c", "x"), modules, layout)
    return [*draw(around(site, names)), "return x, y, a, c, n"]


def odd_init(draw: Draw, modules: tuple[str, ...]) -> str:
    first, second = draw(st.sampled_from(modules)), draw(st.sampled_from(modules))
    return draw(st.sampled_from(_ODD_INITS)).format(p=first, o=second)


@st.composite
def projections(draw: Draw) -> Case:
    """Return a method with two or three projections of one input."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    source, order = draw(st.sampled_from(_TENSORS)), draw(st.permutations(modules))
    forms = (
        ["e = self.{0}({s})", "g = self.{1}({s})", "a = e + g"],
        ["e = self.{0}({s})", "g = self.{1}({s})", "c = self.{2}({s})", "a = g * c"],
        ["a = self.{0}({s}) + self.{1}({s})"],
        ["e, g = (p({s}) for p in (self.{0}, self.{1}))", "{n}", "a = e - g"],
        ["x, a = [p({s}).tanh() * x for p in (self.{0}, self.{1})]"],
        ["e, g = self.{0}({s}), self.{1}({s})", "c = e - g"],
        ["e = self.{0}({s}).view({s}.shape)", "a = self.{1}({s}) + e"],
        ["for _ in range(2):\n    a = self.{0}({s})\n    {n}\n    c = self.{1}({s})"],
        ["x = self.{0}({s}) * self.next() + self.bump({s}) + self.{1}({s})"],
        ["z = {s}", "a = self.{0}({s})", "z.mul_(1.5)", "c = self.{1}({s})"],
    )
    between = draw(st.sampled_from(("pass", "y = y + 1", "bump(y)", "x = x + 1", "self.relu(a)")))
    site = [line.format(*order, s=source, n=between) for line in draw(st.sampled_from(forms))]
    sizes = "self.k_proj = nn.Linear(8, 8)\nself.v_proj = nn.Linear(8, 8, bias=False)\n"
    return _case("calls", "projections", _method(draw, site, modules), {"init": sizes + odd_init(draw, modules)})


_ACTIVATIONS = (
    "nn.SiLU()",
    "nn.ReLU()",
    "nn.GELU()",
    "nn.ReLU(inplace=True)",
    "nn.SiLU(inplace=True)",
    "nn.Tanh()",
    "nn.Sequential(nn.SiLU(), nn.ReLU())",
)


_PAIRS = (
    ["a = self.act_fn(self.gate_proj({s})) * self.up_proj({s})"],
    ["e = self.act_fn(self.gate_proj({s}))", "g = self.up_proj({s})", "a = e * g"],
    ["e = self.gate_proj({s})", "g = self.up_proj({s})", "a = self.act_fn(e) * g"],
    ["e = self.gate_proj({s})", "self.act_fn({s})", "g = self.up_proj({s})", "a = self.act_fn(e) * g"],
    ["e = self.gate_proj({s})", "g = self.up_proj({s})", "a = self.act_fn(e) * g", "c = g.view(-1).view({s}.shape)"],
    ["g = self.up_proj({s})", "a = self.act_fn(self.gate_proj({s})) * g"],
    ["a = self.up_proj({s}) * self.act_fn(self.gate_proj({s}))"],
    ["for _ in range(2):\n    e = self.act_fn(self.gate_proj({s}))\n    g = self.up_proj({s})\n    a = e * g"],
)


@st.composite
def pairs(draw: Draw) -> Case:
    """Return a method with the product of an activated projection and another one of the same input."""
    modules = ("gate_proj", "up_proj")
    source = draw(st.sampled_from(_TENSORS))
    site = [line.format(s=source) for line in draw(st.sampled_from(_PAIRS))]
    holes = {
        "init": "self.gate_proj = nn.Linear(8, 8)\nself.up_proj = nn.Linear(8, 8)\n" + odd_init(draw, modules),
        "activation": draw(st.sampled_from(_ACTIVATIONS)),
    }
    return _case("products", "gated", _method(draw, site, modules), holes)


@st.composite
def gated(draw: Draw) -> Case:
    """Return a method with the product of something activated and another tensor."""
    modules = ("gate_proj", "up_proj")
    first, second = draw(st.sampled_from(_TENSORS)), draw(st.sampled_from(_TENSORS))
    forms = (
        *_PAIRS[:3],
        ["e = self.act_fn({s})", "a = e * {r}"],
        ["e = self.act_fn({s})", "a = {r} * e"],
        ["a = self.act_fn({s}) * {r}"],
        ["a = F.silu({s}) * ({r} + 1)"],
        ["a = self.act_fn({s}) * self.bump({r})"],
        ["a = self.bump({r}) * self.act_fn({s})"],
        ["a = self.act_fn({s} * self.next()) * ({r} * self.next())"],
        ["e = self.act_fn(self.drop({s}))", "a = self.drop({r}) * e"],
        ["a = self.act_fn(xs.pop()) * {s}"],
        ["a = ({r} * self.next()) * F.gelu({s} * self.next())"],
        ["e = self.act_fn({s})", "c = e.sum()", "a = e * {r}", "c = a * c"],
        ["a = self.act_fn({s}) * self.next()"],
        ["a = self.act_fn({s}) * {r}[..., :1]"],
    )
    site = [line.format(s=first, r=second) for line in draw(st.sampled_from(forms))]
    holes = {
        "init": "self.gate_proj = nn.Linear(8, 8)\nself.up_proj = nn.Linear(8, 8)\n" + odd_init(draw, modules),
        "activation": draw(st.sampled_from(_ACTIVATIONS)),
    }
    return _case("products", "gated", _method(draw, site, modules), holes)


@st.composite
def downs(draw: Draw) -> Case:
    """Return a method with the projection of something activated times another tensor."""
    modules = ("gate_proj", "up_proj", "down_proj")
    first, second = draw(st.sampled_from(_TENSORS)), draw(st.sampled_from(_TENSORS))
    forms = (
        ["a = self.down_proj(self.act_fn(self.gate_proj({s})) * self.up_proj({s}))"],
        ["e = self.gate_proj({s})", "g = self.up_proj({s})", "a = self.down_proj(self.act_fn(e) * g)"],
        ["e = self.act_fn(self.gate_proj({s})) * self.up_proj({s})", "a = self.down_proj(e)"],
        ["a = self.down_proj(self.act_fn({s}) * {r})"],
        ["a = self.down_proj(self.act_fn({s}) * self.bump({r}))"],
        ["a = self.down_proj(F.silu({s}) * {r}) + self.down_proj(self.act_fn({r}) * {s})"],
        ["a = self.down_proj(self.drop(self.act_fn({s}) * {r}))"],
        ["for _ in range(2):\n    a = self.down_proj(self.act_fn({s}) * ({r} * self.next()))"],
        ["a = self.down_proj(self.act_fn(self.changed({s})) * {r})"],
    )
    site = [line.format(s=first, r=second) for line in draw(st.sampled_from(forms))]
    sizes = "".join(f"self.{name} = nn.Linear(8, 8)\n" for name in modules)
    changed = "def changed(self, v):\n    self.down_proj = self.up_proj\n    return v\n"
    holes = {
        "init": sizes + odd_init(draw, modules),
        "methods": changed if any("changed" in line for line in site) else "",
        "activation": draw(st.sampled_from(_ACTIVATIONS)),
    }
    return _case("downs", "gated", _method(draw, site, modules), holes)


@st.composite
def patches(draw: Draw) -> Case:
    """Return a method with a convolution whose kernels lie side by side."""
    modules = ("proj", "other")
    first, second = draw(st.sampled_from(_TENSORS)), draw(st.sampled_from(_TENSORS))
    forms = (
        ["e = self.proj({s})", "a = e + {r}"],
        ["a = self.proj({s}) * self.other({r})"],
        ["a = self.proj({s}).flatten(1)[:, :, None] + self.other({r})"],
        ["a = self.proj(input={s} * self.next()) + self.bump({r})"],
        ["a = self.proj(self.bump({s})) + {r}"],
        ["a = self.proj(torch.cat(({s}, {r}), dim=-1)).sum(-1, keepdim=True) * {s}"],
        ["a = self.proj(torch.cat(({s}, {r}[..., :3]), dim=-1)) - {r}"],
        ["for _ in range(2):\n    e = self.proj({s})\n    a = self.other({r} + e)"],
        ["a = self.proj(self.changed({s})) + {r}"],
        ["a = self.drop(self.proj({s})) + {r}"],
        ["e = self.proj({s})", "e.mul_(1.5)", "a = e + {r}"],
    )
    site = [line.format(s=first, r=second) for line in draw(st.sampled_from(forms))]
    changed = "def changed(self, v):\n    self.proj = self.other\n    return v\n"
    holes = {
        "init": odd_init(draw, modules),
        "methods": changed if any("changed" in line for line in site) else "",
    }
    return _case("calls", "patches", _method(draw, site, modules), holes)


@st.composite
def residuals(draw: Draw) -> Case:
    """Return a method with an add and the norm that reads the sum."""
    first, second, third = (draw(st.sampled_from(_TENSORS)) for _ in range(3))
    forms = (
        ["{t} = {s} + {r}", "z = {t}", "{t} = self.norm({t})"],
        ["{t} = {s} + {r}", "a = {t}", "c = self.norm({t})"],
        ["{t} = {s} + {r}", "{t} = self.norm({t})"],
        ["{t} = {s} + self.bump({r})", "z = {t}", "{t} = self.norm({t})"],
        ["{t} = self.bump({s}) + {r}", "z = {t}", "{t} = self.norm({t})"],
        ["{t} = {s} * self.next() + {r} * self.next()", "c = self.norm({t})"],
        ["{t} = self.drop({s}) + self.drop({r})", "c = self.norm({t})"],
        ["a = self.norm({s} + {r})"],
        ["a = self.norm({s} + self.bump({r}))"],
        ["a = self.norm({s} + {r}) + self.mlp({t})"],
        ["{t} += {r}", "z = {t}", "a = self.norm({t})"],
        ["try:\n    {t} = {s} + {r}\n    c = self.norm({t})\nfinally:\n    a = {t} * 2"],
        ["for _ in range(2):\n    a = {t} + 1\n    {t} = {s} + {r}\n    c = self.norm({t})"],
        ["{t} = {s} + {r}", "if flag:\n    {t} = self.norm({t})"],
        ["{t} = {s} + {r}[:, :1]", "z = {t}", "c = self.norm({t})"],
        ["{t} = {s} + 2 * self.next()", "z = {t}", "c = self.norm({t})"],
        ["{t} = {s} + self.count", "z = {t}", "c = self.norm({t})"],
    )
    site = [line.format(s=first, r=second, t=third) for line in draw(st.sampled_from(forms))]
    norm = draw(st.sampled_from(("Norm()", "Norm()", "nn.LayerNorm(8)", "nn.LayerNorm(8, bias=False)", "nn.Tanh()")))
    odd = draw(st.sampled_from(("", "", "", "setattr(self, 'norm', Shifted())", "self.norm.eps = 0.5")))
    after = "class Shifted(Norm):\n    def forward(self, x):\n        return super().forward(x) + 1"
    holes = {"norm": norm, "init": odd, "after": after}
    return _case("sums", "residual", _method(draw, site, ("mlp",)), holes)
