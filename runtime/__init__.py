"""What rewritten modeling files import: operators, packing, caches and the decode loop.

Generated files import by file. What users call is here by name, and its file is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_FILES = {
    "attention.named_backends": ("get_attention_backend", "set_attention_backend", "use_attention_backend"),
    "core.backend": ("fallbacks", "get_backend", "reset_fallbacks", "set_backend", "use_backend"),
    "core.explanation": ("explain",),
    "decode.cache_format": ("get_cache_format", "set_cache_format"),
    "decode.step_graph": ("DecodeGraph",),
    "decode.graph_cache": ("release_graphs",),
    "forward.forward_cache": ("release_forwards",),
    "forward.forward_settings": (
        "get_forward_graphs",
        "set_forward_graphs",
        "set_ragged_batches",
        "use_forward_graphs",
        "use_ragged_batches",
    ),
    "loss.chunked_loss": ("use_chunked_loss",),
    "rocm.settings": ("configure", "tunable_op"),
}
_PLACES = {name: file for file, names in _FILES.items() for name in names}

if TYPE_CHECKING:
    from .attention.named_backends import get_attention_backend, set_attention_backend, use_attention_backend
    from .core.backend import fallbacks, get_backend, reset_fallbacks, set_backend, use_backend
    from .core.explanation import explain
    from .decode.cache_format import get_cache_format, set_cache_format
    from .decode.graph_cache import release_graphs
    from .decode.step_graph import DecodeGraph
    from .forward.forward_cache import release_forwards
    from .forward.forward_settings import (
        get_forward_graphs,
        set_forward_graphs,
        set_ragged_batches,
        use_forward_graphs,
        use_ragged_batches,
    )
    from .loss.chunked_loss import use_chunked_loss
    from .rocm.settings import configure, tunable_op

__all__ = [
    "DecodeGraph",
    "configure",
    "explain",
    "fallbacks",
    "get_attention_backend",
    "get_backend",
    "get_cache_format",
    "get_forward_graphs",
    "release_forwards",
    "release_graphs",
    "reset_fallbacks",
    "set_attention_backend",
    "set_backend",
    "set_cache_format",
    "set_forward_graphs",
    "set_ragged_batches",
    "tunable_op",
    "use_attention_backend",
    "use_backend",
    "use_chunked_loss",
    "use_forward_graphs",
    "use_ragged_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
