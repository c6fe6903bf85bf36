"""Every modeling file of a transformers, rewritten and verified, one process each: `rewrite sweep`."""
