"""One base error; a class where several places raise it or one catches it, else `UsageError` with the message at hand.

A message says what was asked, what was found, where, and what to do next.

Exit codes of the command: 0 done, 1 a difference or a failed verification, 2 usage, 3 a bug of ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rewrite.typed import typed

LONGEST_PATH = 200
"""Characters of a path that a message shows in full."""


class RewriteError(Exception):
    """Base of every error that a user can act on; `exit_code` is what the command returns."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Let an error cross to another process: its message was built from arguments that it does not keep."""
        return _again, (type(self), self.args)


def shortened(path: object) -> str:
    """Return a path, its middle left out where it is very long."""
    text = str(path)
    return text if len(text) <= LONGEST_PATH else f"{text[:60]}...{text[-20:]}"


def _again(kind: type[RewriteError], args: tuple[Any, ...]) -> RewriteError:
    error = kind.__new__(kind)
    error.args = args
    return error


class UsageError(RewriteError):
    """The request itself cannot be carried out."""

    exit_code = 2


class PathNotUsable(UsageError):
    """A path that was given is one that the system refuses: too long, a circle of links, not ours to read."""

    def __init__(self, path: object, why: str):
        super().__init__(f"cannot use the path {shortened(path)}: {why}")


class ConfigurationNotUsable(UsageError):
    """The table of pyproject.toml names an option that there is not, or gives one a wrong value."""

    def __init__(self, path: object, where: str, why: str):
        super().__init__(f"{shortened(path)}: {where}: {why}")


class StreamLost(RewriteError):
    """Standard output or standard error cannot be written."""

    def __init__(self, stream: str, why: str):
        super().__init__(f"cannot write to {stream}: {why}. The run ended there.")


class UnknownModel(UsageError):
    """MODEL is neither a model type, nor a class, nor a file, nor a module, nor a checkpoint folder."""

    def __init__(self, model: str, known: Sequence[str]):
        near = close(model.rpartition(".")[2].removeprefix("modeling_") or model, known)
        kinds = (
            "it is no model type or class of transformers (`rewrite models` lists the types), no file, no module, no "
            "folder with a config.json and no ORG/NAME of the Hub."
        )
        said = f"did you mean {', '.join(near)}?" if near else kinds
        if model.startswith(("./", "../", "/", "~/")):
            said = "there is no such file or folder."
        if "://" in model:
            said = (
                "a model on the Hub is named ORG/NAME, without the address; other files have to be downloaded first."
            )
        super().__init__(f"no model '{model}': {said}")


def close(word: str, known: Sequence[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return what of `known` a word may be a misspelling of, in any case, the closest first."""
    spelled = {name.lower(): name for name in reversed(known)}
    return [spelled[name] for name in difflib.get_close_matches(word.lower(), spelled, most, cutoff)]


class OutsideTransformNotLoadable(UsageError):
    """A transform that the user brings cannot be used."""

    def __init__(self, where: str, why: str):
        super().__init__(f"cannot load a transform of your own, {where}: {why}")


class CheckpointNotUsable(UsageError):
    """A checkpoint folder does not say which model it holds, or holds another one than was asked for."""

    def __init__(self, folder: object, why: str):
        super().__init__(f"cannot use the checkpoint {folder}: {why}")


EXTRAS = {
    **dict.fromkeys(("coverage", "hf_rewrite_runtime", "torch", "transformers", "triton"), "'hf-rewrite[verify]'"),
    "huggingface_hub": "'hf-rewrite[hub]'",
    **dict.fromkeys(("jinja2", "matplotlib"), "'hf-rewrite[report]'"),
}
"""What brings a library that `pip install hf-rewrite` alone does not."""


class MissingLibrary(UsageError):
    """A library that the request needs is not installed."""

    def __init__(self, library: str, needed_for: str, instead: str = ""):
        brought_by = EXTRAS.get(library, "hf-rewrite")
        super().__init__(f"{library} is not installed and {needed_for} needs it: pip install {brought_by}{instead}")


class MissingTransformers(MissingLibrary):
    """No transformers is installed to read from; another can be named where the command has the option."""

    def __init__(self, needed_for: str):
        super().__init__(
            "transformers",
            needed_for,
            ", or name one to read: --transformers VERSION|PATH|project (`project` looks in .venv, venv and env of "
            "this folder and those above, then beside each Python on PATH)",
        )


class NoKernelRecord(UsageError):
    """A file or folder does not hold what `python -m rewrite.kernels --record` wrote."""

    def __init__(self, path: object, why: str):
        super().__init__(
            f"{shortened(path)} is no record of kernels: {why} (`python -m rewrite.kernels --record` makes one)."
        )


class NeedsGpu(UsageError):
    """Something is to be tuned where it cannot run."""

    def __init__(self, why: str):
        super().__init__(f"tuning measures kernels on a GPU, and {why}: run it where the model will run.")


class NothingToTune(UsageError):
    """A package has no decode step whose kernels have tables."""

    def __init__(self, what: str, why: str):
        super().__init__(f"{what} cannot be tuned: {why}.")


class SourceNotReadable(UsageError):
    """The modeling file cannot be read as Python text."""

    def __init__(self, path: object, why: str):
        super().__init__(f"cannot read {path}: {why}")


class SourceDoesNotParse(UsageError):
    """The modeling file is not valid Python."""

    def __init__(self, path: object, line: int, why: str):
        super().__init__(f"{path}:{line}: does not parse as Python: {why}")


class SourceTooDeep(UsageError):
    """The modeling file is nested deeper than what can be walked."""

    def __init__(self, path: object, line: int):
        super().__init__(f"{path}:{line}: nested too deeply to be rewritten: make it flatter (each `elif` is a level)")


class AlreadyRewritten(UsageError):
    """The source given is an output of this tool."""

    def __init__(self, path: object):
        super().__init__(
            f"{path} was already rewritten (its header says so): give the original file or its model type instead."
        )


class NothingToRewrite(RewriteError):
    """No transform matched anything, so there is nothing to write."""

    def __init__(self, path: object, reasons: Iterable[str], layers: Sequence[str] = ()):
        found = "; ".join(reasons) or "no candidate of any transform"
        hint = f" Its layers are in {', '.join(layers)}: rewrite {layers[0]}" if layers else ""
        super().__init__(f"nothing to rewrite in {path}: {found}. Nothing was written.{hint}")


class UnknownTransform(UsageError):
    """`--only`, `--skip` or `explain` names a transform that does not exist."""

    def __init__(self, name: str, known: Sequence[str]):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
        super().__init__(f"no transform '{name}': {hint}")


class OutputNotOurs(UsageError):
    """The output folder holds something that this tool did not write."""

    def __init__(self, path: object, why: str, *, forcible: bool = True, option: str = "--out"):
        force = ", or --force to replace it (what is there is kept beside it as a backup)" if forcible else ""
        super().__init__(f"{shortened(path)} {why}: choose another {option}{force}.")


class NotCommittable(UsageError):
    """A package cannot be committed."""

    def __init__(self, folder: object, why: str):
        super().__init__(f"--commit: {shortened(folder)}: {why}.")


class OutputNotWritable(RewriteError):
    """Writing the output failed; the folder that was there before is untouched."""

    def __init__(self, path: object, why: str):
        super().__init__(f"cannot write {shortened(path)}: {why}. What was there before is unchanged.")


class NotAPackage(UsageError):
    """A folder given to diff, verify or bench is not a package that this tool wrote."""

    def __init__(self, path: object, why: str):
        super().__init__(f"{path} is not a rewritten package: {why}.")


class NotASweep(UsageError):
    """A file that is to hold the table of a sweep holds something else."""

    def __init__(self, path: object, why: str):
        super().__init__(f"{path} is no table of `python -m rewrite.sweep --json`: {why}.")


class OriginalNotFound(RewriteError):
    """The original of a package is not where its lock says."""

    def __init__(self, folder: object, name: str, sha256: str):
        super().__init__(
            f"the original of {folder}, {name} (sha256 {sha256[:12]}…), is not where its lock says: "
            "name it with --original FILE."
        )


class NotExportable(UsageError):
    """A package cannot be written in the form that loads from the Hub."""

    def __init__(self, folder: object, why: str):
        super().__init__(f"{folder} cannot be exported: {why}.")


class ReleaseNotFound(UsageError):
    """`--transformers` names a version or a place where there is no transformers."""

    def __init__(self, asked: str, why: str):
        super().__init__(f"no transformers '{asked}': {why.rstrip('.')}.")


class BaseLost(UsageError):
    """The text that a merge starts from is not the one that was generated, so edits could not be told from it."""

    def __init__(self, folder: object, name: str):
        super().__init__(
            f"{folder}/{name} is missing or was edited, and your edits cannot be told from the generated text without "
            "it: take it from version control. Nothing was changed."
        )


class ChangedMeanwhile(RewriteError):
    """Somebody changed a package while it was being made anew."""

    def __init__(self, folder: object, name: str):
        super().__init__(
            f"{folder}/{name} changed while the package was being made anew: it was left alone. Try again."
        )


class OutputBusy(RewriteError):
    """Another run is about to replace the same folder."""

    def __init__(self, folder: object, process: str = ""):
        which = f" (process {process})" if process.isdecimal() else ""
        super().__init__(f"another run{which} is writing {folder}: nothing was changed. Wait for it and try again.")


class EditsBroken(RewriteError):
    """The user's text, or what a merge makes of it, would not work, so nothing was put in place."""

    def __init__(self, folder: object, name: str, problems: Sequence[str]):
        super().__init__(
            f"{folder}/{name} was left as it is: with your edits, {'; '.join(problems)}. "
            "Change the edit, then try again."
        )


class TransformError(RewriteError):
    """A transform failed unexpectedly at one site: a bug of ours."""

    exit_code = 3

    def __init__(self, transform: str, where: str, why: str):
        super().__init__(f"transform {transform} failed at {where}: {why}. This is a bug: please report it.")


class GateFailed(TransformError):
    """The generated package does not import, so it was not put in place: a bug of ours or an unusual source."""

    def __init__(self, path: object, why: str):
        RewriteError.__init__(self, f"the rewritten {path} failed its import check and was not put in place: {why}")


class SourceDoesNotImport(RewriteError):
    """A modeling file that the user gave cannot be imported with the installed libraries."""

    exit_code = 2

    def __init__(self, path: object, why: str):
        missing = re.search(r"No module named '(\w+)'", why)
        hint = "A file for another release needs that one installed"
        if missing and Path(str(path)).with_name(f"{missing[1]}.py").is_file():
            hint = f"{missing[1]}.py lies beside it: `from .{missing[1]} import …` takes it along"
        super().__init__(
            f"{path} itself cannot be imported here: {why}. {hint}; --no-verify writes the package without the proof."
        )


class NotAcceptable(RewriteError):
    """What fails in a verification is no change of numbers that could be recorded."""

    def __init__(self, folder: object, why: str):
        super().__init__(f"nothing was accepted of {shortened(folder)}: {why}")


class AcceptanceNotReadable(RewriteError):
    """The record of accepted changes was edited or merged badly."""

    def __init__(self, path: object):
        super().__init__(
            f"{shortened(path)} is not as `rewrite accept` wrote it: take it from version control, or accept again."
        )


class VerdictNotReadable(RewriteError):
    """A kept verdict was edited or merged badly, or is of an earlier version, which wrote it in another form."""

    def __init__(self, folder: object, name: str):
        super().__init__(
            f"{name} cannot be read, or is of another version of hf-rewrite: {typed('verify', shortened(folder))}"
        )


class VerificationError(RewriteError):
    """A verification could not be carried out (a failed verification is a verdict, not an error)."""


class NothingToBuild(VerificationError):
    """The original has no model that the verifier could make."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} has no model class with a configuration (a PreTrainedModel whose `config_class` is set, with a "
            "`forward`), so there is nothing to verify with. --no-verify writes the package without the proof."
        )


class RelativeImport(UsageError):
    """A modeling file from outside transformers has a relative import that cannot work in a package."""

    def __init__(self, path: object, statement: str, why: str):
        super().__init__(f"{path} says `{statement}`, {why}: make the import absolute, or move or rename the file.")


class NotOnTheHub(UsageError):
    """A file of a model on the Hub cannot be had."""

    def __init__(self, name: str, why: str, download: bool = False, missing: str | None = None):
        hint = f" Download it where there is a network, and give the folder: hf download {name} --include config.json "
        hint += f"'*.py' --local-dir {name.rpartition('/')[2]}"
        super().__init__(f"cannot take '{name}' from the Hub: {why}.{hint if download else ''}")
        self.missing = missing
        """The file that the repository does not have, if that is what is wrong."""


class NeighbourMissing(UsageError):
    """A modeling file imports a file beside it that is not there."""

    def __init__(self, path: object, statement: str, name: str):
        super().__init__(
            f"{path} says `{statement}`, and there is no {name} beside it: put that file there (of a model on the "
            "Hub, download all its .py files)."
        )


class SideNotFound(VerificationError):
    """One of the two modeling files to compare is not there, or which one is meant is not clear."""

    exit_code = 2

    def __init__(self, side: object, found: str) -> None:
        super().__init__(
            f"no modeling file at {str(side)!r}: {found}. "
            "Name a package folder with one modeling_*.py, a modeling_*.py file, or a dotted module name."
        )
