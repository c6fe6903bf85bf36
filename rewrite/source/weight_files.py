"""What a file of weights is to a person who gives it as a model: no code, so a sentence that leads to the code."""

from __future__ import annotations

import struct
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
_STRING = 8
"""GGUF's number for the type of a value that is text."""


def instead(path: Path) -> str | None:
    """Return what to give in place of a file, or of a folder, that holds weights only; None for everything else."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        others = [*path.glob("*.py"), *path.glob("config.json")]
        return _of_gguf(ggufs[0]) if ggufs and not others else None
    if path.suffix.lower() == ".gguf":
        return _of_gguf(path)
    if path.suffix.lower() in WEIGHTS:
        return "it holds weights and no code: give the folder that it lies in, with its config.json"
    return None


def _of_gguf(path: Path) -> str:
    architecture = _architecture(path)
    model = (
        f"its architecture is '{architecture}': try `rewrite {architecture}`"
        if architecture
        else "give its model type"
    )
    return (
        "a GGUF file holds weights for llama.cpp and no code of transformers. A rewrite starts from the model: "
        f"{model}, or give the checkpoint that it was converted from"
    )


def _architecture(path: Path) -> str | None:
    """Return `general.architecture`, which the first entry of a GGUF file names; None where it does not.

    The layout: magic, version (u32), tensors (u64), entries (u64), then key and value, each text with its length.
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        magic, _, _, entries, length = struct.unpack_from("<4sIQQQ", head)
        key = head[32 : 32 + length]
        kind, size = struct.unpack_from("<IQ", head, 32 + length)
        value = head[44 + length : 44 + length + size].decode("ascii")
    except (OSError, struct.error, UnicodeDecodeError):
        return None
    known = magic == b"GGUF" and entries and key == b"general.architecture" and kind == _STRING
    return value if known and value.isidentifier() else None
