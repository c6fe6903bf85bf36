"""Rotary embedding, norms of queries and keys, and the write into the cache, alone and behind the projections."""
