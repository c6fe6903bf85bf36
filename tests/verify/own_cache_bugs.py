"""Bugs planted into caches of a file's own classes; each names the check of the loop that has to catch it.

MiniMax keeps states beside the layers of its cache, xLSTM in an object; layers of MiniMax M3 keep an indexer's keys.
"""

from __future__ import annotations

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

BESIDE = (
    bug("minimax", "a state of the prompt before", AGAIN, "loop", old=LOADED, new=STALE),
    bug("minimax", "a state shared by rows", PADDED, "loop", old=COPIED, new=SHARED),
    bug("minimax", "a state in 16 bits", ONE, "loop", old=COPIED, new=COPIED.replace("(value)", "(value.bfloat16())")),
    bug("minimax", "a state one step late", ONE, "loop", old=TAKEN, new=LATE),
    bug("minimax", "a state that stays as after the prompt", ONE, "loop", old=TAKEN, new="self._give(self.buffers)"),
    bug("minimax", "a state that the proof moved on", ONE, "loop", old=RESTORED, new="            pass"),
    bug("minimax", "states after the overshoot", ENDED, "loop", old=OUTLIVES, new="if not graph.carried and ("),
    bug(
        "minimax",
        "states not reset between calls",
        AGAIN,
        "cache",
        old=RESET,
        new=f"{RESET}self.own or ",
        also=(("_runtime/cache", CONTINUES, f"{CONTINUES} if dynamic.layers else self.own"),),
    ),
    bug("minimax", "states of the text before unread", CONTINUED, "cache", old=CONTINUES, new="pass"),
    bug("minimax", "states not handed back", ONE, "cache", old=HANDS_BACK, new="pass"),
)

OBJECTS = (
    bug("xlstm", "a state of the prompt before", AGAIN, "loop", old=LOADED, new=STALE),
    bug("xlstm", "a state shared by rows", PADDED, "loop", old=COPIED, new=SHARED),
    bug(
        "xlstm",
        "a state one step late",
        ONE,
        "loop",
        old=TAKEN,
        new=LATE,
        also=(("_runtime/decode", GIVEN, NOT_GIVEN),),
    ),
    bug(
        "xlstm",
        "a state that stays as after the prompt",
        ONE,
        "loop",
        old=GIVEN,
        new=NOT_GIVEN,
        also=(("_runtime/decode", TAKEN, "self._give(self.buffers)"),),
    ),
    bug("xlstm", "a state that the proof moved on", ONE, "loop", old=RESTORED, new="            pass"),
    bug("xlstm", "states after the overshoot", ENDED, "loop", old=OUTLIVES, new="if not graph.carried and ("),
    bug(
        "xlstm",
        "states of the prompt handed back",
        ONE,
        "loop",
        old="tensor.copy_(buffer) if same",
        new="tensor if same",
    ),
)

GROWING = (
    bug("minimax_m3_vl", "a key one slot late", ONE, "cache", old=GROWN, new=GROWN.replace("slots", "slots + 1")),
    bug("minimax_m3_vl", "a key one slot early", ONE, "cache", old=GROWN, new=GROWN.replace("slots", "slots - 1")),
    bug("minimax_m3_vl", "a key that is not written", ONE, "cache", old=GROWN, new="return buffer"),
    bug(
        "minimax_m3_vl",
        "the first row's key in all rows",
        PADDED,
        "cache",
        old=GROWN,
        new=GROWN.replace("new)", "new[:1].expand_as(new))"),
    ),
    bug(
        "minimax_m3_vl", "an unused slot not masked", BY_HAND, "", old=MASKED, new=f"{MASKED} if q_len > 1 else scores"
    ),
    bug(
        "minimax_m3_vl",
        "keys not reset between calls",
        AGAIN,
        "cache",
        old=FORGOTTEN,
        new="self.lengths = {method: max(length, known) for method, known in self.lengths.items()}",
    ),
    bug("minimax_m3_vl", "keys of the text before unread", CONTINUED, "cache", old=READ, new="return new"),
    bug("minimax_m3_vl", "keys not taken over", CONTINUED, "cache", old=TAKEN_OVER, new="pass"),
    bug("minimax_m3_vl", "keys of other rows", CONTINUED, "cache", old=TAKEN_OVER, new=OTHER_ROWS),
    bug("minimax_m3_vl", "keys not handed back", CONTINUED, "cache", old=GIVEN_BACK, new="None"),
    bug(
        "minimax_m3_vl",
        "keys handed over that a later call writes",
        CONTINUED,
        "cache",
        old=GIVEN_BACK,
        new=GIVEN_BACK.replace(".clone()", ""),
    ),
)
