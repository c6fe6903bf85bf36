"""Forwards that are called again with the same shapes, replayed from a captured graph."""
