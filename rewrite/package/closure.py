"""Which definitions of the runtime a package needs: those that it uses, and all that these read, by definition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rewrite.package import parts
from rewrite.package.parts import Outside, Own, Part

CALLED_BY_NAME = "describe"
"""`explain` looks for this function in every file that is in use."""
CALLED_FROM_OUTSIDE = {
    "aiter/calls": ("forget",),
    "attention/backends": (
        "attend",
        "failure",
        "forget",
        "listen",
    ),
    "attention/named": ("get_attention_backend", "set_attention_backend", "use_attention_backend"),
    "core/arrivals": ("new", "of_graph"),
    "core/tiles": ("forget", "listen", "try_out"),
    "core/compile_ahead": ("compile_all", "variants"),
    "decode/cache_format": ("get_cache_format", "set_cache_format"),
    "decode/graph": ("DecodeGraph",),
    "decode/graph_store": ("release_graphs", "store_of"),
    "forward/store": ("captured_kinds", "release_forwards"),
    "forward/switch": (
        "get_forward_graphs",
        "set_forward_graphs",
        "set_ragged_batches",
        "use_forward_graphs",
        "use_ragged_batches",
    ),
    "loss/chunked_loss": ("use_chunked_loss",),
    "products/gemm": ("PATHS", "by_path", "forget", "listen"),
}
"""What `rewrite tune`, `verify` and `bench`, and users, ask a package for, of the files that are in use."""


@dataclass(frozen=True)
class Closure:
    """What of the runtime goes into a package."""

    parts: frozenset[Part]
    definitions: frozenset[Own]
    without: frozenset[str] = frozenset()
    """The names of `core/target` that the package does not have."""

    @property
    def files(self) -> list[str]:
        """The files of the runtime that something is taken of, `norms/rms_norm`, sorted."""
        return sorted({part.file for part in self.parts})

    @property
    def rooms(self) -> list[str]:
        """The rooms that have something, sorted."""
        return sorted({name.split("/")[0] for name in self.files})


def closure(roots: Iterable[Own], without: frozenset[str] = frozenset()) -> Closure:
    """Return what `roots` need, themselves included, in a package without some names of `core/target`.

    A statement of a file that binds nothing, a call that registers something, goes along with anything of its file.
    """
    waiting = [parts.owner(root) for root in roots]
    reached: set[Part] = set()
    definitions: set[Own] = set()
    seen: set[str] = set()
    while waiting:
        target = waiting.pop()
        if target in definitions:
            continue
        definitions.add(target)
        here = parts.file(target.file)
        found = here.by_name[target.name]
        if here.name not in seen:
            seen.add(here.name)
            found = [*found, *(part for part in here.parts if not part.names or CALLED_BY_NAME in part.names)]
            waiting += [Own(here.name, name) for name in CALLED_FROM_OUTSIDE.get(here.name, ())]
        for part in found:
            if part in reached or parts.is_left_out(part, without):
                continue
            reached.add(part)
            waiting += [Own(part.file, name) for name in part.names]
            waiting += [use.target for use in parts.uses(part, without) if not isinstance(use.target, Outside)]
    return Closure(frozenset(reached), frozenset(definitions), without)
