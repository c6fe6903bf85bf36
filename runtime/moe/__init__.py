"""Sparse mixtures of experts."""

from .experts import fused_experts
from .routed import routed, select
from .router import RoutingRule, router

__all__ = ["RoutingRule", "fused_experts", "routed", "router", "select"]
