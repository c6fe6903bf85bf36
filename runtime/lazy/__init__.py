"""Lazy evaluation of torch functions in a captured step or forward, and the kernels that fuse them."""
