"""Sparse mixtures of experts."""
