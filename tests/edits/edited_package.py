"""Packages of six families, as generated and with an edit, and small models of them with weights by their names."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from rewrite.codemod.build import build
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import resolve
from rewrite.transforms import select

from .text_edits import EDITS

SIZES = {
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
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
SPREAD = 0.15
"""Standard deviation of weights that multiply: scores and activations are far enough from zero that edits show."""


@dataclass(frozen=True)
class Family:
    """A modeling file of transformers, its class of a causal language model, and sizes of a small one."""

    name: str
    main: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", "LlamaConfig"),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
        Family("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
        Family("mixtral", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
        Family("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2_SIZES),
        Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config"),
    )
}
"""They differ in norms (of queries and keys per head: Qwen3; of the whole: OLMo 2; behind the sublayers alone: OLMo 2;
before and behind: Gemma 2), windows and soft caps (Gemma 2), experts (Mixtral), and in learned positions, LayerNorm,
biases and one product for queries, keys and values (GPT-2)."""


@functools.cache
def _folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="edits_"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    sys.path.insert(0, str(made))
    return made


@functools.cache
def _generated(family: str) -> Path:
    """Return the package of a family as `rewrite FAMILY` writes it, made once a process."""
    made, transforms = _folder() / f"edits_{family}", select()
    built = build(resolve(family), transforms)
    for path, content in assemble(built, transforms, Options(), made).files.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_bytes(content)
    return made


@functools.cache
def class_of(family: str, edit: str | None) -> Any:
    """Return the causal language model's class of a family's package, with an edit in its modeling file or without.

    Raises:
        NoPlace: if the file has no place for it.
    """
    made = _generated(family)
    if edit is not None:
        text = _modeling(made).read_text(encoding="utf-8")
        text = EDITS[edit].of(text, family)
        edited = made.with_name(f"{made.name}_{edit.replace(' ', '_')}")
        shutil.copytree(made, edited, dirs_exist_ok=True)
        _modeling(edited).write_text(text, encoding="utf-8")
        made = edited
    importlib.invalidate_caches()
    package = importlib.import_module(made.name)
    return getattr(package, FAMILIES[family].main)


def _modeling(folder: Path) -> Path:
    (found,) = folder.glob("modeling_*.py")
    return found


def model_of(family: str, edit: str | None, device: str) -> Any:
    """Return a new small model in fp32: a weight is the same in every package that has one of its name."""
    given = FAMILIES[family]
    config = getattr(transformers, given.config)(**{**SIZES, **given.sizes})
    model = class_of(family, edit)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=seeded)
            if parameter.dim() > 1:
                parameter.copy_(noise * SPREAD)
            else:  # of norms and biases, where ones and zeros would hide what is done to them
                parameter.add_(noise * 0.1)
    return model.to(device)


class Records(logging.Handler):
    """What the modeling file of a model logs in a `with` block."""

    def __init__(self, model: Any):
        super().__init__(logging.INFO)
        self.count = 0
        self._logger = logging.getLogger(type(model).__module__)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.count += 1

    def __enter__(self) -> Records:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._logger.removeHandler(self)
        self._logger.level, self._logger.propagate = self._before
