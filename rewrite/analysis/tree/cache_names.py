"""What modeling files call the cache."""

from __future__ import annotations

PASSED = ("past_key_values", "cache")
"""What transformers calls the cache wherever it is passed on; the second since release 5.24."""
