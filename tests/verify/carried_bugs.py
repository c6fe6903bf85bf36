"""Bugs planted into states that a model carries without a cache; each names the check that has to catch it.

RecurrentGemma keeps them on its modules, RWKV hands them on and writes into them, xLSTM has them in an object.
"""

from __future__ import annotations

from functools import partial

from .generation_bugs import AGAIN, CONTINUED, ENDED, ONE, PADDED, bug

LOADED = "        self._take(values)\n\n    def advance"
TAKEN = "self._take([*self._values(), *handed])"
COPIED = "            if move:\n                buffer.copy_(value)"
RESTORED = (
    "            for buffer, before in zip(self.buffers, copies, strict=True):\n                buffer.copy_(before)"
)
GIVEN = "self._form.filled(self._handed_on)}"
NOT_GIVEN = "self._form.filled([b.clone() for b in self._handed_on])}"
LATE = (
    "now = [value.clone() for value in (*self._values(), *handed)]\n"
    "        self._take(self.__dict__.pop('_late', list(self.buffers)))\n        self._late = now"
)
STALE = "        self._take(self.__dict__.setdefault('_first', [v.clone() for v in values]))\n\n    def advance"
FIRST_ROW = "                buffer.copy_(value[:1].expand_as(value))"
OUTLIVES = "if graph.carried.always_outlive or ("

recurrent_gemma, rwkv, xlstm = (partial(bug, model) for model in ("recurrent_gemma", "rwkv", "xlstm"))
SHARED = f"            if move:\n{FIRST_ROW}"

KEPT = (
    recurrent_gemma("a state of the prompt before", AGAIN, "loop", LOADED, STALE),
    recurrent_gemma("a state shared by rows", PADDED, "loop", COPIED, SHARED),
    recurrent_gemma("a state in 16 bits", ONE, "loop", COPIED, COPIED.replace("(value)", "(value.bfloat16())")),
    recurrent_gemma("a state one step late", ONE, "loop", TAKEN, LATE),
    recurrent_gemma("a state that stays as after the prompt", ONE, "loop", TAKEN, "self._give(self.buffers)"),
    recurrent_gemma("a state that the proof moved on", ONE, "loop", RESTORED, "            pass"),
    recurrent_gemma("states after the overshoot", ENDED, "loop", OUTLIVES, "if not graph.carried and ("),
    recurrent_gemma(
        "a state that is not left to the next call",
        CONTINUED,
        "loop",
        "setattr(_alive(module), name, buffer.clone())",
        "setattr(_alive(module), name, torch.zeros_like(buffer))",
    ),
)

HANDED = (
    rwkv("a state of the prompt before", AGAIN, "loop", LOADED, STALE),
    rwkv("a state shared by rows", PADDED, "loop", COPIED, SHARED),
    rwkv("a state in 16 bits", ONE, "loop", COPIED, COPIED.replace("(value)", "(value.bfloat16())")),
    rwkv("a state one step late", ONE, "loop", TAKEN, LATE, also=(("_runtime", GIVEN, NOT_GIVEN),)),
    rwkv(
        "a state that stays as after the prompt",
        ONE,
        "loop",
        GIVEN,
        NOT_GIVEN,
        also=(("_runtime", TAKEN, "self._give(self.buffers)"),),
    ),
    rwkv("states of the prompt handed back", ONE, "loop", "tensor.copy_(buffer) if same", "tensor if same"),
)

OBJECTS = (
    xlstm("a state of the prompt before", AGAIN, "loop", LOADED, STALE),
    xlstm("a state shared by rows", PADDED, "loop", COPIED, SHARED),
    xlstm("a state one step late", ONE, "loop", TAKEN, LATE, also=(("_runtime", GIVEN, NOT_GIVEN),)),
    xlstm(
        "a state that stays as after the prompt",
        ONE,
        "loop",
        GIVEN,
        NOT_GIVEN,
        also=(("_runtime", TAKEN, "self._give(self.buffers)"),),
    ),
    xlstm("a state that the proof moved on", ONE, "loop", RESTORED, "            pass"),
    xlstm("states after the overshoot", ENDED, "loop", OUTLIVES, "if not graph.carried and ("),
    xlstm("states of the prompt handed back", ONE, "loop", "tensor.copy_(buffer) if same", "tensor if same"),
)
