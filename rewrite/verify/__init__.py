"""Runs a rewritten modeling file against the original: structure, parity and latency."""
