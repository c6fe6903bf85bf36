"""What a package was made for. One without `--target rocm` has no statements that stand under `if ROCM`.

So it is with the other names: `rewrite/package/features.py` says which packages have them.
"""

from __future__ import annotations

ROCM: bool = True
"""Whether what only AMD's GPUs take came along: aiter, and settings of ROCm's libraries."""
RANKS: bool = True
"""Whether models on several GPUs have the decode loop, by ranks, or layers of operators, one behind the other."""
FORMATS: bool = True
"""Whether weights with a scale for each block of them have kernels."""
LAYER_NORM: bool = True
"""Whether the modeling file may have LayerNorms."""
RMS_NORM: bool = True
"""Whether the modeling file may have torch's RMSNorms."""
INDEXER: bool = True
"""Whether its layers may keep an indexer's keys."""
STATES: bool = True
"""Whether layers of its caches may keep states of fixed size."""
CARRIED: bool = True
"""Whether its models may carry states from call to call beside a cache of transformers', or without one."""
GROWS: bool = True
"""Whether layers of its caches may grow more than keys and values."""
TRAINING: bool = True
"""Whether operators make their own gradients."""
CONV1D: bool = True
"""Whether weights may lie `[in_features, out_features]`."""
CHANGES: bool = True
"""Whether its code may leave something on a module."""
DRAWS: bool = True
"""Whether forwards may draw random numbers on the host."""
CODEBOOKS: bool = True
"""Whether its models may choose tokens of several codebooks in turn."""
ENCODES: bool = True
"""Whether its models may have an encoder, or read what one has made."""
CONSTANTS: bool = True
"""Whether steps may compute something of parameters alone, by functions of torch."""
CHAINS: bool = True
"""Whether chains of pointwise functions of a step are made into kernels."""
RAGGED: bool = True
"""Whether layers can run on the tokens alone that a mask shows."""
ATTENTION: bool = True
"""Whether torch's attention kernels can be chosen, by name or by a table."""
EAGER: bool = True
"""Whether attention that a model writes out is one kernel in a step."""
LOADS: bool = True
"""Whether it has layers that are loaded in their published form, where transformers would change it."""
UPLOAD: bool = True
"""Whether models are saved with their code."""
INPUTS: bool = True
"""Whether steps may be given more than tokens, a mask and positions."""
SPECULATION: bool = True
"""Whether drafted tokens are checked several at a time."""
FP8_CACHE: bool = True
"""Whether keys and values may be kept in 8 bits. Kernels have a constant of this name: what they do for it stands
under an `if` of it, which a package without does not have either."""
READS: bool = True
"""Whether its layers may read prompts by the functions of a step."""
