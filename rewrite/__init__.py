"""Rewrites transformers modeling files into fast source code that the user keeps."""

DISTRIBUTION = "hf-rewrite"
__version__ = "0.2.0"
