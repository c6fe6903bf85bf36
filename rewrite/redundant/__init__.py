"""Compute of a call that need not happen: what repeats, and what nothing reads."""
