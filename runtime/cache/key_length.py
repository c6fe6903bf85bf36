"""How many keys attention reads, as a number that the host knows."""

from __future__ import annotations

from .preallocated import PreallocatedCache

OFFERS: dict[str, dict[str, str]] = {
    "key_length": {},
}


def key_length(past_key_values: object, past_length: int, query_length: int) -> int:
    """Return `past_length + query_length`; in a step of a `PreallocatedCache`, where nobody knows it, the capacity."""
    if isinstance(past_key_values, PreallocatedCache) and past_key_values.stepping:
        return past_key_values.capacity
    return past_length + query_length
