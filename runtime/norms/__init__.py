"""Norms, alone and behind a residual add."""
