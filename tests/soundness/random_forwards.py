"""Random forwards of whole models, with effects on arguments and state, and outputs of any kind."""

from __future__ import annotations

import hypothesis.strategies as st

from soundness.case import Case, case_of
from soundness.noise import Draw, supported

_STEPS = (
    "h = self.linear(h)", "h = h + y", "h = h * 2", "h = F.gelu(h)", "g = h.transpose(1, 2)", "g = h[:, :1]",
    "g = h + 1", "h = h - h.mean(-1, keepdim=True)", "g = y",
)  # fmt: skip
_ODD = (
    "x.add_(1)", "x[:, 0] = 0", "y.mul_(0.5)", "h.add_(1)", "self.steps += 1", "self.log.append(len(self.log))",
    "self.kept = h", "self.kept = h.shape", "self.places.add_(1)", "self.places = self.places + 1",
    "h = h + torch.rand_like(h)", "h = h * random.random()", "h = h * self.steps", "h = h * (1 + len(self.log))",
    "h = h + self.places.sum()", "self.linear.weight.data.mul_(1.01)", "h = self.relu(h)", "h = self.drop(h)",
    "h = x", "g = x", "h = h if h.sum() > 0 else -h", "del self.kept; self.kept = None",
)  # fmt: skip
_RETURNED = (
    "h", "(h, g)", "[h, g, None]", "{'h': h, 'g': (g, h)}", "(h, h)", "(h, x)", "(h, self.linear.weight)",
    "(h, 1, 'a')", "(h, h.view(-1))", "(h, object())", "iter((h, g))", "h.shape", "(h[0], h)", "x", "(h, self.steps)",
)  # fmt: skip


@st.composite
def forwards(draw: Draw) -> Case:
    """Return a forward of some steps, most of them harmless."""
    lines = ["h, g = x, y"]
    for _ in range(draw(st.integers(1, 4))):  # type: ignore[arg-type, call-overload]
        lines.append(draw(st.sampled_from(_STEPS)))
    for _ in range(draw(st.integers(0, 2))):  # type: ignore[arg-type, call-overload]
        lines.insert(draw(st.integers(1, len(lines))), draw(st.sampled_from(_ODD)))  # type: ignore[arg-type]
    lines.append(f"return {draw(st.sampled_from(_RETURNED))}")
    given = {"body": "\n".join(lines), "init": "self.log = []"}
    return case_of("random/model.forward", "model", supported(given))
