"""A runtime that several packages share: a folder with what they use together, and a lock of its own.

A package that shares one has no rooms in its `runtime/`, whose `__init__.py` looks for them there
(`runtime_files.init`): names and imports are those of a package with rooms of its own, and so are the modules, one set
a package. The lock of the shared folder lists the packages with what each uses of the runtime; the files are what
these need together, made by one version of this tool.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import rewrite
from rewrite.errors import NotAPackage, SharedRuntimeNotUsable
from rewrite.package import find, lock_text, runtime_files, syntax, targets
from rewrite.package.lock import Lock, engine_digest, read_lock, sha256
from rewrite.package.lock import without as parsed_without
from rewrite.upstream import source

LOCK_NAME = "runtime.lock"
INIT = "__init__.py"
ATTRIBUTES = ".gitattributes"
"""Written once: it is the user's from then on."""
SCHEMA = 1
_FILE = re.compile(r"\w+\.py")
_DOCSTRING = '"""What the packages listed in runtime.lock share, each as its own `runtime`. Generated with them."""\n'
_ATTRIBUTES = f"*.py linguist-generated\n{LOCK_NAME} linguist-generated\n"


@dataclass(frozen=True)
class User:
    """A package that uses a shared runtime."""

    uses: tuple[str, ...]
    """What its modeling file imports, as `norms.rms_norm`."""
    target: str
    without: tuple[str, ...] = ()
    """What it does not need, keys of `features.FEATURES`."""


@dataclass(frozen=True)
class SharedLock:
    """The content of `runtime.lock`."""

    tool: str
    engine: str
    users: Mapping[str, User]
    """By the way from the shared folder to the package, `../optimized_llama`."""
    files: Mapping[str, str]
    syntax: Mapping[str, str]
    intact: bool = True
    """Whether the file is as this tool wrote it; not part of the file."""

    def as_generated(self, folder: Path, name: str) -> bool:
        """Return whether a file is as it was generated, in whatever layout; not where it is missing."""
        path = folder / name
        return path.is_file() and syntax.unchanged(path, self.files[name], self.syntax.get(name))

    def to_json(self) -> str:
        """Return the text of the file: sorted, one trailing newline."""
        data = {
            "schema": SCHEMA,
            "tool": {"name": "hf-rewrite", "version": self.tool, "engine": self.engine},
            "users": {way: _user(user) for way, user in self.users.items()},
            "files": dict(self.files),
            "syntax": dict(self.syntax),
        }
        return lock_text.dumps({**data, "digest": lock_text.digest(data)})


@dataclass(frozen=True)
class Shared:
    """A shared runtime as it is to be."""

    folder: Path
    lock: SharedLock
    rooms: Mapping[str, bytes]
    """By name in the folder; its lock is no room."""
    before: SharedLock | None
    """The lock that is there now."""
    package: Path | None = None
    """The package that it is made for; None where one leaves it."""

    @property
    def files(self) -> dict[str, bytes]:
        """All that is generated in the folder, by name; nothing where no package uses it any more."""
        if not self.lock.users:
            return {}
        return {**self.rooms, LOCK_NAME: self.lock.to_json().encode("utf-8")}

    @property
    def others(self) -> list[Path]:
        """The other packages that use it."""
        places = [place_of(self.folder, way) for way in self.lock.users]
        return sorted(place for place in places if place != self.package)

    @property
    def moves(self) -> bool:
        """Whether other packages run with the files of another version of this tool until now."""
        return self.before is not None and self.before.engine != self.lock.engine and bool(self.others)

    @property
    def is_new(self) -> bool:
        """Whether it differs from what is there now."""
        return self.before != self.lock


def place_of(folder: Path, way: str) -> Path:
    """Return where a relative way leads from a folder, links resolved."""
    return (folder.resolve() / way).resolve()


def way_to(package: Path, folder: Path) -> str | None:
    """Return the way from a package to the runtime that it is to share; None where that is its own `runtime/`."""
    here, there = package.resolve(), folder.resolve()
    return None if there == here / "runtime" else Path(os.path.relpath(there, here)).as_posix()


def of(package: Path, lock: Lock) -> Path | None:
    """Return the folder of the runtime that a package shares, None if it has its own."""
    return None if lock.options.runtime is None else place_of(package, lock.options.runtime)


def read(folder: Path) -> SharedLock:
    """Read the lock of a shared runtime.

    Raises:
        SharedRuntimeNotUsable: if there is none, or one that cannot be read.
    """
    path = folder / LOCK_NAME
    if not path.is_file():
        raise SharedRuntimeNotUsable(shown(folder), f"it has no {LOCK_NAME}")
    try:
        return _parsed(lock_text.loads(path))
    except lock_text.Malformed as error:
        raise SharedRuntimeNotUsable(shown(folder), f"its {LOCK_NAME} {error}") from error


def for_package(package: Path, way: str, uses: Sequence[str], target: str, without: tuple[str, ...] = ()) -> Shared:
    """Return the runtime that a package shares, with what this package needs.

    Raises:
        SharedRuntimeNotUsable: if the folder can be none: it is in the package or around it, or holds something else.
        UnknownOperator: if the package uses what this version does not offer.
    """
    package, folder = package.resolve(), place_of(package, way)
    before = _before(package, folder)
    users = _still(folder, before.users if before is not None else {}, package)
    own = Path(os.path.relpath(package, folder)).as_posix()
    return _made(folder, {**users, own: User(tuple(sorted(uses)), target, without)}, before, package)


def left(folder: Path) -> Shared | None:
    """Return a shared runtime without the packages that no longer use it; None if nothing changes by that.

    Where it was made by another version, or edited, its files stay, and with them what only those used.

    Raises:
        SharedRuntimeNotUsable: if its lock cannot be read.
    """
    before = read(folder)
    users = _still(folder, before.users, None)
    if users == before.users:
        return None
    if users and before.engine == engine_digest() and not edited(folder, before):
        return _made(folder, users, before, None)
    rooms = {name: (folder / name).read_bytes() for name in before.files if (folder / name).is_file()}
    now = SharedLock(before.tool, before.engine, dict(sorted(users.items())), before.files, before.syntax)
    return Shared(folder, now, rooms, before)


def edited(folder: Path, lock: SharedLock) -> list[str]:
    """Return the files of a shared runtime that no longer say what was generated, or are missing."""
    return [name for name in sorted(lock.files) if not lock.as_generated(folder, name)]


def rooms(package: Path, lock: Lock) -> dict[str, bytes]:
    """Return the rooms that a package shares as its own `runtime/` would have them, by path; none if it shares none.

    Raises:
        SharedRuntimeNotUsable: if they are not there.
    """
    folder = of(package, lock)
    if folder is None or (package / runtime_files.FOLDER / "core.py").is_file():  # a copy that has them
        return {}
    names = [name for name in read(folder).files if name != INIT and (folder / name).is_file()]
    return {f"{runtime_files.FOLDER}{name}": (folder / name).read_bytes() for name in names}


def state(package: Path, lock: Lock) -> str | None:
    """Return what a verdict on a package holds for of a runtime that it shares; None if it shares none.

    As long as nobody edits it that is the version: what other packages add changes nothing for this one.
    """
    folder = of(package, lock)
    if folder is None or (package / runtime_files.FOLDER / "core.py").is_file():
        return None if folder is None else lock.engine
    try:
        there = read(folder)
    except SharedRuntimeNotUsable:
        return ""
    changed = edited(folder, there)
    if not changed:
        return there.engine
    texts = {name: (folder / name).read_bytes() for name in changed if (folder / name).is_file()}
    return sha256("".join([there.engine, *syntax.digests(texts).values()]).encode("utf-8"))


def is_user(package: Path, lock: Lock, there: SharedLock) -> bool:
    """Return whether the lock of a shared runtime lists a package, for the same GPUs and features."""
    folder = of(package, lock)
    user = user_of(package, folder, there) if folder is not None else None
    return user is not None and (user.target, user.without) == (lock.options.target, lock.options.without)


def user_of(package: Path, folder: Path, there: SharedLock) -> User | None:
    """Return what the lock of a shared runtime says of a package, None if it does not list it."""
    return {place_of(folder, way): user for way, user in there.users.items()}.get(package.resolve())


def gone(folder: Path, there: SharedLock) -> list[Path]:
    """Return the packages that the lock of a shared runtime lists and that no longer share it."""
    still = _still(folder, there.users, None)
    return [place_of(folder, way) for way in there.users if way not in still]


def beside(package: Path) -> tuple[list[Path], list[Path]]:
    """Return the other packages in the folder that a package is in, and the runtimes that some share, sorted.

    One that several names of the folder lead to is there once.
    """
    here = package.resolve()
    packages: dict[Path, Lock] = {}
    for path in sorted(here.parent.glob(f"*/{source.LOCK_NAME}"), key=lambda path: (path.parent.is_symlink(), path)):
        if path.parent.resolve() not in {here, *(other.resolve() for other in packages)} and find.is_entered(
            path.parent.name
        ):
            with contextlib.suppress(NotAPackage):
                packages[path.parent] = read_lock(path.parent)
    found = {place for folder, lock in packages.items() if (place := of(folder, lock)) is not None}
    return list(packages), sorted(found)


def _before(package: Path, folder: Path) -> SharedLock | None:
    """Return the lock that is in a folder, None if there is nothing yet.

    Raises:
        SharedRuntimeNotUsable: if it can be no shared runtime of this package.
    """
    if folder.is_relative_to(package) or package.is_relative_to(folder):
        raise SharedRuntimeNotUsable(shown(folder), "it lies in the package, or the package in it")
    if folder.exists() and not folder.is_dir():
        raise SharedRuntimeNotUsable(shown(folder), "it is a file")
    if (folder / LOCK_NAME).is_file():
        return read(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise SharedRuntimeNotUsable(shown(folder), f"it is not empty and has no {LOCK_NAME}")
    return None


def _still(folder: Path, users: Mapping[str, User], package: Path | None) -> dict[str, User]:
    """Return the users whose own lock says that they share the runtime, or cannot be read, less `package`."""
    found = {}
    for way, user in users.items():
        there = place_of(folder, way)
        if there == package or not (there / source.LOCK_NAME).is_file():
            continue
        with contextlib.suppress(NotAPackage):
            if of(there, read_lock(there)) != folder:
                continue
        found[way] = user
    return found


def _made(folder: Path, users: Mapping[str, User], before: SharedLock | None, package: Path | None) -> Shared:
    target = targets.ROCM if any(user.target == targets.ROCM for user in users.values()) else targets.CUDA
    # what another package used and this version has no longer, it uses no longer when it is made anew in the same run
    own = {use for way, user in users.items() if place_of(folder, way) == package for use in user.uses}
    uses = sorted(own | {use for user in users.values() for use in user.uses if runtime_files.is_offered(use)})
    without = frozenset.intersection(*(frozenset(user.without) for user in users.values())) if users else ()
    made = runtime_files.files(runtime_files.closure_of(uses, target, without))
    files = {path.removeprefix(runtime_files.FOLDER): data for path, data in made.items()}
    files[INIT] = _DOCSTRING.encode("utf-8")
    lock = SharedLock(
        tool=rewrite.__version__,
        engine=engine_digest(),
        users=dict(sorted(users.items())),
        files={name: sha256(data) for name, data in sorted(files.items())},
        syntax=syntax.digests(files),
    )
    return Shared(folder, lock, files, before, package)


def attributes() -> bytes:
    """Return the `.gitattributes` of a shared folder."""
    return _ATTRIBUTES.encode("utf-8")


def _parsed(data: lock_text.Table) -> SharedLock:
    schema = data.number("schema")
    if schema != SCHEMA:
        raise lock_text.Malformed(f"has schema {schema} and this version reads {SCHEMA}: update hf-rewrite")
    tool, users, files = data.table("tool"), data.table("users"), data.table("files")
    if foreign := [name for name in files.names() if not _FILE.fullmatch(name)]:
        raise lock_text.Malformed(f"names a file outside its folder: {foreign[0]!r}")
    for way in users.names():
        lock_text.check_way(way)
    return SharedLock(
        tool=tool.text("version"),
        engine=tool.text("engine"),
        users={way: _parsed_user(users.table(way)) for way in users.names()},
        files=files.all_text(),
        syntax=data.table("syntax").all_text(),
        intact=data.optional("digest") == lock_text.digest(data.without("digest")),
    )


def _user(user: User) -> dict[str, object]:
    """As in locks of versions that knew no `without`, where nothing is left out."""
    return {name: value for name, value in asdict(user).items() if name != "without" or value}


def _parsed_user(table: lock_text.Table) -> User:
    return User(table.texts("uses"), table.text("target"), parsed_without(table))


def shown(folder: Path) -> str:
    """Return a folder as a command would name it: relative to the working folder."""
    return Path(os.path.relpath(folder, Path.cwd().resolve())).as_posix()
