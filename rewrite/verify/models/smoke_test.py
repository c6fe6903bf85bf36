"""Whether a model of a small configuration is small, and what it runs on."""

from __future__ import annotations

import copy
from typing import Any

from .model_inputs import kinds_of, make

MAX_PARAMETERS = 20_000_000


def runs_on(model_class: Any, config: Any, problems: list[str]) -> tuple[str, ...] | None:
    """The first set of arguments that a model of this configuration runs on; None, and the problem, if there is none.

    It has to run twice alike, in fp32, with one prompt and with two.
    """
    import torch

    try:
        parameters = parameter_count(model_class, config)
        if parameters > MAX_PARAMETERS:
            problems.append(f"it still has {parameters:,} parameters")
            return None
        model = model_class._from_config(copy.deepcopy(config)).eval()
    except Exception as error:  # models raise what they like on sizes they do not support
        problems.append(f"{type(error).__name__}: {error}")
        return None
    tried: list[str] = []
    for kind in kinds_of(model_class):
        try:
            with torch.no_grad():
                for batch in (1, 2):
                    model(**make(kind, model.config, batch, batch, torch.float32))
            return kind
        except Exception as error:  # the same; the next set of arguments is tried
            tried.append(f"{type(error).__name__}: {error}")
    problems.append(tried[0] if tried else "its forward takes none of the arguments known")
    return None


def parameter_count(model_class: Any, config: Any) -> int:
    """Number of parameters of a model, without memory for them; of one that reads a value as it is made, at least."""
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    count = 0

    def counted(module: Any, name: str, parameter: Any) -> None:
        nonlocal count
        count += 0 if parameter is None else parameter.numel()
        if count > MAX_PARAMETERS:
            raise _TooLarge

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
    except RuntimeError:  # the meta device has no values
        hook = register_module_parameter_registration_hook(counted)
        try:
            model_class._from_config(copy.deepcopy(config))
        except _TooLarge:
            pass
        finally:
            hook.remove()
        return count


class _TooLarge(Exception):
    """A model has more parameters than is small, and needs not be finished."""
