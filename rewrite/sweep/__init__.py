"""Every modeling file of a transformers, rewritten and verified, one process each: `python -m rewrite.sweep`."""
