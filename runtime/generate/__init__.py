"""`generate()` as a loop over a captured step."""
