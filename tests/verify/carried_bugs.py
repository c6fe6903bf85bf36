"""Bugs planted into states that a model carries without a cache; each names the check that has to catch it.

RecurrentGemma keeps them on its modules, RWKV hands them on and writes into them.
"""

from __future__ import annotations

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

KEPT = (
    bug("recurrent_gemma", "a state of the prompt before", AGAIN, "loop", old=LOADED, new=STALE),
    bug(
        "recurrent_gemma",
        "a state shared by rows",
        PADDED,
        "loop",
        old=COPIED,
        new=f"            if move:\n{FIRST_ROW}",
    ),
    bug(
        "recurrent_gemma",
        "a state in 16 bits",
        ONE,
        "loop",
        old=COPIED,
        new=COPIED.replace("(value)", "(value.bfloat16())"),
    ),
    bug("recurrent_gemma", "a state one step late", ONE, "loop", old=TAKEN, new=LATE),
    bug(
        "recurrent_gemma",
        "a state that stays as after the prompt",
        ONE,
        "loop",
        old=TAKEN,
        new="self._give(self.buffers)",
    ),
    bug("recurrent_gemma", "a state that the proof moved on", ONE, "loop", old=RESTORED, new="            pass"),
    bug(
        "recurrent_gemma", "states after the overshoot", ENDED, "loop", old=OUTLIVES, new="if not graph.carried and ("
    ),
    bug(
        "recurrent_gemma",
        "a state that is not left to the next call",
        CONTINUED,
        "loop",
        old="setattr(_alive(module), name, buffer.clone())",
        new="setattr(_alive(module), name, torch.zeros_like(buffer))",
    ),
)

HANDED = (
    bug("rwkv", "a state of the prompt before", AGAIN, "loop", old=LOADED, new=STALE),
    bug("rwkv", "a state shared by rows", PADDED, "loop", old=COPIED, new=f"            if move:\n{FIRST_ROW}"),
    bug("rwkv", "a state in 16 bits", ONE, "loop", old=COPIED, new=COPIED.replace("(value)", "(value.bfloat16())")),
    bug(
        "rwkv",
        "a state one step late",
        ONE,
        "loop",
        old=TAKEN,
        new=LATE,
        also=(("_runtime/decode", GIVEN, NOT_GIVEN),),
    ),
    bug(
        "rwkv",
        "a state that stays as after the prompt",
        ONE,
        "loop",
        old=GIVEN,
        new=NOT_GIVEN,
        also=(("_runtime/decode", TAKEN, "self._give(self.buffers)"),),
    ),
    bug(
        "rwkv",
        "states of the prompt handed back",
        ONE,
        "loop",
        old="tensor.copy_(buffer) if same",
        new="tensor if same",
    ),
)
