"""A finite ring, in which a reordered sum is the same sum: its arithmetic, and tensors and models of it.

`ring` is the arithmetic, `ring_operations` what torch's operations are in it, `ring_tensor` a tensor of it, and
`ring_model` fills a model with its elements. `python -m rewrite.kernels --exact` and `rewrite verify` compare in it.
"""
