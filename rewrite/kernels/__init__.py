"""`python -m rewrite.kernels`: compiles the kernels of `runtime/` for chips that are not there, reads what came out.

`catalogue` says what is launched, `compile_work` compiles it in a process of its own, `assembly` reads the result,
`chips` has the limits of each chip, `findings` judges, `drift` compares with what was recorded, `run` puts the
processes to work and `tables` writes it down. Triton has the compilers of NVIDIA and AMD in one wheel, so that no GPU
is needed.

With `--card`, `step` and `planned` collect the launches of a decode step in the same way, and `speed` says by a model,
whose constants are in `cards`, how long each would take; `speed_tables` writes that down.
"""
