"""Bugs planted into the keys that an indexer keeps; each names the check of the loop that has to catch it."""

from __future__ import annotations

from functools import partial

from .generation_bugs import AGAIN, CONTINUED, ONE, PADDED, bug

WRITTEN = "return self.indexer_keys.index_copy_(1, self.cache.slots, indexer_key_states)"
TAKEN = "self.indexer_keys[:, :length] = other.indexer_keys[:, :length]"
GIVEN = "growing.indexer_keys = self.indexer_keys[:, start:stop].clone()"
MADE = "self.indexer_keys = torch.zeros(shape, dtype=like.dtype, device=like.device)"
READ = "return indexer_key_states if start == 0 else self.indexer_keys[:, :end]"
MASKED = 'index_scores = index_scores.masked_fill(~attention_mask, float("-inf"))'
CHOSEN = "topk = min(self.index_topk, index_scores.shape[-1])"

deepseek_v32 = partial(bug, "deepseek_v32")

INDEXERS = (
    deepseek_v32("a key one slot late", ONE, "layers", WRITTEN, WRITTEN.replace("slots", "slots + 1")),
    deepseek_v32("a key one slot early", ONE, "layers", WRITTEN, WRITTEN.replace("slots", "slots - 1")),
    deepseek_v32("a key that is not written", ONE, "layers", WRITTEN, "return self.indexer_keys"),
    deepseek_v32(
        "the first row's key in all rows",
        PADDED,
        "layers",
        WRITTEN,
        WRITTEN.replace("indexer_key_states)", "indexer_key_states[:1].expand_as(indexer_key_states))"),
    ),
    deepseek_v32("an unused slot not masked", ONE, "", MASKED, f"{MASKED} if seq_len > 1 else index_scores"),
    deepseek_v32("one key fewer is chosen", ONE, "", CHOSEN, f"{CHOSEN} - int(seq_len == 1)"),
    deepseek_v32("keys in 16 bits", ONE, "layers", MADE, MADE.replace("like.dtype", "torch.bfloat16")),
    deepseek_v32(
        "keys not reset between calls",
        AGAIN,
        "layers",
        "        super().rewind(length)\n        self.indexer_length = length",
        "        super().rewind(length)\n        self.indexer_length = max(self.indexer_length, length)",
    ),
    deepseek_v32("keys of the text before unread", CONTINUED, "layers", READ, "return indexer_key_states"),
    deepseek_v32("keys not taken over", CONTINUED, "layers", TAKEN, "pass"),
    deepseek_v32("keys of other rows", CONTINUED, "layers", TAKEN, f"{TAKEN}.flip(0)"),
    deepseek_v32("keys of other slots", CONTINUED, "layers", TAKEN, f"{TAKEN}.roll(1, 1)"),
    deepseek_v32("keys not handed back", CONTINUED, "layers", GIVEN, "pass"),
    deepseek_v32(
        "keys handed over that a later call writes", CONTINUED, "layers", GIVEN, GIVEN.replace(".clone()", "")
    ),
)
