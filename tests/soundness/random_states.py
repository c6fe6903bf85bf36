"""Random functions that keep a window of the text: convolutions put together from parts, one of them often odd."""

from __future__ import annotations

import hypothesis.strategies as st

from soundness.case import Case
from soundness.noise import Draw
from soundness.random_computations import _made, _pick


@st.composite
def windows(draw: Draw) -> Case:
    """Return a causal convolution that keeps its window, or what is nearly one."""
    joined = _pick(draw, "[window, x]", "(window, x)", "[x, window]")
    lines = [
        _pick(draw, "_, width, count = x.shape", "width, count = x.shape[1:]"),
        f"seen = torch.cat({joined}, dim=-1)" + _pick(draw, ".to(taps.dtype)", "", ".float()"),
        "kept = " + _pick(draw, "window.shape[-1]", "2", "taps.shape[1]"),
        _pick(
            draw,
            "window.copy_(seen[:, :, -kept:])",
            "window.copy_(seen[:, :, :kept])",
            "window = seen[:, :, -kept:]",
            "window.copy_(seen[:, :, -kept:] * 2)",
            "window[:] = seen[:, :, -kept:]",
        ),
        "y = F.conv1d(seen, taps.unsqueeze(1), {}, padding={}, groups=width)".format(
            _pick(draw, "shift", "bias=shift", "None"), _pick(draw, "0", "1")
        ),
        _pick(draw, "y = y[:, :, -count:]", "y = y[:, :, :count]", "y = y[..., -count:]"),
        _pick(draw, "if act is not None:\n    y = ACT2FN[act](y)", "y = F.silu(y)", "y = ACT2FN['gelu'](y)"),
        _pick(draw, "return y.to(x.dtype)", "return y", "return y.to(x.dtype) + window.sum()"),
    ]
    return _made(
        "window",
        "state",
        body="\n".join(lines),
        inputs=f"randn(b, 6, {_pick(draw, '1', '2')}), randn(b, 6, {_pick(draw, '3', '4')})",
        kind=_pick(draw, "'silu'", "None", "'gelu'"),
    )


@st.composite
def gated_norms(draw: Draw) -> Case:
    """Return a norm with a gate, or what is nearly one."""
    first = draw(st.booleans())
    usual, other = "ACT2FN[self.kind](gate.float())", "F.silu(gate.float())"
    opened = _pick(draw, *((other, usual) if first else (usual, other)), "gate.float()", "F.silu(gate).float()")
    normed = _pick(
        draw,
        "y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)",
        "y * (y.square().mean(dim=-1, keepdim=True) + self.eps) ** -0.5",
        "y * torch.rsqrt(y.pow(2).mean(-2, keepdim=True) + self.eps)",
        "y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True)) + self.eps",
    )
    grouped = [
        "*rows, columns = y.shape",
        f"count = columns // {_pick(draw, 'self.width', '2')}",
        f"y = y.view(*rows, {_pick(draw, 'count, self.width', 'self.width, count')})",
        f"y = {normed}",
        f"y = y.view(*rows, {_pick(draw, 'count * self.width', 'columns')})",
    ]
    ways = f"if gate is not None:\n    y = y * {opened}", f"y = y * {opened}", f"y = {opened} * y"
    gate = _pick(draw, *(ways if first else ways[::-1]))
    weighed = _pick(
        draw, "self.weight * y.to(dtype)", "self.weight.float() * y", "(1 + self.weight) * y.to(dtype)", "y.to(dtype)"
    )
    lines = ["dtype = x.dtype", f"y = x{_pick(draw, '.float()', '.to(torch.float32)', '')}"]
    if first:
        lines += [gate, *grouped, f"return {weighed}"]
    else:
        result = _pick(draw, "y.to(dtype)", "y", "y.to(x.dtype) + gate")
        lines += [f"y = {normed}", f"y = {weighed}", gate, f"return {result}"]
    return _made("gated_norm", "gated_norm", body="\n".join(lines))
