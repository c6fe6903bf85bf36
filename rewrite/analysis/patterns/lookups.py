"""Where a file looks up the attention function that the configuration names."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.tree.module import Module

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"


def is_lookup(node: cst.CSTNode, module: Module) -> bool:
    """Whether an expression takes a function out of the table of attention functions."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "get_interface":
        return module.qualified(node.func.value).endswith(_INTERFACES)
    return isinstance(node, cst.Subscript) and module.qualified(node.value).endswith(_INTERFACES)
