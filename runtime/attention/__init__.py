"""Attention, and what stands between the projections and it."""
