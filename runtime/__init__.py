"""What rewritten modeling files import: operators, packing, caches and the decode loop."""

__version__ = "0.1.0"
