"""Random heads with a loss: what is written between the product and the loss, and to what."""

from __future__ import annotations

import hypothesis.strategies as st

from soundness.case import Case, case_of
from soundness.noise import Draw, Names, around, supported
from soundness.random_modules import PROLOGUE, odd_init

_PRODUCTS = (
    "logits = self.lm_head({s})", "logits = self.lm_head({s}[:, -3:, :])", "logits = self.lm_head({s}).float()",
    "logits = self.lm_head({s} * 2)", "logits = self.lm_head(fresh({s}))", "logits = self.lm_head(self.drop({s}))",
)  # fmt: skip
_CHANGES = (
    "logits = logits * 2", "logits = logits / self.cap", "logits = self.cap * logits", "logits = torch.tanh(logits)",
    "logits = torch.tanh(logits / self.cap) * self.cap", "logits = logits.float()", "logits = logits * self.next()",
    "logits = logits * {s}[0, 0, 0]",
)  # fmt: skip
_LABELS = (
    "labels = labels.to(logits.device)", "labels[0, 1] = -100", "labels = labels.clone()", "labels = (labels + 1) % 8",
    "labels = None if flag else labels", "logits.mul_(2)", "z = logits.shape", "a = logits",
)  # fmt: skip
_LOSSES = (
    "loss = self.loss_function(logits=logits, labels=labels, vocab_size=8)",
    "loss = self.loss_function(logits, labels, vocab_size=8, num_items_in_batch=3)",
    "loss = self.loss_function(logits, labels, vocab_size=8, ignore_index=1)",
    "loss = self.loss_function(logits, labels, vocab_size=8, shift_labels=labels)",
    "loss = self.loss_function(logits, labels, vocab_size=4)",
    "loss = self.loss_function(logits=logits, labels=labels, vocab_size=8) * 2",
    "loss = self.loss_function(logits, labels, vocab_size=8) + self.next()",
)


@st.composite
def losses(draw: Draw) -> Case:
    """Return a forward that multiplies with the vocabulary, and computes a loss of the product."""
    tensors, modules = ("x", "y", "a", "c"), ("lm_head", "other")
    source = draw(st.sampled_from(tensors))
    forms = [_PRODUCTS, *[_CHANGES] * draw(st.integers(0, 1)), *[_LABELS] * draw(st.integers(0, 1))]  # type: ignore
    site = [draw(st.sampled_from(among)).format(s=source) for among in forms]
    loss = draw(st.sampled_from(_LOSSES))
    guarded = draw(st.booleans())  # type: ignore[arg-type]
    site += ["loss = None", f"if labels is not None:\n    {loss}"] if guarded else [loss]
    names = Names(tensors, ("a", "c", "x"), modules)
    body = [*PROLOGUE, *draw(around(site, names, 1)), "return (loss, logits, x, a, c)"]
    holes = {"init": odd_init(draw, modules), "body": "\n".join(body)}
    return case_of("random/loss.forward", "loss", supported(holes))
