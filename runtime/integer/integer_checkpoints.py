"""GPTQ, AWQ and compressed-tensors checkpoints, read as they are published, without the libraries that made them.

transformers loads them by those libraries, whose layers have a kernel a layer, or which make 16 bits of the weights at
the first call. Here the layers are built from the checkpoint's own configuration and saved with its own bytes. What a
configuration says that is not understood is left to transformers' way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ..core import backend
from ..loading.original_checkpoint import Loader
from .integer_formats import Awq, Compressed, Format, Gptq
from .integer_layers import IntegerLinear

Chosen = Callable[[str, nn.Module], Format | None]
"""Returns the format of a layer by its name, None for one that is not quantised."""


class _IntegerLoader(Loader):
    """What the formats share: which layers there are, and what becomes of them."""

    @classmethod
    def wanted(cls, quantization: dict[str, Any]) -> bool:
        """Return whether there is a GPU and Triton, and the configuration is understood."""
        return torch.cuda.is_available() and backend.triton_installed() and cls.understands(quantization)

    @classmethod
    def understands(cls, quantization: dict[str, Any]) -> bool:
        """Return whether the configuration says nothing else than what these layers do."""
        raise NotImplementedError

    @staticmethod
    def chosen(model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> Chosen:
        """Return what says which layers are quantised, and how."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> bool:
        """Give a model without weights the layers of a checkpoint; return whether it has such layers."""
        choose = cls.chosen(model, quantization, dtype)
        linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
        chosen = [(name, module, form) for name, module in linear if (form := choose(name, module)) is not None]
        for name, module, form in chosen:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, IntegerLinear(module, form))
        return bool(chosen)

    @staticmethod
    def finish(model: nn.Module) -> None:
        """Hold what was loaded as kernels read it."""
        for module in model.modules():
            if isinstance(module, IntegerLinear) and not module.is_arranged:
                module.arrange()


def _checked(name: str, module: nn.Module, form: Format) -> Format:
    """Return the format of a layer.

    Raises:
        ValueError: if a layer of that size cannot be read: its checkpoint would have to be loaded otherwise.
    """
    rows, cols = module.out_features, module.in_features
    if not form.fits(rows, cols):  # type: ignore[arg-type]
        raise ValueError(
            f"{name}: {rows} × {cols} integers of {form.bits} bits in groups of {form.columns} do not fit"
        )
    return form


class GptqLoader(_IntegerLoader):
    """GPTQ, both versions of the format, with `desc_act` too."""

    method: ClassVar[str] = "gptq"

    @classmethod
    def understands(cls, quantization: dict[str, Any]) -> bool:
        """Return whether the configuration says nothing else than what these layers do."""
        known = quantization.get("checkpoint_format") in (None, "", "gptq", "gptq_v2")
        return known and quantization.get("bits") in (4, 8) and not quantization.get("dynamic")

    @staticmethod
    def chosen(model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> Chosen:
        """Return what says which layers are quantised: those of the blocks, or of these the ones that are named."""
        columns = max(0, int(quantization.get("group_size", 128)))
        less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        form = Gptq(quantization["bits"], columns, dtype, less)
        inside = quantization.get("modules_in_block_to_quantize")
        named = None if not inside else {name for one in inside for name in ([one] if isinstance(one, str) else one)}

        def choose(name: str, module: nn.Module) -> Format | None:
            in_block = re.search(r"\.\d+\.(.+)$", name)
            if in_block is None or (named is not None and in_block[1] not in named):
                return None
            return _checked(name, module, form)

        return choose


class AwqLoader(_IntegerLoader):
    """AWQ as `gemm` kernels read it."""

    method: ClassVar[str] = "awq"

    @classmethod
    def understands(cls, quantization: dict[str, Any]) -> bool:
        """Return whether the configuration says nothing else than what these layers do."""
        version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
        return quantization.get("bits", quantization.get("w_bit", 4)) == 4 and version == "gemm"

    @staticmethod
    def chosen(model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> Chosen:
        """Return what says which layers are quantised: all but the head and those that are named."""
        columns = max(0, int(quantization.get("group_size", quantization.get("q_group_size", 128))))
        form = Awq(4, columns, dtype)
        left_out = [*(quantization.get("modules_to_not_convert") or []), *get_keys_to_not_convert(model)]

        def choose(name: str, module: nn.Module) -> Format | None:
            return _checked(name, module, form) if should_convert_module(name, left_out) else None

        return choose


class CompressedLoader(_IntegerLoader):
    """compressed-tensors' `pack-quantized`: integers of 4 and 8 bits, whose inputs stay as they are."""

    method: ClassVar[str] = "compressed-tensors"

    @classmethod
    def understands(cls, quantization: dict[str, Any]) -> bool:
        """Return whether the configuration says nothing else than what these layers do."""
        rest = ("kv_cache_scheme", "sparsity_config", "transform_config")
        groups = (quantization.get("config_groups") or {}).values()
        understood = all(isinstance(group, dict) and _understood(group, quantization) for group in groups)
        plain = not any(_says(quantization.get(name)) for name in rest)
        return bool(groups) and understood and plain and quantization.get("quantization_status") == "compressed"

    @staticmethod
    def chosen(model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> Chosen:
        """Return what says which layers are quantised: those that a group names, and nothing leaves out."""
        groups = list(quantization["config_groups"].values())
        ignored = quantization.get("ignore") or []

        def choose(name: str, module: nn.Module) -> Format | None:
            if _matches(name, module, ignored):
                return None
            group = next((one for one in groups if _matches(name, module, one["targets"])), None)
            if group is None:
                return None
            how = group["weights"]
            columns = how["group_size"] or 0 if how["strategy"] == "group" else 0
            ordered = how.get("actorder") == "group"
            form = Compressed(how["num_bits"], columns, dtype, not how["symmetric"], ordered)
            return _checked(name, module, form)

        return choose


def _says(part: Any) -> bool:
    """Return whether a part of a configuration says something."""
    return bool(part) and not (isinstance(part, dict) and part.get("format") == "dense")


def _understood(group: dict[str, Any], quantization: dict[str, Any]) -> bool:
    how = group.get("weights") or {}
    known = how.get("type") == "int" and how.get("num_bits") in (4, 8) and how.get("strategy") in ("group", "channel")
    beside = any(group.get(name) for name in ("input_activations", "output_activations"))
    form = group.get("format") or quantization.get("format")
    return known and not beside and not how.get("dynamic") and form == "pack-quantized"


def _matches(name: str, module: nn.Module, targets: list[str]) -> bool:
    """Return whether a list names a layer: by its class, its name, or an expression that begins with `re:`."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return any(
        re.match(target[3:], name) is not None if target.startswith("re:") else target == name or target in kinds
        for target in targets
    )
