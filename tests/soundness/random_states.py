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
