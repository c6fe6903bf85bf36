"""Run by test_export.py where `rewrite` cannot be imported: loads what was exported and saved, and says what it is."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import transformers

IDS = torch.arange(3, 19)[None]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def loaded(auto: str, folder: str) -> Any:
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()


def same(model: Any, other: Any) -> bool:
    with torch.no_grad():
        equal = torch.equal(model(IDS)[0], other(IDS)[0])
        if model.can_generate():
            equal &= torch.equal(model.generate(IDS, **GREEDY), other.generate(IDS, **GREEDY))
    return equal


def report(package: str, auto: str, name: str) -> dict[str, Any]:
    flat = loaded(auto, f"hub_{package}")
    model_class = getattr(importlib.import_module(package), name)
    nested = model_class.from_pretrained(f"hub_{package}").eval()
    model_class.register_for_auto_class(auto)
    nested.save_pretrained(f"saved_{package}")
    saved = loaded(auto, f"saved_{package}")
    return {
        "modules": [type(model).__module__ for model in (flat, nested, saved)],
        "name": type(flat).__name__,
        "equal": same(flat, nested) and same(saved, nested),
    }


for line in sys.argv[1:]:
    print(json.dumps(report(*line.split())))
