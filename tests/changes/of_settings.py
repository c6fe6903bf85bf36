"""Changes of settings: configurations, how `generate()` goes, and what torch does in the whole process."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from .change import Change, altered, called, entry, method_patched, others, patched, wrapped
from .families import Side

_READERS = (
    "transformers.masking_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.integrations.moe",
    "transformers.modeling_rope_utils",
    "transformers.cache_utils",
)


def changes(side: Side) -> Iterator[Change]:
    """Yield changes of settings."""
    yield from _configuration(side)
    yield from _modes()
    if side.family.generates:
        yield from _generation_configuration(side)
        yield from _hooks()


def _configuration(side: Side) -> Iterator[Change]:
    """Yield every field of the configuration with another value, and every one that code reads if it is there."""
    config = side.model.config
    for name, value in sorted(vars(config).items()):
        if isinstance(value, dict):
            for key, part in sorted(value.items()):
                for other in others(part, str(key))[:1]:
                    make = lambda side, n=name, k=key, v=other: entry(getattr(side.model.config, n), k, v)
                    yield Change("configuration, inner field", f"{name}[{key!r}] = {other}", make)
        elif name not in ("transformers_version",):
            for other in others(value, name):
                make = lambda side, n=name, v=other: patched(side.model.config, n, v)
                yield Change("configuration, field", f"{name} = {other}", make)
    files = [side.file, *map(importlib.import_module, _READERS)]
    asked = {name for file in files for name in _asked(inspect.getsource(file))}
    for name in sorted(asked):
        if not hasattr(config, name):
            for value in (False, True, 1):
                make = lambda side, n=name, v=value: patched(side.model.config, n, v)
                yield Change("configuration, new field", f"{name} = {value}", make)


def _asked(source: str) -> Iterator[str]:
    """Yield the names of attributes that code asks a configuration for."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = node.args[:2]
            if ast.unparse(owner).endswith("config") and isinstance(name, ast.Constant):
                yield str(name.value)


def _generation_configuration(side: Side) -> Iterator[Change]:
    """Yield every field of a generation configuration, on the model's and given to the call."""
    skipped = ("transformers_version", "return_dict_in_generate", "output_scores", "output_logits")
    for name, value in sorted(vars(GenerationConfig()).items()):
        if name.startswith("_") or name in skipped:
            continue
        for other in others(value, name):
            make = lambda side, n=name, v=other: patched(side.model.generation_config, n, v)
            yield Change("generation configuration, field", f"{name} = {other}", make)
            make = lambda side, n=name, v=other: entry(side.keywords, n, v)
            yield Change("argument of generate", f"{name} = {other}", make)
            if name in ("top_k", "top_p", "min_p", "temperature", "typical_p", "epsilon_cutoff", "eta_cutoff"):
                make = lambda side, n=name, v=other: _both(side.keywords, {"do_sample": True, n: v})
                yield Change("argument of generate", f"do_sample = True, {name} = {other}", make)
    for key, given in _ARGUMENTS.items():
        yield Change("argument of generate", key, lambda side, g=given: _both(side.keywords, g(side)))


@contextlib.contextmanager
def _both(into: dict[str, Any], new: dict[str, Any]) -> Iterator[None]:
    before = dict(into)
    into.update(new)
    try:
        yield
    finally:
        into.clear()
        into.update(before)


def _mask(side: Side, hidden: slice) -> torch.Tensor:
    mask = torch.ones(2, 9, dtype=torch.int64, device=side.device)
    mask[0, hidden] = 0
    return mask


_ARGUMENTS: dict[str, Callable[[Side], dict[str, Any]]] = {
    "mask, left padding": lambda side: {"attention_mask": _mask(side, slice(3))},
    "mask, right padding": lambda side: {"attention_mask": _mask(side, slice(6, None))},
    "mask, a hole": lambda side: {"attention_mask": _mask(side, slice(3, 5))},
    "mask of booleans": lambda side: {"attention_mask": _mask(side, slice(3)).bool()},
    "position ids": lambda side: {"position_ids": torch.arange(4, 13, device=side.device).expand(2, -1)},
    "logits processor": lambda _: {"logits_processor": [lambda ids, scores: scores * 0.5 + scores.roll(1, -1)]},
    "stopping criterion": lambda _: {"stopping_criteria": [lambda ids, _: ids[:, -1] > 0]},
    "prefix function": lambda _: {"prefix_allowed_tokens_fn": lambda batch, ids: [5, 6, 7 + batch]},
    "embeddings": lambda side: {
        "inputs_embeds": torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).to(side.device)
    },
    "logits_to_keep": lambda _: {"logits_to_keep": 1},
    "hidden states": lambda _: {"output_hidden_states": True, "output_attentions": True},
}


def _hooks() -> Iterator[Change]:
    """Yield every method of `GenerationMixin`, overridden on the instance and on the class."""
    for name, value in sorted(vars(GenerationMixin).items()):
        if isinstance(value, FunctionType) and not name.startswith("__"):
            make: Callable[[Side], AbstractContextManager[object]]
            make = lambda side, n=name: patched(side.model, n, wrapped(getattr(side.model, n)))
            yield Change("generation method, instance", name, make)
            make = lambda side, n=name: patched(type(side.model), n, _over(type(side.model), n))
            yield Change("generation method, class", name, make)
            make = lambda _, n=name: method_patched(GenerationMixin, n)
            yield Change("generation method, mixin", name, make)
    make = lambda side: patched(side.model, "prepare_inputs_for_generation", _padded(side))
    yield Change("generation method, instance", "prepare_inputs_for_generation, other embeddings", make)


def _over(owner: type, name: str) -> Callable[..., Any]:
    return wrapped(getattr(owner, name))


def _padded(side: Side) -> Callable[..., Any]:
    """As prompt tuning has it: the first call gets embeddings, a step its tokens, with something before them."""
    real = side.model.prepare_inputs_for_generation
    embed = side.model.get_input_embeddings()

    def prepare(self: Any, *arguments: Any, **keywords: Any) -> Any:
        inputs = real(*arguments, **keywords)
        ids = inputs.get("input_ids")
        if ids is not None and not side.family.seq2seq:
            inputs["inputs_embeds"], inputs["input_ids"] = embed(ids) * 1.5, None
        return inputs

    return types.MethodType(prepare, side.model)


def _modes() -> Iterator[Change]:
    """Yield every process-wide mode of torch."""
    for name, make in _MODES.items():
        yield Change("mode", name, lambda _, make=make: make())
    for owner in (torch.backends.mkldnn, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda):
        for name in ("enabled", "allow_tf32", "deterministic", "benchmark", "fp32_precision", "flags"):
            value = getattr(owner, name, None)
            if isinstance(value, bool):
                make = lambda _, o=owner, n=name: _set(o, n, not getattr(o, n))
                yield Change("mode", f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", make)
    for name in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp", "enable_cudnn_sdp"):
        switch = getattr(torch.backends.cuda, name)
        make = lambda _, s=switch: called(lambda: s(False), lambda: s(True))
        yield Change("mode", f"{name}(False)", make)
    for name in ("register_module_forward_hook", "register_module_forward_pre_hook"):
        yield Change("mode", name, lambda _, n=name: _global_hook(n))


def _set(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    before = getattr(owner, name)
    return called(lambda: setattr(owner, name, value), lambda: setattr(owner, name, before))


@contextlib.contextmanager
def _global_hook(name: str) -> Iterator[None]:
    def after(module: nn.Module, *given: Any) -> Any:
        return altered(given[-1]) if isinstance(module, nn.Linear) else None

    handle = getattr(nn.modules.module, name)(after)
    try:
        yield
    finally:
        handle.remove()


def _default(setting: str, value: Any) -> AbstractContextManager[None]:
    # A default device of "cpu" is a mode; there was none.
    before = None if setting == "default_device" else getattr(torch, f"get_{setting}")()
    change = getattr(torch, f"set_{setting}")
    return called(lambda: change(value), lambda: change(before))


_MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype float64": lambda: _default("default_dtype", torch.float64),
    "default dtype bfloat16": lambda: _default("default_dtype", torch.bfloat16),
    "default device cpu": lambda: _default("default_device", "cpu"),
    "default device meta": lambda: _default("default_device", "meta"),
    "with torch.device('meta')": lambda: torch.device("meta"),
    "deterministic": lambda: called(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of the card": lambda: torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()),
    "inference mode": lambda: torch.inference_mode(),
    "gradients": lambda: torch.enable_grad(),
    "gradients everywhere": lambda: patched(GenerationMixin, "generate", inspect.unwrap(GenerationMixin.generate)),
    "matmul precision medium": lambda: _default("float32_matmul_precision", "medium"),
    "matmul precision high": lambda: _default("float32_matmul_precision", "high"),
    "threads": lambda: _default("num_threads", 2),
    "flush denormal": lambda: called(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "sdpa kernel math": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(altered, lambda tensor: tensor),
    "fresh random state": lambda: called(lambda: torch.manual_seed(11), lambda: torch.manual_seed(12)),
}
