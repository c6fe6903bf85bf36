"""Saving and uploading a model of a package: the files that go along are flat, as transformers loads them."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from ..core.explain import LeftOut
from ..core.target import UPLOAD
from .auto import models_of
from .flat import flat_files


def save_flat(module: ModuleType) -> None:
    """Make `save_pretrained` of the model classes in `module` write flat files where it writes code at all.

    It does for a class that was registered (`register_for_auto_class`), and would copy a file that imports folders,
    which transformers neither copies nor loads. Only these classes are changed.
    """
    models = models_of(module)
    for model in models:
        if not any(base in models for base in model.__bases__):  # the others have it from these
            model.save_pretrained = _saving_flat(model.save_pretrained, module)


def _saving_flat(save: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if self._auto_class is None or type(self).__module__ != module.__name__:
            return save(self, *args, **kwargs)
        if UPLOAD:
            return _with_flat_files(functools.partial(save, self, *args, **kwargs), module)
        raise LeftOut("upload")

    return save_pretrained


def _with_flat_files(save: Callable[[], Any], module: ModuleType) -> Any:
    """Save while the module seems to lie among flat files."""
    path = Path(str(module.__file__))
    runtime = getattr(sys.modules.get(f"{module.__package__}.runtime"), "__path__", ())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in flat_files(path.parent, path.name, [Path(place) for place in runtime]).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        module.__file__ = str(Path(folder) / path.name)  # what transformers copies, with all that it imports
        try:
            return save()
        finally:
            module.__file__ = str(path)
