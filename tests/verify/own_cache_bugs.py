"""Bugs planted into caches of a file's own classes; each names the check of the loop that has to catch it.

MiniMax keeps states beside the layers of its cache, xLSTM in an object; layers of MiniMax M3 keep an indexer's keys.
"""

from __future__ import annotations

from functools import partial

from .carried_bugs import COPIED, FIRST_ROW, GIVEN, LATE, LOADED, NOT_GIVEN, OUTLIVES, RESTORED, STALE, TAKEN
from .generation_bugs import AGAIN, BY_HAND, CONTINUED, ENDED, ONE, PADDED, bug

RESET = "        super().clear()\n        self.layers.clear()\n        self.own = "
CONTINUES = "self.own = _copied(own_attributes(dynamic))"
HANDS_BACK = "dynamic.__dict__.update(_copied(self.own))"
SHARED = f"            if move:\n{FIRST_ROW}"
GROWN = "return buffer.index_copy_(dimension, self.cache.slots, new)"
FORGOTTEN = "self.lengths = {method: length if method in self.beside else 0 for method in self.grown}"
TAKEN_OVER = "mine.narrow(dimension, 0, length).copy_(theirs.narrow(dimension, 0, length))"
OTHER_ROWS = "mine.narrow(dimension, 0, length).copy_(theirs.narrow(dimension, 0, length).flip(0))"
GIVEN_BACK = "buffer.narrow(dimension, start, stop - start).clone()"
READ = "return new if start == 0 else buffer.narrow(dimension, 0, end)"
MASKED = 'scores = scores.masked_fill(token_future, float("-inf"))'

minimax, xlstm, minimax_m3_vl = (partial(bug, model) for model in ("minimax", "xlstm", "minimax_m3_vl"))

BESIDE = (
    minimax("a state of the prompt before", AGAIN, "loop", LOADED, STALE),
    minimax("a state shared by rows", PADDED, "loop", COPIED, SHARED),
    minimax("a state in 16 bits", ONE, "loop", COPIED, COPIED.replace("(value)", "(value.bfloat16())")),
    minimax("a state one step late", ONE, "loop", TAKEN, LATE),
    minimax("a state that stays as after the prompt", ONE, "loop", TAKEN, "self._give(self.buffers)"),
    minimax("a state that the proof moved on", ONE, "loop", RESTORED, "            pass"),
    minimax("states after the overshoot", ENDED, "loop", OUTLIVES, "if not graph.carried and ("),
    minimax(
        "states not reset between calls",
        AGAIN,
        "cache",
        RESET,
        f"{RESET}self.own or ",
        also=(("_runtime", CONTINUES, f"{CONTINUES} if dynamic.layers else self.own"),),
    ),
    minimax("states of the text before unread", CONTINUED, "cache", CONTINUES, "pass"),
    minimax("states not handed back", ONE, "cache", HANDS_BACK, "pass"),
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

GROWING = (
    minimax_m3_vl("a key one slot late", ONE, "cache", GROWN, GROWN.replace("slots", "slots + 1")),
    minimax_m3_vl("a key one slot early", ONE, "cache", GROWN, GROWN.replace("slots", "slots - 1")),
    minimax_m3_vl("a key that is not written", ONE, "cache", GROWN, "return buffer"),
    minimax_m3_vl(
        "the first row's key in all rows", PADDED, "cache", GROWN, GROWN.replace("new)", "new[:1].expand_as(new))")
    ),
    minimax_m3_vl("an unused slot not masked", BY_HAND, "", MASKED, f"{MASKED} if q_len > 1 else scores"),
    minimax_m3_vl(
        "keys not reset between calls",
        AGAIN,
        "cache",
        FORGOTTEN,
        "self.lengths = {method: max(length, known) for method, known in self.lengths.items()}",
    ),
    minimax_m3_vl("keys of the text before unread", CONTINUED, "cache", READ, "return new"),
    minimax_m3_vl("keys not taken over", CONTINUED, "cache", TAKEN_OVER, "pass"),
    minimax_m3_vl("keys of other rows", CONTINUED, "cache", TAKEN_OVER, OTHER_ROWS),
    minimax_m3_vl("keys not handed back", CONTINUED, "cache", GIVEN_BACK, "None"),
    minimax_m3_vl(
        "keys handed over that a later call writes", CONTINUED, "cache", GIVEN_BACK, GIVEN_BACK.replace(".clone()", "")
    ),
)
