"""One family in one process: the original beside the rewritten package, on the same weights, taken in turn.

    python bench/family_run.py NAME PACKAGE ROW.json [--device cuda] [--tiny]

The row is written when the times are known and once more with the parity, so that a process that is stopped has lost
nothing that it measured. Weights are drawn on the device in the model's dtype: matrices with a spread of 1.5 over the
root of their last dimension, embeddings 2.0, everything of one dimension as transformers sets it (norms at one) with a
tenth of a normal number added; so hidden states stay of the order of one and logits are neither flat nor one-hot.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import family_bytes
import family_inputs
from family_sizes import BY_KEY, Family

from rewrite.benchmark.benchmark_models import build, lock_of, sharing
from rewrite.benchmark.benchmark_plan import write_json
from rewrite.measure.limits import bandwidths
from rewrite.measure.runtime_part import runtime_part
from rewrite.measure.timing import interleaved, wall_ms
from rewrite.verify.generation.loop_checks import SWITCH
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants

EAGER, GRAPH = (2, 16), (64, 128)
"""Tokens of the short generation, and how many more the long one has: of a loop of plain calls, and of a graph."""
ROUNDS, SECONDS = (2, 8), 3.0
CONTEXT = 512
BRIEF_CONTEXT, SLOW_PROMPT = 64, 0.5
"""Tokens before where a prompt takes the original longer than so many seconds: token by token, without its kernels.
A slope is the difference of two calls, and would be lost in what their prompts take."""
KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
"""Libraries whose kernels transformers' own hybrids use where they are installed."""
TINY_LENGTHS, TINY_CONTEXT = (2, 4), 80


class Side:
    """A model that generates; `lengths` are the tokens of a short generation, and how many more a long one has."""

    def __init__(self, model: Any, prompt: family_inputs.Prompt, lengths: tuple[int, int]):
        self.model, self.prompt, self.lengths = model, prompt, lengths

    def generate(self, new: int) -> Tensor:
        """Return the `new` greedy tokens `[1, new]` that follow the prompt."""
        with torch.no_grad():
            found: Tensor = self.model.generate(
                **self.prompt.arguments, max_new_tokens=new, do_sample=False, use_cache=True
            )
        return found[:, -new:]


def _slope(side: Side, device: str, _: int) -> float:
    """Return ms per token: what a long generation takes longer than a short one."""
    short, more = side.lengths
    before = wall_ms(device, lambda: side.generate(short))
    return (wall_ms(device, lambda: side.generate(short + more)) - before) / more


@dataclass(frozen=True)
class Classes:
    """A family's class, the rewritten one, and the package's `explain`."""

    original: Any
    rewritten: Any
    explain: Callable[[Any], Any]
    digest: str
    """Of the package's content."""

    @classmethod
    def of(cls, family: Family, package: Path) -> Classes:
        """Import the original and the package, without touching a device."""
        module = importlib.import_module(f"transformers.models.{family.file}.modeling_{family.file}")
        rewritten = loaded_sides.load(loaded_sides.locate(package))
        explain = runtime_part(rewritten.__package__, "core/explanation").explain
        original, ours = getattr(module, family.class_name), getattr(rewritten, family.class_name)
        return cls(original, ours, explain, lock_of(package)["digest"])

    def built(self, family: Family, device: str, tiny: bool) -> tuple[Any, Any]:
        """Return the rewritten model and the original, with the same weights."""
        config = small_config(self.original, family.tiny) if tiny else self.original.config_class(**family.fields)
        model = build(self.rewritten, config, "bfloat16", device)
        if device == "cpu" and hasattr(model, SWITCH):
            setattr(model, SWITCH, True)
        return plain(model), plain(sharing(self.original, model))


def plain(model: Any) -> Any:
    """The model, generating the best token at every place, whatever token that is."""
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        setattr(model.generation_config, name, None)
    return model


def small_config(model_class: Any, fields: dict[str, Any]) -> Any:
    """A tiny configuration, its placeholders at ids of their own."""
    config = small_variants(model_class, model_class.__name__.endswith("CausalLM"), fields)[0].config
    vocab = config.get_text_config(decoder=True).vocab_size
    for index, name in enumerate(sorted(name for name in config.to_dict() if name.startswith(("image_t", "video_t")))):
        if name.endswith(("_token_id", "_token_index")):
            setattr(config, name, vocab - 1 - index)
    return config


def refused(explanation: Any) -> str:
    """Return why the original's loop ran; empty if the decode loop took the call."""
    codes = [what.partition(": ")[2] for what in explanation.fallbacks if what.startswith("generate: ")]
    said = [text for text in explanation.decode_loops.values() if not text.startswith("yes")]
    return ", ".join([*codes, *said])


class Pair:
    """The original and the rewritten model of a family, on the same weights, and what both are fed."""

    def __init__(self, family: Family, classes: Classes, device: str, tiny: bool):
        self.device, self.explain = device, classes.explain
        self.eager_lengths = TINY_LENGTHS if tiny else EAGER
        self.rewritten, self.original = classes.built(family, device, tiny)
        self.prompt = family_inputs.prompt(self.original, family.feed, TINY_CONTEXT if tiny else CONTEXT)
        if not tiny and self._prompt_seconds() > SLOW_PROMPT:
            self.prompt = family_inputs.prompt(self.original, family.feed, BRIEF_CONTEXT)
        self.moved = family_bytes.moved(self.original, self.prompt.arguments)
        self.tokens: dict[str, Tensor] = {}

    def _prompt_seconds(self) -> float:
        side = Side(self.original, self.prompt, EAGER)
        return min(wall_ms(self.device, lambda: side.generate(1)) for _ in range(2)) / 1e3

    def times(self) -> dict[str, Any]:
        """Return ms per token of both sides, and whether the decode loop ran."""
        eager = Side(self.original, self.prompt, self.eager_lengths)
        ours = Side(self.rewritten, self.prompt, self.eager_lengths)
        self.tokens = {name: side.generate(sum(side.lengths)) for name, side in (("eager", eager), ("ours", ours))}
        reason = refused(self.explain(self.rewritten))
        if not reason and self.device != "cpu":
            ours.lengths = GRAPH
            ours.generate(sum(GRAPH))
            reason = refused(self.explain(self.rewritten))
        calls = {name: partial(_slope, side, self.device) for name, side in (("eager", eager), ("ours", ours))}
        found = interleaved(calls, ROUNDS, SECONDS)
        said = str(self.explain(self.rewritten))
        medians = {f"{name}_ms": median(values) for name, values in found.items()}
        return {**medians, "ms": found, "graph": not reason, "reason": reason, "explain": said}

    def parity(self) -> dict[str, Any]:
        """Return errors of the logits and gaps of the tokens, against the original in fp32.

        Every parameter of the original is turned to fp32 where it is, so this comes last and gives the rewritten model
        up, which shares them.
        """
        eager, ours = self.tokens["eager"], self.tokens["ours"]
        own, mine = (logits(model, self.prompt, eager) for model in (self.original, self.rewritten))
        self.rewritten = None
        gc.collect()
        self.original.float()
        exact = replace(self.prompt, arguments={name: _float(value) for name, value in self.prompt.arguments.items()})
        true = logits(self.original, exact, eager)
        same = torch.equal(eager, ours)
        errors, own_gap = (_rms(mine - true), _rms(own - true)), gap(true, eager)
        return {
            "ratio": errors[0] / errors[1] if errors[1] else float(errors[0] > 0),
            "error": errors[0],
            "own_error": errors[1],
            "logits_rms": _rms(true),
            "gap": own_gap if same else gap(logits(self.original, exact, ours), ours),
            "own_gap": own_gap,
            "same_tokens": same,
        }


def measure(family: Family, classes: Classes, row: Path, device: str, tiny: bool) -> None:
    """Measure one family and write its row."""
    started = time.perf_counter()
    torch.backends.cudnn.allow_tf32 = False  # the yardstick's convolutions are in fp32
    read = bandwidths(device)["read"] if device != "cpu" else float("nan")
    pair = Pair(family, classes, device, tiny)
    built = time.perf_counter()
    record = header(family, device, tiny) | {
        "package": classes.digest,
        "prompt": pair.prompt.holds,
        "tokens_before": pair.prompt.tokens,
        "parameter_bytes": sum(parameter.nbytes for parameter in pair.original.parameters()),
        "read_bytes_per_second": read,
        "bytes": vars(pair.moved) | {"total": pair.moved.total},
        "limit_ms": pair.moved.total / read * 1e3,
    }
    record |= pair.times()
    record |= {
        "share": record["limit_ms"] / record["ours_ms"],
        "speed_up": record["eager_ms"] / record["ours_ms"],
        "seconds": {"built": built - started, "timed": time.perf_counter() - built},
    }
    write_json(row, record)
    record["parity"] = pair.parity()
    record["seconds"]["all"] = time.perf_counter() - started
    write_json(row, record)


def logits(model: Any, prompt: family_inputs.Prompt, new: Tensor) -> Tensor:
    """Return the logits `[L, V]` in fp32 of everything that is fed to the decoder."""
    with torch.no_grad():
        found: Tensor = model(**prompt.followed_by(new), use_cache=False).logits[0].float()
    return found


def gap(true: Tensor, tokens: Tensor) -> float:
    """Return how far a chosen token's fp32 logit is below the best one, at most."""
    last = true[-tokens.shape[1] :]
    return float((last.amax(-1) - last.gather(1, tokens[0][:, None])[:, 0]).max())


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _rms(values: Tensor) -> float:
    return float(values.square().mean(dtype=torch.float64).sqrt())


def header(family: Family, device: str, tiny: bool) -> dict[str, Any]:
    """Return what was measured, with what."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if importlib.util.find_spec("triton"):
        versions["triton"] = importlib.metadata.version("triton")
    return {
        "file": family.file,
        "class": family.class_name,
        "published": family.published,
        "cut": family.cut,
        "note": family.note,
        "tiny": tiny,
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "versions": versions,
        "kernels": [name for name in KERNELS if importlib.util.find_spec(name)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(BY_KEY))
    parser.add_argument("package", type=Path)
    parser.add_argument("row", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for any device")
    parser.add_argument("--turn", type=Path, help="a file: whoever holds it has the device, from here to the end")
    given = parser.parse_args()
    family = BY_KEY[given.name]
    classes = Classes.of(family, given.package)
    with given.turn.open("w") if given.turn else contextlib.nullcontext() as turn:
        if turn is not None:
            fcntl.flock(turn, fcntl.LOCK_EX)
        measure(family, classes, given.row, given.device, given.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
