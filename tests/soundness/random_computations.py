"""Random norms, rotations and expansions: computations put together from parts, one of them often odd."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st

from soundness.case import Case, case_of
from soundness.noise import Draw, Lines, Names, around, noise, supported


def _pick(draw: Draw, *choices: str) -> str:
    """Return one of the choices; the first, which is the usual one, in five of six draws."""
    return choices[0] if draw(st.integers(0, 5)) else draw(st.sampled_from(choices))


def _noisy(draw: Draw, lines: Sequence[str], names: Names) -> Lines:
    """Return the lines, in one of four draws with one other statement somewhere."""
    if draw(st.integers(0, 3)):
        return [part for line in lines for part in line.splitlines()]
    place = draw(st.integers(0, len(lines) - 1))
    parts = [*lines[:place], *draw(noise(names)), *lines[place:]]
    return [part for line in parts for part in line.splitlines()]


def _made(name: str, scaffold: str, **holes: str) -> Case:
    return case_of(f"random/{scaffold}.{name}", scaffold, supported(holes))


def _with_noise(draw: Draw, lines: Lines, names: Names) -> Lines:
    """Return a norm's lines, in one of eight draws with one other statement and the locals that it reads."""
    noisy = _noisy(draw, lines, names) if draw(st.booleans()) else lines
    return noisy if len(noisy) == len(lines) else [_LOCALS, *noisy]


_LOCALS = "a, c, xs, d, n, z, flag = x * 1, x * 2, [x], {'k': x}, None, None, len(x) == 2"


@st.composite
def rms_norms(draw: Draw) -> Case:
    """Return an RMSNorm, or what is nearly one."""
    lines = [
        _pick(draw, "k = x.dtype", "k = self.weight.dtype", "k = torch.float64", "k = torch.float32"),
        _pick(draw, "h = x.float()", "h = x.to(torch.float32)", "h = x", "h = x.half()", "h = self.drop(x).float()"),
        "v = {}{}.mean({}, keepdim=True){}".format(
            _pick(draw, "h", "x.float()", "x", "(h + 1)", "h[..., :4]", "h.detach()"),
            _pick(draw, ".pow(2)", ".square()", ".abs()", ".pow(3)", ".pow(self.power)"),
            _pick(draw, "-1", "dim=-1", "-2", "1", "2", "(-1, -2)"),
            _pick(draw, "", ".clamp(min=0.5)", " + self.eps", ".detach()"),
        ),
        "h = {} * {}".format(
            _pick(draw, "h", "x", "(h - v)", "h.clamp(-1, 1)", "self.norms(h)", "-h"),
            _pick(
                draw,
                "torch.rsqrt(v + self.eps)",
                "(v + self.eps).pow(-0.5)",
                "torch.rsqrt(v)",
                "(1 / (v.sqrt() + self.eps))",
                "torch.rsqrt(v - self.eps)",
                "torch.rsqrt(torch.clamp(v, min=self.eps))",
            ),
        ),
        _pick(
            draw,
            "return self.weight * h.to(k)",
            "return (self.weight.float() * h).to(k)",
            "return ((1 + self.weight.float()) * h).to(k)",
            "return h.to(k)",
            "return self.weight * h",
            "return self.weight.abs() * h.to(k)",
            "return self.weight * h.to(k) + 1",
            "return (self.weight * h.to(k),)",
            "return self.weight * self.weight * h.to(k)",
            "return h.to(k) if self.flag else self.weight * h.to(k)",
            "return self.scale * h.to(k)",
        ),
    ]
    method = ""
    if not draw(st.integers(0, 3)):
        decorator = draw(st.sampled_from(("", "", "@doubled\n", "@functools.wraps(print)\n")))
        parts = [line.replace("x", "h") for line in lines[2:4]]
        method = "\n    ".join((f"{decorator}def norm(self, h):", *parts, "return h\n"))
        lines[2:4] = ["h = self.norm(h)"]
    lines = _with_noise(draw, lines, Names(("x", "h", "a"), ("a", "h", "c")))
    weight = _pick(
        draw, "", "self.weight = nn.Parameter(torch.ones(1))", "self.weight = nn.Parameter(torch.ones(3, 1))"
    )
    imported = draw(st.booleans())
    text = "\n".join(lines)
    return _made(
        "norm",
        "rms_norm",
        body=text.replace("torch.rsqrt", "rsqrt") if imported else text,
        imports="from torch import rsqrt" if imported else "",
        before="def doubled(method):\n    return lambda self, h: method(self, h) * 2\n",
        args="self, x",
        init="self.power, self.flag, self.kept = 2, False, torch.ones(1)\nself.scale = nn.Parameter(torch.ones(dim))\n"
        + weight
        + _pick(
            draw, "", "\nself.eps = 0.7", "\nself.eps = torch.tensor(0.3)", "\nself.eps = nn.Parameter(torch.ones(8))"
        ),
        methods=f"def norms(self, h):\n    return h * 1\n\n{method}",
        after=_pick(draw, "", *_NORM_AFTER),
        inputs=_pick(draw, "randn(b, 3, 8),", *_NORM_INPUTS),
        layout="yes" if draw(st.booleans()) else "no",
    )


_NORM_INPUTS = (
    "randn(8),",
    "randn(0, 8),",
    "randn(b, 3, 1),",
    "randn(b, 2, 1, 3, 8),",
    "randn(b, 8, 3).transpose(1, 2),",
    "randn(b, 8, 3).mT,",
    "randn(b, 3, 8).float(),",
    "integers(5, b, 3, 8),",
)
_NORM_AFTER = (
    "class Subject(Subject):\n    eps = property(lambda self: 0.5, lambda self, value: None)",
    "class Subject(Subject):\n    def norm(self, h):\n        return h * 2\n\n    norms = norm",
    "rsqrt = torch.sqrt",
    "for rsqrt in (torch.abs,):\n    pass",
    "Subject.forward = torch.no_grad()(Subject.forward)",
)


@st.composite
def layer_norms(draw: Draw) -> Case:
    """Return a LayerNorm written out, or what is nearly one."""
    lines = [
        "k = x.dtype",
        _pick(draw, "h = x.float()", "h = x.to(torch.float32)", "h = x"),
        "m = {}.mean({}, keepdim=True)".format(_pick(draw, "h", "x", "h.detach()"), _pick(draw, "-1", "-2", "1")),
        "v = {}.mean(-1, keepdim=True)".format(
            _pick(draw, "(h - m).pow(2)", "h.pow(2)", "(h - m).abs()", "(m - h).pow(2)")
        ),
        "h = {} * torch.rsqrt(v + {})".format(_pick(draw, "(h - m)", "h", "(m - h)"), _pick(draw, "self.eps", "1e-3")),
        _pick(
            draw,
            "return (self.weight.float() * h).to(k)",
            "return (self.weight.float() * h + self.bias.float()).to(k)",
            "return (self.weight.float() * h + m).to(k)",
            "return (self.weight.float() * (h + self.bias.float())).to(k)",
            "return self.weight * h.to(k)",
            "return (self.weight.float() * h + self.shift).to(k)",
        ),
    ]
    lines = _with_noise(draw, lines, Names(("x", "h", "a"), ("a", "h", "c")))
    return _made(
        "norm",
        "layer_norm",
        body="\n".join(lines),
        init="self.bias, self.shift, self.kept = nn.Parameter(torch.zeros(dim)), 0.5, torch.ones(1)\n"
        + _pick(draw, "", "self.weight = nn.Parameter(torch.ones(1))", "self.weight = nn.Parameter(torch.ones(3, 1))"),
        inputs=_pick(draw, "randn(b, 3, 8),", *_NORM_INPUTS),
        layout="yes" if draw(st.booleans()) else "no",
    )


_ROTATIONS = (
    ("x.chunk(2, dim=-1)", "torch.cat((-b, a), dim=-1)"),
    ("x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]", "torch.cat((-b, a), dim=-1)"),
    ("x[..., 0::2], x[..., 1::2]", "torch.stack((-b, a), dim=-1).flatten(-2)"),
    ("x[..., 1::2], x[..., 0::2]", "torch.stack((-b, a), dim=-1).flatten(-2)"),
    ("x.chunk(2, dim=-1)", "torch.cat((b, -a), dim=-1)"),
    ("x.chunk(2, dim=-2)", "torch.cat((-b, a), dim=-2)"),
)
_REBOUND = (
    "",
    "rotate_half = torch.neg",
    "for rotate_half in (torch.neg,):\n    pass",
    "from torch import neg as rotate_half",
)


@st.composite
def rotations(draw: Draw) -> Case:
    """Return a function that rotates queries and keys, with tables of many shapes."""
    halves, joined = (
        _ROTATIONS[draw(st.integers(0, 2))] if draw(st.integers(0, 3)) else draw(st.sampled_from(_ROTATIONS))
    )
    q, k = _pick(draw, "q", "q", "q * 1", "k"), _pick(draw, "k", "k", "k * 1")
    product = _pick(draw, "{0} * {1} + rotate_half({0}) * {2}", "{0} * {1} - rotate_half({0}) * {2}")
    turned = (
        product.format(q, "cos", _pick(draw, "sin", "cos")),
        product.format(k, "cos", _pick(draw, "sin", "sin", "cos")),
    )
    widened = (
        f"cos = cos.unsqueeze({_pick(draw, 'unsqueeze_dim', '1', '-3')})",
        f"sin = sin.unsqueeze({_pick(draw, 'unsqueeze_dim', '1', '-3')})",
    )
    bare = draw(st.integers(0, 3)) == 0
    lines = [
        *(() if bare else widened),
        _pick(draw, "", "cos = cos.float()", "q = q.float()", "cos.mul_(2)", "bump(sin)"),
        _pick(
            draw, "return {}, {}", "return [{}, {}]", "q, k = {}, {}\nreturn q, k", "return ({}).to(k.dtype), {}"
        ).format(*turned),
    ]
    lines = [part for line in lines for part in line.splitlines()]
    body = _noisy(draw, lines, Names(("q", "k"), ("q", "a"), owner=False)) if draw(st.booleans()) else lines
    if len(body) > len(lines):
        body = ["a, c, xs, d, n, z, flag = q * 1, q, [q], {'k': q}, None, None, True", *body]
    b, h, s = "b", _pick(draw, "2", "1", "3"), _pick(draw, "3", "1")
    tables = draw(
        st.sampled_from(
            (
                *[f"b, 1, {s}, 4" if bare else f"b, {s}, 4"] * 4,
                f"1, {s}, 4",
                f"b, {s}, 1",
                f"b, {s}, 2",
                "b, 1, 4",
                "3, 4",
                "b, 3, 8",
            )
        )
    )
    queries = _pick(draw, f"{b}, {h}, {s}, 4", f"1, {h}, {s}, 4", f"{s}, 4", f"2, b, {h}, {s}, 4", f"b, {h}, {s}, 2")
    keys = _pick(draw, f"{b}, 1, {s}, 4", f"1, 1, {s}, 4", "b, 2, 1, 4", f"{s}, 4", "b, 1, 3, 1")
    sines = tables if draw(st.integers(0, 3)) else _pick(draw, f"b, {s}, 4", f"1, {s}, 4", f"b, {s}, 1")
    return _made(
        "apply",
        "rope",
        rotate=f"def rotate_half(x):\n    a, b = {halves}\n    return {joined}",
        body="\n".join(body),
        after=_pick(draw, *_REBOUND),
        calling="return apply_rotary_pos_emb(q, k, cos, sin{})".format(
            _pick(draw, "", ", 1", ", 2", ", unsqueeze_dim=0", ", -2")
        ),
        inputs=f"randn({queries}), randn({keys}), randn({tables}), randn({sines})",
        layout=_pick(draw, "no", "yes"),
    )


_REPEATS = (
    "",
    "repeat_kv = lambda states, times: states.repeat(1, times, 1, 1)",
    "def repeat_kv(states, times):\n    return states.repeat(1, times, 1, 1)",
    "for repeat_kv in (lambda states, times: states.repeat(1, times, 1, 1),):\n    pass",
)

_THIRD = "{0} = {1}.transpose(1, 2).repeat_interleave(2, 2)\n{0} = {0}.transpose(1, 2)"
_BEFORE = "k = key.transpose(1, 2)\nk = repeat_kv(k, 3).transpose(1, 2)"
_ATTENTIONS = (
    "F.scaled_dot_product_attention(query, k, v, mask)",
    "F.scaled_dot_product_attention(query, k, v, is_causal=True)",
    "torch.nn.functional.scaled_dot_product_attention(query, value=v, key=k, attn_mask=mask, scale=0.3)",
    "F.scaled_dot_product_attention(query, k, v, mask, 0.0, False)",
    "F.scaled_dot_product_attention(query, v, k, mask > 0)",
    "F.scaled_dot_product_attention(query, k, value)",
    "F.scaled_dot_product_attention(k, k, v)",
    "F.scaled_dot_product_attention(query, k, v, mask, 0.5)",
)


@st.composite
def expansions(draw: Draw) -> Case:
    """Return attention over keys and values that are repeated for groups of queries."""
    groups = _pick(draw, "module.num_key_value_groups", "2", "module.next()", "query.shape[1] // key.shape[1]")
    scores = _pick(
        draw,
        "a = torch.matmul(query, k.transpose(2, 3))",
        "a = query @ k.transpose(-1, -2)",
        "a = torch.matmul(query, k.transpose(2, 3), out=torch.zeros(1))",
        "a = torch.matmul(query[:, [1, 0, 2, 3]], k.mT)",
        "a = torch.matmul(query.float(), k.transpose(2, 3).float())",
    )
    names = Names(("key", "value"), ("key", "c"), layout=True)
    keys, values = f"k = repeat_kv(key, {groups})", "v = repeat_kv(value, 2)"
    if draw(st.booleans()):
        keys, values = _pick(draw, keys, _THIRD.format("k", "key"), _BEFORE), _THIRD.format("v", "value")
    again = _pick(draw, "", "", "k = k.contiguous()", "k = k.mT\nk = k.mT", "k = k.transpose(1, 2)", "k, v = v, k")
    site = [*keys.splitlines(), scores, *_pick(draw, values, "v = value.repeat_interleave(2, 1)").splitlines()]
    end = [
        "w = (a + mask).softmax(-1)",
        "a = torch.matmul(w, v)",
        _pick(draw, "return a, w", "return a, w, k.shape", "return a, w, k"),
    ]
    if draw(st.booleans()):
        direct = _pick(draw, *_ATTENTIONS)
        site = [*keys.splitlines(), *values.splitlines(), *again.splitlines(), f"a = {direct}"]
        end = [_pick(draw, "return a", "return a, v.shape[2]", "return a, k", "w = a @ v.mT\nreturn w")]
    prologue = "a, c, xs, d, n, z = key * 1, value, [key, value], {'k': value}, None, None"
    given = "flag, late = len(key) == 2, lambda: key"
    body = [prologue, given, "module.kept = value", *draw(around(site, names, 1)), *end]
    text = "\n".join(body).replace("self.", "module.")
    batch, heads = _pick(draw, "b", "1"), _pick(draw, "4", "2", "1", "8")
    inputs = f"randn({batch}, {heads}, 3, 6), randn(b, 2, 3, 6), randn(b, 2, 3, 6), randn(b, 1, 3, 3)"
    odd = _pick(draw, "", "", "self.num_key_value_groups = 1", "self.num_key_value_groups = 3")
    support = supported({"body": text.replace("module.", "self."), "init": odd})
    holes = {**support, "body": text, "inputs": inputs, "after_repeat": _pick(draw, *_REPEATS)}
    return case_of("random/attention.expansion", "attention", holes)
