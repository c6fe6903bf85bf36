"""What a package would be if it were made now: for `rewrite sync` and `rewrite check`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rewrite import original
from rewrite.build import Build, build
from rewrite.lock import Lock, sha256
from rewrite.package import VERDICT_NAME, Package, assemble
from rewrite.transforms import select


def renewed(folder: Path, lock: Lock, given: Path | None = None) -> tuple[Build, Package]:
    """Rewrite the original of a package as it is now, with the options of its lock.

    Raises:
        OriginalNotFound: if the original is not where the lock says.
    """
    source = original.find_present(folder, lock, given)
    transforms = select(lock.options.only, lock.options.skip)
    built = build(source, transforms)
    return built, assemble(built, transforms, lock.options, folder.resolve(), previous=lock)


def differences(folder: Path, lock: Lock, package: Package) -> list[str]:
    """Return in words what `package` has otherwise than the lock in `folder`; empty if nothing."""
    return list(_differences(lock, package.lock))


def stale_verdict(folder: Path, lock: Lock) -> str | None:
    """Return what is wrong with the verdict that is kept in a package: it failed, or files changed since."""
    path = folder / VERDICT_NAME
    if not path.is_file():
        return None
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
        passed, files = verdict["passed"], dict(verdict["rewritten"]["files"])
    except (ValueError, KeyError, TypeError):
        return f"{VERDICT_NAME} cannot be read: rewrite verify {folder}"
    if not passed:
        return f"{VERDICT_NAME} says that the verification failed"
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256((folder / name).read_bytes()) != digest:
            return f"{name} has changed since it was verified: rewrite verify {folder}"
    return None


def _differences(old: Lock, new: Lock) -> Iterator[str]:
    if old.tool != new.tool:
        yield f"hf-rewrite {old.tool} → {new.tool}"
    if old.source.transformers != new.source.transformers:
        yield f"transformers {old.source.transformers} → {new.source.transformers}"
    for kind, before, now in (
        ("upstream", old.upstream, new.upstream),
        ("transform", old.rules, new.rules),
        ("generated", old.files, new.files),
    ):
        for name in _changed(before, now):
            yield f"{kind} {name}: {'new' if name not in before else 'gone' if name not in now else 'changed'}"


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
