"""Equality without tolerances: kernels and models computed in a ring, in which a reordered sum is the same sum.

`ring` is the arithmetic. `interpreted_ring` lets Triton's interpreter compute in it, `exact_launch` runs one launch of
a kernel and compares it with its reference (`references`), `exact_forms` makes the launches, and `exact_run` puts
processes to work for `rewrite kernels --exact`. `ring_tensor` is a tensor of the ring, by which `rewrite verify`
compares models.
"""
