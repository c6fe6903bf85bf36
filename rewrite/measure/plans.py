"""What `from_pretrained` is given for the plans of transformers by which a model's tensors are dealt to ranks."""

from __future__ import annotations

import inspect
from typing import Any


def deals_experts(config_class: Any) -> bool:
    """Return whether a configuration class has a plan by which each rank has some of the experts, whole."""
    return bool(getattr(config_class, "base_model_ep_plan", None))


def experts_plan(ranks: int) -> dict[str, Any]:
    """Return the arguments for that plan, by this transformers' release: since 5.19 what is no expert is dealt too."""
    from transformers.distributed import DistributedConfig

    if "ep_size" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_size=ranks, ep_size=ranks)}
    return {"distributed_config": DistributedConfig(tp_size=ranks, enable_expert_parallel=True)}


def columns_plan() -> dict[str, Any]:
    """Return the arguments for the plan by which each rank has some columns or rows of every large tensor."""
    return {"tp_plan": "auto"}
