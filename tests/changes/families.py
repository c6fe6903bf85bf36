"""Small models of several families, each as transformers has it and as a package, with the same weights."""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from rewrite.measure.runtime_part import runtime_part

ROOT = Path(__file__).parents[2]

_SIZES = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}


@dataclass(frozen=True)
class Family:
    """A modeling file of transformers, a class of it, and a configuration of a small model."""

    name: str
    main: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)
    generates: bool = True
    seq2seq: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", "LlamaConfig"),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
        Family("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
        Family("mistral", "MistralForCausalLM", "MistralConfig", {"sliding_window": 6}),
        Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
        Family("bart", "BartForConditionalGeneration", "BartConfig", _BART, seq2seq=True),
        Family("mamba2", "Mamba2ForCausalLM", "Mamba2Config", _MAMBA2),
        Family("bert", "BertForMaskedLM", "BertConfig", generates=False),
    )
}


@dataclass
class Side:
    """A model, an original or one of a package, to which changes are made.

    What a call is made with is part of it: changes may touch that too.
    """

    family: Family
    model: Any
    file: ModuleType
    """Its modeling file."""
    device: str
    runtime: str = ""
    """Of a package, its name."""
    callee: Any = None
    """What is called: the model, or something wrapped around it."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """Of `generate()`, besides the usual ones."""
    thread: bool = False
    """Whether calls come from a thread of their own."""

    def __post_init__(self) -> None:
        self.callee = self.model

    @property
    def layers(self) -> Any:
        """The longest list of modules that the model has."""
        lists = [module for module in self.model.modules() if isinstance(module, torch.nn.ModuleList)]
        return max(lists, key=len)

    def part(self, name: str) -> Any:
        """Return what a file of its runtime has."""
        return runtime_part(self.runtime, name)


@functools.cache
def folder() -> Path:
    """Return where packages are made, once a process."""
    made = Path(tempfile.mkdtemp(prefix="changes_"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    sys.path.insert(0, str(made))
    return made


@functools.cache
def package_of(name: str) -> ModuleType:
    """Return the package of a family, made and imported once a process."""
    command = [sys.executable, "-m", "rewrite.cli", name, "--out", str(folder() / f"changed_{name}")]
    subprocess.run([*command, "--no-verify", "--quiet"], check=True, capture_output=True, cwd=ROOT)
    return importlib.import_module(f"changed_{name}")


@functools.cache
def _template(name: str, device: str, rewritten: bool) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**_SIZES, **family.sizes})
    torch.manual_seed(0)
    if not rewritten:
        model = getattr(transformers, family.main)(config).eval().to(device)
        with torch.no_grad():  # norms and biases that start as ones and zeros would hide what is done to them
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model
    model = getattr(package_of(name), family.main)(config).eval().to(device)
    model.load_state_dict(_template(name, device, False).state_dict())
    return model


def side(name: str, rewritten: bool, device: str) -> Side:
    """Return a model as a process would load it: nothing has been called yet."""
    family, template = FAMILIES[name], _template(name, device, rewritten)
    model = type(template)(copy.deepcopy(template.config)).eval().to(device)
    model.load_state_dict(template.state_dict())
    package = package_of(name).__name__ if rewritten else ""
    if rewritten and device == "cpu":
        model._step_without_graph = model._forward_without_graph = True
    return Side(family, model, sys.modules[type(template).__module__], device, package)
