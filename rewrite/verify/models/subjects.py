"""Which model classes of a modeling file are verified, and how thoroughly."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hf_rewrite_runtime.cache.names import NAMES

from rewrite.errors import NothingToBuild, VerificationError

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Subject:
    """One class on both sides."""

    original: Any
    rewritten: Any
    causal: bool

    @property
    def name(self) -> str:
        """The class's name, the same on both sides."""
        return str(self.original.__name__)

    @property
    def writes(self) -> bool:
        """Whether it goes on with a text: a causal language model, or one that generates and has no encoder's text."""
        return self.causal or (_can_generate(self.original) and not self.accepts("decoder_input_ids"))

    @property
    def config_class(self) -> Any:
        """The configuration class of the original."""
        return self.original.config_class

    def accepts(self, argument: str) -> bool:
        """Whether the original's `forward` names this argument."""
        return argument in inspect.signature(self.original.forward).parameters

    def may_be_given(self, argument: str) -> bool:
        """Whether the original's `forward` names this argument, or takes any."""
        takes = inspect.signature(self.original.forward).parameters
        return argument in takes or any(taken.kind is taken.VAR_KEYWORD for taken in takes.values())

    @property
    def takes_cache(self) -> bool:
        """Whether the original's `forward` names a cache that holds keys and values."""
        return any(map(self.accepts, NAMES[:2]))


@dataclass(frozen=True)
class Subjects:
    """The class verified in full, the others, and the original's classes that the rewritten file lacks."""

    main: Subject
    others: tuple[Subject, ...]
    missing: tuple[str, ...]


def find_subjects(original: ModuleType, rewritten: ModuleType) -> Subjects:
    """Pair the model classes of two modeling modules by name.

    Raises:
        NothingToBuild: the original defines no model that can be built.
        VerificationError: the other side lacks its main class.
    """
    classes = model_classes(original)
    if not classes:
        raise NothingToBuild(original.__name__)
    main = _main_class(classes)
    pairs = [Subject(cls, getattr(rewritten, cls.__name__, None), _is_causal(cls)) for cls in classes]
    missing = tuple(pair.name for pair in pairs if pair.rewritten is None)
    if main.__name__ in missing:
        raise VerificationError(f"{rewritten.__name__} does not define {main.__name__}.")
    others = tuple(pair for pair in pairs if pair.original is not main and pair.name not in missing)
    return Subjects(next(pair for pair in pairs if pair.original is main), others, missing)


def paired(original: ModuleType, rewritten: ModuleType) -> list[Subject]:
    """Every model class that both modules define."""
    classes = [cls for cls in model_classes(original) if hasattr(rewritten, cls.__name__)]
    return [Subject(cls, getattr(rewritten, cls.__name__), _is_causal(cls)) for cls in classes]


def model_classes(module: ModuleType) -> list[Any]:
    """The buildable `PreTrainedModel` subclasses that a module defines, in file order."""
    from transformers import PreTrainedModel

    found: list[Any] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
    ]
    return [cls for cls in found if cls.config_class is not None and cls.forward is not PreTrainedModel.forward]


def _is_causal(cls: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return cls.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or cls.__name__.endswith(CAUSAL_SUFFIXES)


def _main_class(classes: list[Any]) -> Any:
    causal = [cls for cls in classes if _is_causal(cls)]
    generating = [cls for cls in classes if _can_generate(cls)]
    bases = [cls for cls in classes if cls.__name__.endswith("Model")]
    return (causal or generating or bases or classes)[0]


def _can_generate(cls: Any) -> bool:
    return bool(getattr(cls, "can_generate", bool)())
