"""What a package may have or not, by the names of `runtime/core/target.py` under which it stands in the runtime.

Two things decide. The modeling file: what no module of it can be is not there (`FORMS`), nor what its classes would
have to be marked for (`MARKS`). The user: of `FEATURES` a new package has those that one GPU and a plain checkpoint
need; the others (`ON_REQUEST`) come with `--with`, or where it is seen that they are needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from rewrite.package import targets
from rewrite.package.kept_states import may_keep_states
from rewrite.package.module_writes import may_change_modules
from rewrite.package.step_arguments import gives_more
from rewrite.package.step_functions import may_call_functions, may_compute_of_parameters
from rewrite.package.written_attention import writes_attention

FEATURES = {
    "attention": (
        "ATTENTION",
        "torch's attention kernels by name (`set_attention_backend`), and by what `rewrite tune --attention` measured",
    ),
    "eager": ("EAGER", 'one kernel in a step for attention that a model writes out (`attn_implementation="eager"`)'),
    "ragged": ("RAGGED", "layers that run on the tokens alone that a batch's mask shows (`use_ragged_batches`)"),
    "ranks": (
        "RANKS",
        "the decode loop of models that are dealt to several GPUs (`tp_plan`), fused layers there (`device_map`)",
    ),
    "chains": ("CHAINS", "one kernel for several pointwise functions of torch, in a step or a captured forward"),
    "inputs": (
        "INPUTS",
        "the decode loop for models and calls that give a step more than tokens, a mask and positions",
    ),
    "formats": ("FORMATS", "the kernels for linear layers of checkpoints in FP8 with a scale for each block"),
    "speculation": (
        "SPECULATION",
        "the decode loop where tokens are looked up in the prompt, or drafted by a smaller model",
    ),
    "upload": (
        "UPLOAD",
        "`save_pretrained` and `push_to_hub` with code (`register_for_auto_class`), as `rewrite export --hub`",
    ),
    "fp8_cache": ("FP8_CACHE", "keys and values of captured decode steps in 8 bits, where that is asked for"),
    "training": (
        "TRAINING",
        "gradients by kernels, where torch would differentiate the operators of the original",
    ),
}
"""What `--with` and `--without` may name: the name in `core/target`, and what a package without does not have."""

ON_REQUEST = ("attention", "eager", "formats", "fp8_cache", "inputs", "ragged", "ranks", "upload")
"""What a new package does not have unless it is asked for. One that is made anew keeps what it has."""

IN_BLOCKS = frozenset({"deepseek_v3", "deepseek_v32", "minimax_m2"})
"""Modeling files whose checkpoints are published in FP8 with a scale for each block."""

FORMS: dict[str, tuple[str, re.Pattern[str] | Callable[[ast.Module], bool]]] = {
    "norms.add_layer_norm": ("LAYER_NORM", re.compile(r"LayerNorm|layer_norm$")),
    "norms.torch_rms_norm": ("RMS_NORM", re.compile(r"^RMSNorm$")),
    "products.transposed": ("CONV1D", re.compile(r"Conv1D|^addmm$")),
    "cache.IndexedLayer": ("INDEXER", re.compile(r"[Ii]ndexer|Indexed")),
    "cache.StateLayer": ("STATES", may_keep_states),
    "decode.Before": ("CHANGES", may_change_modules),
    "decode.Codebooks": ("CODEBOOKS", re.compile(r"^AlternatingCodebooks")),
    "decode.Encoded": ("ENCODES", re.compile(r"is_encoder_decoder|encoder_hidden_states|EncoderDecoder")),
    "forward.Draws": ("DRAWS", re.compile(r"^rand$")),
    "decode.StepConstants": ("CONSTANTS", may_compute_of_parameters),
    "products.Chain": ("CHAINS", may_call_functions),
}
"""By what is listed beside the uses of a modeling file, which calls none of it: the name in `core/target`, and the
names of a file whose modules may be of that form, or who tells by its tree."""

MARKS = {
    "CARRIED": ("decode.keeps_states", "decode.hands_on_states", "cache.keeps_own_cache"),
    "GROWS": ("cache.grows_in_layers",),
    "LOADS": ("moe.fused_experts", "moe.chosen_experts"),
    "READS": ("attention.qkv_step",),
}
"""By the name in `core/target`, the marks of classes of which a modeling file imports one, if any is of that kind; the
function of a step without which none reads a prompt; and the experts that may be loaded as they are published."""

NO_PROMPT = "attention.attend_step"
"""The function of a step that refuses to read a prompt: with it the rest of them reads none."""

_ELSEWHERE = re.compile(
    r"Auto(Model|Backbone)|^transformers\.models\.(?!.*\.configuration_)|^\.(?!runtime|configuration_)"
)
"""What a file names that takes modules from others, which may be anything."""


def forms_of(text: str) -> list[str]:
    """Return which of `FORMS` the modules of a modeling file may have."""
    tree = ast.parse(text)
    names = sorted(set(_names(tree)))
    anything = any(map(_ELSEWHERE.search, names))
    return [
        use
        for use, (_, said) in FORMS.items()
        if anything or (any(map(said.search, names)) if isinstance(said, re.Pattern) else said(tree))
    ]


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield what a file names, and what it imports from: `.neighbour`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def without(before: Collection[str] | None, wanted: Collection[str], unwanted: Collection[str]) -> tuple[str, ...]:
    """Return what the runtime of a package does not have, keys of `FEATURES`, sorted.

    Args:
        before: what the package that is there does not have; None for a new one.
        wanted: what is to come along, keys of `FEATURES`.
        unwanted: what is not; it goes before.
    """
    kept = set(ON_REQUEST if before is None else before) - set(wanted)
    return tuple(sorted(kept | set(unwanted)))


def needed_for(config: Mapping[str, Any], model: str, cards: int, text: str) -> dict[str, str]:
    """Return which of `ON_REQUEST` are needed, with what shows it.

    Args:
        config: a checkpoint's config.json; empty for none.
        model: the modeling file's name in transformers.
        cards: GPUs of this machine.
        text: of the rewritten file.
    """
    found = needed_by(text)
    stored = config.get("quantization_config")
    if isinstance(stored, Mapping) and stored.get("weight_block_size"):
        found["formats"] = "its config.json has weight_block_size"
    elif model in IN_BLOCKS:
        found["formats"] = "its checkpoints are published in FP8 with a scale for each block"
    if cards > 1:
        found["ranks"] = f"this machine has {cards} GPUs"
    return found


def needed_by(text: str) -> dict[str, str]:
    """Return which of `ON_REQUEST` a rewritten file needs, with what shows it."""
    tree = ast.parse(text)
    found = {}
    if writes_attention(tree):
        found["eager"] = "its file writes attention out"
    elif any(map(_ELSEWHERE.search, _names(tree))):
        found["eager"] = "its file takes modules of others, which may write attention out"
    if gives_more(tree):
        found["inputs"] = "its models give a step more than tokens and positions"
    if any(name.endswith("ForMaskedLM") for name in _names(tree)):
        found["ragged"] = "its models are called with batches of texts"
    return found


def left_out(target: str, uses: Iterable[str], without: Collection[str]) -> frozenset[str]:
    """Return the names of `runtime/core/target.py` that a package does not have.

    Args:
        target: GPUs that it is for.
        uses: what its modeling file imports, and its forms.
        without: keys of `FEATURES`.
    """
    there = set(uses)
    forms = {name for use, (name, _) in FORMS.items() if use not in there}
    forms |= {name for name, marks in MARKS.items() if there.isdisjoint(marks)}
    if NO_PROMPT in there:
        forms.add("READS")
    return targets.left_out(target) | forms | {FEATURES[feature][0] for feature in without}
