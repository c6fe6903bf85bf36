"""Whether models of a modeling file may give a decode step more than tokens, a mask, positions and the cache.

The loop then watches what transformers' own would give (`runtime/decode/step_inputs.py`). transformers refuses
arguments of `generate` that a model's `forward` does not name, so a `forward` that names no others is given no others.
"""

from __future__ import annotations

import ast

_LOOP = "GraphGeneration"
_OWN = frozenset({"prepare_inputs_for_generation", "_update_model_kwargs_for_generation"})
_PLAIN = frozenset({
    "self", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "labels",
    "use_cache", "cache_position", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip


def gives_more(tree: ast.Module) -> bool:
    """Return whether a rewritten file has such models; a yes is cheap."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any(function.name in _OWN for function in functions) or any(
        not _is_plain(node) for node in tree.body if isinstance(node, ast.ClassDef) and _has_loop(node)
    )


def _has_loop(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == _LOOP for base in node.bases)


def _is_plain(node: ast.ClassDef) -> bool:
    """Return whether a class has a `forward` of its own that names what every step is given, and nothing else."""
    forward = next((line for line in node.body if isinstance(line, ast.FunctionDef) and line.name == "forward"), None)
    if forward is None or forward.args.vararg is not None:
        return False
    given = (*forward.args.posonlyargs, *forward.args.args, *forward.args.kwonlyargs)
    return {argument.arg for argument in given} <= _PLAIN
