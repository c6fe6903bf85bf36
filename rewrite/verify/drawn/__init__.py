"""`generate()` by property: calls drawn by seed, the original against the rewritten package."""
