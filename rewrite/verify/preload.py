"""Imports what nearly every modeling file imports, before processes are forked."""

from __future__ import annotations

import importlib
import warnings

MODULES = (
    "torch._dynamo", "transformers.modeling_utils", "transformers.generation", "transformers.modeling_layers",
    "transformers.modeling_outputs", "transformers.masking_utils", "transformers.cache_utils",
    "transformers.modeling_rope_utils", "transformers.models.auto.modeling_auto", "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def preload() -> None:
    """Import, and keep transformers' chatter off."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in MODULES:
        importlib.import_module(name)
