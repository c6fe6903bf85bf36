"""Sparse mixtures of experts: routers, blocks, the loop over experts."""
