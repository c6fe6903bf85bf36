"""`generate()` as a captured step, and the prompt before it."""
