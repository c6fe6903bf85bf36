"""Drafted tokens, verified several at a time."""
