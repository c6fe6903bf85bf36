"""A model with experts. transformers looks for `@use_experts_implementation` and
`ALL_ATTENTION_FUNCTIONS.get_interface(` in the file of a class before it lets either implementation be chosen.
"""

import torch
from transformers import Qwen3MoeForCausalLM

from hf_rewrite_runtime.generate.generation import GraphGeneration


class Qwen3Moe(GraphGeneration, Qwen3MoeForCausalLM):
    _step_without_graph = not torch.cuda.is_available()
