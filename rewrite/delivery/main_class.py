"""Which class of a modeling file people load: the one that a summary begins with.

By what the Auto classes of transformers build for the model type, those that take the most first: a model that reads
images or sound, or has an encoder, is loaded as that and not as the decoder alone; a model with a masked language head
is an encoder. For a file that transformers does not know, by what its classes take and whether they generate.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rewrite.source.auto_classes import auto_classes
from rewrite.source.installed import Installed

if TYPE_CHECKING:
    from rewrite.source.resolve import Source

AUTOS = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForTextToWaveform",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModel",
)
"""What builds the class that people load, in the order in which they are asked."""
_BASES = ("PreTrainedModel", "GenerationMixin")


def headline(source: Source, generates: Iterable[str]) -> str:
    """Return the class of `source` that people load, empty where it defines none.

    Args:
        source: the modeling file.
        generates: its classes that generate, in the order of the file.
    """
    classes = _classes(ast.parse(source.text))
    if source.target in classes:
        return source.target
    built = _built(source, classes)
    generating = [name for name in generates if name in classes]
    return next(iter([*built, *_by_what_they_take(classes, generating), *_bases(classes)]), "")


def _built(source: Source, classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Return what the Auto classes build of a file of transformers, what takes the most first."""
    if source.transformers_root is None or source.model_type is None or source.transformers_version is None:
        return []
    installed = Installed(source.transformers_root, source.transformers_version)
    if source.model_type not in installed.model_types:
        return []
    found = auto_classes(installed, source.model_type, classes)
    return [found[auto] for auto in AUTOS if auto in found]


def _by_what_they_take(classes: Mapping[str, ast.ClassDef], generating: list[str]) -> list[str]:
    """Return the classes that generate, those first whose `forward` takes more than the text that they go on with."""
    return sorted(generating, key=lambda name: not _takes_more(classes[name]))


def _takes_more(node: ast.ClassDef) -> bool:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "forward":
            names = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
            return bool(names & {"decoder_input_ids", "pixel_values", "input_features", "input_values"})
    return False


def _bases(classes: Mapping[str, ast.ClassDef]) -> list[str]:
    models = [name for name, node in classes.items() if not name.endswith(_BASES) and node.bases]
    whole = [name for name in models if name.endswith("Model")]
    return [name for name in whole if f"{name.removesuffix('Model')}PreTrainedModel" in classes] or whole


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
