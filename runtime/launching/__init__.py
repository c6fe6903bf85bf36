"""Launches of Triton kernels: options, tiles, kernels compiled ahead of time, and what was measured on a card."""
