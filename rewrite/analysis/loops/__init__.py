"""Loops, and what they ask the host for."""
