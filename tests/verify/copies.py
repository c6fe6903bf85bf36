"""Copies of transformers' modeling files, made at test time, with planted bugs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rewrite.offers import VENDORED
from rewrite.package import vendored_files

CUSTOM = """
    @classmethod
    def is_custom_code(cls) -> bool:
        return False
"""


def upstream(model: str) -> str:
    """The dotted name of transformers' file."""
    return f"transformers.models.{model}.modeling_{model}"


def source_of(model: str) -> str:
    """The text of transformers' file, its imports made absolute, loading checkpoints as transformers' classes do."""
    spec = find_spec(upstream(model))
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text("utf-8")
    text = re.sub(r"^(\s*)from \.\.\.(\w)", r"\1from transformers.\2", text, flags=re.M)
    text = re.sub(r"^(\s*)from \.\.\. import", r"\1from transformers import", text, flags=re.M)
    text = re.sub(r"^(\s*)from \.\.(\w)", r"\1from transformers.models.\2", text, flags=re.M)
    text = re.sub(r"^(\s*)from \.(\w)", rf"\1from transformers.models.{model}.\2", text, flags=re.M)
    text, count = re.subn(r"^(class \w+\(PreTrainedModel\):\n)", rf"\1{CUSTOM}", text, flags=re.M)
    assert count, f"{model}: no class to override is_custom_code in"
    return text


def write_package(folder: Path, model: str, text: str) -> Path:
    """A package folder with this text as its modeling file."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f'"""A copy of {model}."""\n')
    (folder / f"modeling_{model}.py").write_text(text)
    return folder


def generated(folder: Path, model: str) -> Path:
    """The package of a model as the tool writes it, not verified."""
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(folder)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
    return folder


def planted(text: str, old: str, new: str, count: int = 1) -> str:
    """`text` with the first `count` occurrences of `old` replaced; a substitution without a match is an error.

    Both say `past_key_values`, which transformers' own files call `cache` since release 5.24.
    """
    if "past_key_values" in old and old not in text:
        old, new = (re.sub(r"\bpast_key_values\b", "cache", one) for one in (old, new))
    assert old in text, f"nothing to plant the bug in: {old!r} is not in the file"
    return text.replace(old, new, count)


def plant(package: Path, name: str, old: str, new: str, count: int = 1) -> None:
    """Put a bug into a package, in place.

    Args:
        package: one whose own runtime has the bug, if `name` is of `_runtime`: its files are put beside it first.
        name: a file, or `_runtime`: then it is the one file there that has `old`.
        old: what is replaced.
        new: what takes its place.
        count: how often.
    """
    if name.startswith(VENDORED):
        with_runtime(package)
    place = package / name
    files = (
        [file for file in sorted(place.rglob("*.py")) if old in file.read_text("utf-8")] if place.is_dir() else [place]
    )
    assert len(files) == 1, f"{old!r} is in {[file.name for file in files]} of {name}"
    files[0].write_text(planted(files[0].read_text("utf-8"), old, new, count), "utf-8")


def with_runtime(package: Path) -> None:
    """Put the runtime beside a package, as `rewrite vendor` does."""
    if (package / VENDORED).is_dir():
        return
    texts = {file: file.read_text("utf-8") for file in package.glob("*.py")}
    for name, content in vendored_files.files(texts.values()).items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    for file, text in texts.items():
        file.write_text(vendored_files.relative(text), "utf-8")
