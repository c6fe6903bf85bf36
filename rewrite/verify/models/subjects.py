"""Which model classes of a modeling file are verified, and how thoroughly."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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
        """The class's name in the original."""
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
        from hf_rewrite_runtime.cache.cache_argument import NAMES

        return any(map(self.accepts, NAMES[:2]))


@dataclass(frozen=True)
class Subjects:
    """The class verified in full, the others, and the original's classes that the rewritten file lacks."""

    main: Subject
    others: tuple[Subject, ...]
    missing: tuple[str, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """The classes that have another name in the rewritten file, and that name."""
        pairs = (self.main, *self.others)
        return {pair.name: pair.rewritten.__name__ for pair in pairs if pair.rewritten.__name__ != pair.name}


def find_subjects(original: ModuleType, rewritten: ModuleType, named: str | None = None) -> Subjects:
    """Pair the model classes of two modeling modules by name; one that was renamed with what is like it.

    Args:
        original: the module of the original.
        rewritten: that of the other side.
        named: what the main class is called there, where nothing shows it.

    Raises:
        NothingToBuild: the original defines no model that can be built.
        VerificationError: the other side lacks its main class, or what is said to be it.
    """
    classes = model_classes(original)
    if not classes:
        raise NothingToBuild(original.__name__)
    main = _main_class(classes)
    there = {cls: getattr(rewritten, cls.__name__, None) for cls in classes}
    if named is not None:
        there[main] = getattr(rewritten, named, None)
        if there[main] not in model_classes(rewritten):
            raise VerificationError(f"{rewritten.__name__} defines no model class {named}.")
    new = [
        cls for cls in model_classes(rewritten) if cls not in there.values() and not hasattr(original, cls.__name__)
    ]
    there |= {cls: _renamed(cls, new) for cls, other in there.items() if other is None}
    pairs = [Subject(cls, other, _is_causal(cls)) for cls, other in there.items()]
    missing = tuple(pair.name for pair in pairs if pair.rewritten is None)
    if main.__name__ in missing:
        found = f": it may be {' or '.join(cls.__name__ for cls in new)}, say which (--class NAME)" if new else "."
        raise VerificationError(f"{rewritten.__name__} does not define {main.__name__}{found}")
    others = tuple(pair for pair in pairs if pair.original is not main and pair.name not in missing)
    return Subjects(next(pair for pair in pairs if pair.original is main), others, missing)


def paired(original: ModuleType, rewritten: ModuleType) -> list[Subject]:
    """Every model class that both modules define."""
    classes = [cls for cls in model_classes(original) if hasattr(rewritten, cls.__name__)]
    return [Subject(cls, getattr(rewritten, cls.__name__), _is_causal(cls)) for cls in classes]


def _renamed(cls: Any, new: Iterable[Any]) -> Any | None:
    """Return the class among those of other names that is like a class of the original, None where it is not one.

    It is built from the same configuration, generates or does not, and takes the same arguments or more.
    """

    def like(other: Any) -> bool:
        same_configuration = other.config_class.__name__ == cls.config_class.__name__
        takes, given = (set(inspect.signature(side.forward).parameters) for side in (cls, other))
        return same_configuration and _can_generate(other) == _can_generate(cls) and takes <= given

    found = [other for other in new if like(other)]
    return found[0] if len(found) == 1 else None


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
