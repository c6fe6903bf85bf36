"""A model of the Hub by its name, `org/name`: its configuration and, where trusted, its code; never weights."""

from __future__ import annotations

import re
from pathlib import Path

from rewrite.errors import MissingLibrary, NeighbourMissing, NotOnTheHub
from rewrite.source import neighbours

SCHEME = "hf://"
"""Begins the original in a lock where it is a file of the Hub: `hf://org/name@commit/modeling_x.py`."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w")


def is_name(target: str) -> bool:
    """Return whether a word has the form of a name on the Hub."""
    return _NAME.fullmatch(target) is not None and not target.endswith((".py", ".json", ".gguf"))


def file(name: str, path: str, revision: str | None) -> Path:
    """Return a file of the model `name`, from the cache of huggingface_hub or downloaded to it.

    Args:
        name: `org/name`.
        path: in the repository, `config.json`.
        revision: branch, tag or commit; None is the main one.

    Raises:
        NotOnTheHub: if it cannot be had.
        MissingLibrary: if huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import errors, hf_hub_download, logging
    except ImportError as error:
        raise MissingLibrary("huggingface_hub", f"taking '{name}' from the Hub") from error
    logging.set_verbosity_error()  # what it tries again is not our user's to read
    try:
        return Path(hf_hub_download(name, path, revision=revision))
    except errors.LocalEntryNotFoundError as error:
        why = f"{path} is not in its cache, and the Hub cannot be reached (or HF_HUB_OFFLINE is set)"
        raise NotOnTheHub(name, why, download=True) from error
    except errors.GatedRepoError as error:
        raise NotOnTheHub(name, "its licence has to be accepted on its page, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        why = "the Hub has no such model, or it is private (`hf auth login`); nor is there such a file or folder here"
        raise NotOnTheHub(name, why) from error
    except errors.RevisionNotFoundError as error:
        raise NotOnTheHub(name, f"it has no revision '{revision}'") from error
    except errors.EntryNotFoundError as error:
        raise NotOnTheHub(name, f"it has no {path}", missing=path) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise NotOnTheHub(name, str(error).splitlines()[0], download=True) from error


def code(name: str, path: str, revision: str | None) -> Path:
    """Return a modeling file of the model `name`, in a folder with the files that it imports.

    Raises:
        NotOnTheHub: if it cannot be had.
        NeighbourMissing: if a file that it imports is not in the repository.
        RelativeImport, SourceDoesNotParse: if one cannot be read.
    """
    modeling = file(name, path, revision)
    commit = commit_of(modeling)
    waiting, seen = [path], {path}
    while waiting:
        one = waiting.pop()
        place = file(name, one, commit)
        for wanted in neighbours.imports(place, one, place.read_text(encoding="utf-8", errors="replace")):
            if (needed := wanted.places[0]) in seen:
                continue
            seen.add(needed)
            try:
                file(name, needed, commit)
            except NotOnTheHub as error:
                if wanted.optional:  # offline nobody knows whether the repository has it
                    continue
                if error.missing is None:
                    raise
                raise NeighbourMissing(f"{name}/{one}", wanted.statement, needed) from error
            waiting.append(needed)
    return modeling


def commit_of(path: Path) -> str:
    """Return the commit that a file in the cache is of: the cache has a folder for each."""
    return path.parent.name


def origin(name: str, path: Path) -> str:
    """Return what a lock says of a modeling file of the Hub."""
    return f"{SCHEME}{name}@{commit_of(path)}/{path.name}"
