"""How many keys attention reads, as a number that the host knows."""

from __future__ import annotations

from transformers.cache_utils import EncoderDecoderCache

from .preallocated import PreallocatedCache


def key_length(past_key_values: object, past_length: int, query_length: int) -> int:
    """Return `past_length + query_length`; in a step of a `PreallocatedCache`, where nobody knows it, the capacity.

    That cache may be the text's part of one that also holds what an encoder found.
    """
    if isinstance(past_key_values, EncoderDecoderCache):
        past_key_values = past_key_values.self_attention_cache
    if isinstance(past_key_values, PreallocatedCache) and past_key_values.stepping:
        return past_key_values.capacity
    return past_length + query_length
