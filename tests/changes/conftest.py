"""What `told.watch` puts in the installed runtime, that other tests run on too, is taken back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_rewrite_runtime.decode.prompt_graph import PromptGraph
from hf_rewrite_runtime.decode.step_graph import Program
from hf_rewrite_runtime.forward import forward_settings
from hf_rewrite_runtime.forward.forward_graph import ForwardGraph


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    held = {kind: dict(vars(kind)) for kind in (Program, PromptGraph, ForwardGraph)}
    with forward_settings.use_forward_graphs("auto"):
        yield
    for kind, members in held.items():
        for name in [name for name, value in vars(kind).items() if members.get(name, held) is not value]:
            if name in members:
                setattr(kind, name, members[name])
            else:
                delattr(kind, name)
