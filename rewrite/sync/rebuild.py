"""What a package would be if it were made now: for `rewrite sync` and `rewrite check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rewrite import operators
from rewrite.codemod.build import Build, build
from rewrite.delivery import acceptance, verdict_file
from rewrite.errors import AcceptanceNotReadable, UnknownTransform, UsageError, VerdictNotReadable
from rewrite.offers import VENDORED
from rewrite.package import original, snapshots, vendored_files
from rewrite.package.assemble import VERDICT_NAME, Package, assemble
from rewrite.package.lock import Lock, engine_digest, rule_hashes, sha256
from rewrite.package.syntax import unix_newlines
from rewrite.source import neighbours
from rewrite.source.installed import Installed
from rewrite.source.resolve import Source
from rewrite.sync.site_changes import RuleChange, rule_changes
from rewrite.transform import Transform
from rewrite.transforms import select
from rewrite.typed import typed


@dataclass(frozen=True)
class Renewal:
    """A package made anew, and what it has otherwise than the one that is there."""

    source: Source
    build: Build
    package: Package
    rules: tuple[RuleChange, ...]
    before: str | None
    """Text of the original that the package was made from, None where it was not kept."""

    @property
    def lost(self) -> list[str]:
        """Names of the rules that lost a place."""
        return [change.rule for change in self.rules if change.lost]


def renewed(folder: Path, lock: Lock, source: Source) -> Renewal:
    """Rewrite `source`, the original of a package as it is now, with the options of its lock.

    Args:
        folder: the package.
        lock: its lock.
        source: its original.

    Raises:
        NothingToRewrite: if no rule matches any more.
        UsageError: if the lock asks for a rule that this version does not have.
    """
    at_hand = source
    if source.sha256 == lock.source.sha256:
        # the same file in another version is no change: the package keeps saying what it was made from
        source = replace(source, transformers_version=lock.source.transformers or source.transformers_version)
    transforms = transforms_of(folder, lock)
    built, rules = rebuilt(folder, lock, source)
    package = assemble(built, transforms, lock.options, folder.resolve(), previous=lock)
    if source != at_hand and package.lock.taken != lock.taken:
        # unless what it takes of other files has changed, which the package then has from the version at hand
        source = at_hand
        built, rules = rebuilt(folder, lock, source)
        package = assemble(built, transforms, lock.options, folder.resolve(), previous=lock)
    return Renewal(source, built, package, rules, kept_original(folder, lock))


def rebuilt(folder: Path, lock: Lock, source: Source) -> tuple[Build, tuple[RuleChange, ...]]:
    """Rewrite `source` with the options of a lock, and compare what the rules did with the lock.

    Raises:
        NothingToRewrite: if no rule matches any more.
        UsageError: if the lock asks for a rule that this version does not have.
    """
    built = build(source, transforms_of(folder, lock))
    return built, tuple(rule_changes(lock, built.rewritten.transforms, kept_original(folder, lock), source.text))


def source_of(folder: Path, lock: Lock, given: Path | None = None, library: Installed | None = None) -> Source:
    """Return the original of a package as it is now, from `library` where it is a file of transformers.

    Raises:
        OriginalNotFound: if it is not where the lock says.
    """
    return original.find_present(folder, lock, given, library)


def is_current(folder: Path, lock: Lock, source: Source) -> bool:
    """Return whether a package made now has the bytes that the lock lists, by what decides them: nothing is made.

    Rules, engine (the runtime with it) and original are those of the lock, and nobody edited the lock.
    """
    if not lock.intact or lock.engine != engine_digest() or moved(lock, source):
        return False
    if lock.source.transformers not in (None, source.transformers_version):
        return False  # what the guard is told of it may have moved
    try:
        return dict(lock.rules) == rule_hashes(_selected(folder, lock))
    except UnknownTransform:
        return False


def moved(lock: Lock, source: Source) -> list[str]:
    """Return the names of the files that a package was made from and that have other bytes now, or are gone or new.

    Raises:
        NeighbourMissing, RelativeImport: if the original imports what does not lie beside it.
    """
    files = {lock.source.path: source.sha256}
    if source.imported_as is None:
        files |= {file.name: file.sha256 for file in neighbours.of(source.path, source.text)}
    return sorted(name for name in {*files, *lock.upstream} if files.get(name) != lock.upstream.get(name))


def own_runtime(lock: Lock) -> dict[str, bytes]:
    """Return this version's own text of each file of a vendored runtime that a package has and this version too."""
    own = {f"{VENDORED}/{name}.py": name for name in vendored_files.names()}
    return {path: operators.own_text(name).encode("utf-8") for path, name in own.items() if path in lock.files}


def kept_original(folder: Path, lock: Lock) -> str | None:
    """Return the text of the original that a package was made from, None if it was not kept or is another."""
    data = snapshots.text(folder, f"{lock.modeling}{snapshots.ORIGINAL}")
    if data is None:
        return None
    versions = (data, unix_newlines(data))
    return next((text.decode("utf-8-sig") for text in versions if sha256(text) == lock.source.sha256), None)


def differences(lock: Lock, package: Package) -> list[str]:
    """Return in words what `package` has otherwise than the lock of the one that is there; empty if nothing."""
    said = list(_differences(lock, package.lock))
    if lock.runtime != package.lock.runtime:
        said.append(f"hf-rewrite-runtime {lock.runtime.version or 'in the package'} → {package.lock.runtime.version}")
    return said


def stale_verdict(folder: Path, lock: Lock) -> str | None:
    """Return what is wrong with the verdict that is kept in a package: it failed, or files changed since."""
    try:
        accepted = acceptance.read(folder)
        verdict = verdict_file.read(folder)
    except (AcceptanceNotReadable, VerdictNotReadable) as error:
        return str(error)
    if verdict is None:
        return None
    changed = verdict.changed(folder, verdict_file.importable(lock))
    if verdict.refused and changed is None:
        return f"{VERDICT_NAME} says that what fails was not accepted: {verdict.refused[0]}"
    if accepted is not None and accepted.covers(folder, lock):
        return None
    if not verdict.passed and (raised := verdict.raised):
        many = f"{len(raised)} checks" if len(raised) > 1 else "a check"
        return f"{VERDICT_NAME} says that {many} could not run, which cannot be accepted: {raised[0]}"
    if not verdict.passed and accepted is not None:
        return f"the package is not as it was when `{accepted.reason}` was accepted: {typed('verify', folder)}"
    if not verdict.passed:
        return f"{VERDICT_NAME} says that the verification failed: mend it, or {typed('accept', folder)} --reason TEXT"
    if not verdict.quick_passed:
        return f"{VERDICT_NAME} says that a later quick verification failed: {typed('verify', folder)}"
    if verdict.original["sha256"] != lock.source.sha256:
        return f"the original has changed since it was verified: {typed('verify', folder)}"
    version, digest = vendored_files.runtime()
    if not lock.options.vendored and verdict.runtime["sha256"] != digest:
        return f"it was verified with another hf-rewrite-runtime than this {version}: {typed('verify', folder)}"
    if changed is None:
        return None
    if changed in verdict.covers and (folder / changed).exists():
        return f"{changed} has changed since it was verified: {typed('verify', folder)}"
    return f"{changed} was not there when it was verified, or is not now: {typed('verify', folder)}"


def is_verified(folder: Path) -> bool:
    """Return whether a package was verified at all, or what it changes accepted."""
    return (folder / VERDICT_NAME).is_file() or (folder / acceptance.NAME).is_file()


def _selected(folder: Path, lock: Lock) -> list[Transform]:
    return select(lock.options.only, lock.options.skip, lock.options.also, folder)


def transforms_of(folder: Path, lock: Lock) -> list[Transform]:
    """Return the transforms that the options of a lock choose.

    Raises:
        UsageError: if one is named that this version does not have.
    """
    try:
        return _selected(folder, lock)
    except UnknownTransform as error:
        raise UsageError(
            f"the options in the lock of {folder} cannot be followed: {error} Take its name out of the lock."
        ) from error


def _differences(old: Lock, new: Lock) -> Iterator[str]:
    if old.source.transformers != new.source.transformers:
        yield f"transformers {old.source.transformers} → {new.source.transformers}"
    yield from _changes("upstream", old.upstream, new.upstream)
    if old.tool != new.tool:
        yield f"hf-rewrite {old.tool} → {new.tool}"
    generated = list(_changes("generated", old.files, new.files))
    if generated:
        yield from _changes("transform", old.rules, new.rules)
    yield from generated


def _changes(kind: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        yield f"{kind} {name}: {'new' if name not in before else 'gone' if name not in now else 'changed'}"
