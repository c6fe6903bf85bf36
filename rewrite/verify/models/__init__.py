"""The two sides, small configurations of them, models with equal weights, and what those are fed."""
