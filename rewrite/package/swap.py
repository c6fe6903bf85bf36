"""Two folders change places in one step, which no kill can come between; and one run at a time writes a folder.

Linux has `renameat2(RENAME_EXCHANGE)`, macOS `renamex_np(RENAME_SWAP)`; some file systems (and Windows) have neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rewrite.errors import OutputBusy, OutputNotOurs, OutputNotWritable, PathNotUsable

_AT_FDCWD = -100
_EXCHANGE = 2
_NOT_THERE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places; False where the system has no such step, and nothing was done.

    Raises:
        OSError: if the system refuses.
    """
    first, second = os.fsencode(one), os.fsencode(other)
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(first, second, _EXCHANGE)
    elif hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_EXCHANGE))
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _NOT_THERE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def resolved(shown: Path) -> Path:
    """Return the output folder `shown` with links resolved.

    Raises:
        PathNotUsable: if its links go round in a circle.
        OutputNotOurs: if it is the root of the file system.
    """
    try:
        folder = Path(os.path.expanduser(shown)).resolve()
    except RuntimeError as error:  # what Python before 3.13 makes of a circle
        raise PathNotUsable(shown, "its links go round in a circle") from error
    if not folder.name:
        raise OutputNotOurs(shown, "is the root of the file system", forcible=False)
    return folder


def claim(folder: Path) -> Path:
    """Return the file beside `folder` that a run locks while it writes."""
    return folder.with_name(f".{folder.name}.rewrite-busy")


@contextlib.contextmanager
def alone(shown: Path) -> Iterator[None]:
    """Keep other runs from writing the same folder during the block.

    The claim is a lock on `.<name>.rewrite-busy` beside the folder, which the system lets go of when a run is killed:
    the file that is left then, with the number of its process, is in nobody's way.

    Raises:
        OutputBusy: if another run has it.
        OutputNotWritable: if the place cannot be written.
    """
    folder = resolved(shown)
    path = claim(folder)
    if os.name != "posix" or not folder.parent.is_dir():
        yield
        return
    fcntl = importlib.import_module("fcntl")
    try:
        handle = _claimed(fcntl, path)
    except BlockingIOError as error:
        raise OutputBusy(shown, _owner(path)) from error
    except OSError as error:
        raise OutputNotWritable(shown, error.strerror or str(error)) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _claimed(fcntl: object, path: Path) -> int:
    """Return a handle of the locked file; again where another run removed the file between opening and locking."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined]
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                os.truncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _owner(path: Path) -> str:
    """Return the number of the process that has locked a file, as it wrote it there; nothing where it has not yet."""
    try:
        return path.read_text("utf-8", "replace")[:20].strip()
    except OSError:
        return ""
