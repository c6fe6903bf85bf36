"""Changes by adapters: every method of peft, and what can be done with LoRA once it is there."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from .calls import prompt
from .change import Change, patched
from .families import Side


def changes(side: Side) -> Iterator[Change]:
    """Yield every method of peft, and what can be done with LoRA once it is there."""
    try:
        import peft
    except ModuleNotFoundError:
        return
    for kind in sorted(peft.PEFT_TYPE_TO_CONFIG_MAPPING, key=str):
        yield Change("adapter", str(getattr(kind, "value", kind)), lambda side, k=kind: _peft(side, k))
    for name in _LORA:
        yield Change("LoRA", name, lambda side, n=name: _lora(side, n))
    for name in ("add_adapter", "disable_adapters", "enable_adapters", "set_adapter"):
        yield Change("LoRA of transformers", name, lambda side, n=name: _native(side, n))


def _task(side: Side) -> str | None:
    return ("SEQ_2_SEQ_LM" if side.family.seq2seq else "CAUSAL_LM") if side.family.generates else None


_SMALL = {"r": 4, "num_virtual_tokens": 3, "group_size": 8, "vector_length": 8, "n_frequency": 16, "total_step": 10}
_SMALL |= {"token_indices": [3, 5], "adapter_len": 3, "adapter_layers": 2, "block_size": 8, "tasks": 1}
"""Of methods whose usual sizes are too large for these models, or that have none."""
_ELSEWHERE = ("ADAPTION_PROMPT", "TRAINABLE_TOKENS")
"""Methods that are no adapters of linear layers, and know themselves of what they are."""


@torch.no_grad()
def _stir(model: Any, before: set[int]) -> None:
    """Give what an adapter brought values that tell."""
    made = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if id(parameter) not in before and parameter.is_floating_point():
            parameter.add_((torch.randn(parameter.shape, generator=made) * 0.2).to(parameter))


@contextlib.contextmanager
def _peft(side: Side, kind: Any, **options: Any) -> Iterator[Any]:
    import peft

    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    names = inspect.signature(config).parameters
    given: dict[str, Any] = {"task_type": _task(side), **_SMALL, **options}
    if kind not in _ELSEWHERE:
        given["target_modules"] = "all-linear"
    if "oft_block_size" in names:
        del given["r"]
    torch.manual_seed(7)
    before = {id(parameter) for parameter in side.model.parameters()}
    wrapper = peft.get_peft_model(side.model, config(**{n: v for n, v in given.items() if n in names})).eval()
    _stir(wrapper, before)
    side.callee = wrapper
    try:
        yield wrapper
    finally:
        side.callee = side.model
        if hasattr(wrapper.base_model, "unload"):
            wrapper.unload()


@contextlib.contextmanager
def _lora(side: Side, name: str) -> Iterator[None]:
    with _peft(side, "LORA", r=4, init_lora_weights=False) as wrapper, contextlib.ExitStack() as stack:
        _LORA[name](side, wrapper, stack)
        yield


def _second(wrapper: Any) -> None:
    torch.manual_seed(8)
    wrapper.add_adapter("second", copy.deepcopy(wrapper.peft_config["default"]))


def _scale(wrapper: Any, factor: float) -> None:
    for module in wrapper.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= factor


def _called_between(side: Side) -> None:
    ids = prompt(side)
    if side.family.generates:
        side.callee.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    else:
        with torch.no_grad():
            side.callee(input_ids=ids)


def _then(*acts: Callable[[Any], object]) -> Callable[[Side, Any, contextlib.ExitStack], None]:
    """Return what calls the model with an adapter first, and then does something with it."""

    def act(side: Side, wrapper: Any, stack: contextlib.ExitStack) -> None:
        _called_between(side)
        for one in acts:
            one(wrapper)

    return act


@contextlib.contextmanager
def _disabled(side: Side, wrapper: Any) -> Iterator[None]:
    _called_between(side)
    with wrapper.disable_adapter():
        yield


_LORA: dict[str, Callable[[Side, Any, contextlib.ExitStack], None]] = {
    "merged": _then(lambda w: w.merge_adapter()),
    "merged, unmerged": _then(lambda w: w.merge_adapter(), lambda w: w.unmerge_adapter()),
    "disabled": lambda side, wrapper, stack: (_called_between(side), stack.enter_context(wrapper.disable_adapter()))[
        0
    ],
    "another one": _then(_second, lambda w: w.set_adapter("second")),
    "two at once": _then(_second, lambda w: w.base_model.set_adapter(["default", "second"])),
    "deleted": _then(_second, lambda w: w.set_adapter("second"), lambda w: w.delete_adapter("default")),
    "scaled": _then(lambda w: _scale(w, 0.5)),
    "weights in place": _then(lambda w: _stir(w, {id(p) for n, p in w.named_parameters() if "lora_" not in n})),
    "merged and unloaded": lambda side, wrapper, stack: stack.enter_context(
        patched(side, "callee", wrapper.merge_and_unload())
    ),
    "of the base": lambda side, wrapper, stack: stack.enter_context(patched(side, "callee", side.model)),
}


def _is_linear(module: Any) -> bool:
    return isinstance(module, (torch.nn.Linear, Conv1D))


@contextlib.contextmanager
def _native(side: Side, name: str) -> Iterator[None]:
    import peft

    linear = {path.rpartition(".")[2] for path, module in side.model.named_modules() if _is_linear(module)}
    targets = sorted(linear - {"lm_head", "decoder"})
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(7)
    side.model.add_adapter(config, "one")
    side.model.eval()
    if name != "add_adapter":
        _called_between(side)
    if name == "set_adapter":
        side.model.add_adapter(config, "two")
        side.model.eval()
        side.model.set_adapter("two")
    if name in ("disable_adapters", "enable_adapters"):
        side.model.disable_adapters()
        _called_between(side)
    if name == "enable_adapters":
        side.model.enable_adapters()
    try:
        yield
    finally:
        side.model.disable_adapters()
