"""`python -m rewrite.kernels --exact`: every kernel in every form against its formula, without a tolerance.

Numbers are of the finite ring of `rewrite.finite`, in which a reordered sum is the same sum. `interpreted_ring` lets
Triton's interpreter compute in it, `exact_launch` runs one launch of a kernel and compares it with its reference
(`references`), `exact_forms` makes the launches, `exact_work` compares those of a vendor in a process of its own, and
`exact_run` puts such processes to work.
"""
