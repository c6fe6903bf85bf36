"""Products with weights: packed, for few rows, gated, and who multiplies."""
