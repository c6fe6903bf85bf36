"""Compiles the kernels that a package launches for one card, in a process that pretends to be there, or is.

The model is built in the memory of this machine without weights, with as many layers as have each of its kinds once,
and its steps and prompts are run by the package's own code. Operators choose kernels, tiles and options as they would
on the card; what they would launch is collected and compiled into Triton's cache, under the key that a launch there
has. Where the card is here, the steps and prompts are captured as by `generate()`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching.precompiled import GROUP
from rewrite.errors import VerificationError
from rewrite.measure.runtime_part import runtime_part

from .cards import Card
from .chips import Chip
from .compile_work import Driver

MARK = "compiled "
"""Begins the lines for `ahead`: compilers print what they like."""
BUILDS = "REWRITE_BUILDS_LAUNCHERS"
"""Set to 1 for a process that can build C functions: there is a compiler, and something to link with."""
PROMPT = 128
"""Tokens; kernels of longer prompts are the same, as far as their tiles are."""
SMALL = 1 << 22
"""Bytes up to which tensors are zeroed; larger ones are fresh from the system, which has zeroed them."""


def work(
    package: str, original: str | None, chip: Mapping[str, Any] | None, card: Mapping[str, Any],
    config: Mapping[str, Any], dtype: str, batches: Sequence[int], contexts: Sequence[int],
) -> None:  # fmt: skip
    """Compile, and print a line for each kernel.

    Args:
        package: its folder.
        original: of `models.load`.
        chip: the fields of a `Chip`; None for the GPU that is here.
        card: those of a `Card`.
        config: `shape`, or `path` of a checkpoint.
        dtype: of the weights.
        batches: rows.
        contexts: tokens, with those to come, that caches hold.
    """
    torch = importlib.import_module("torch")
    triton = importlib.import_module("triton")
    if chip is None:
        _work_here(package, original, config, dtype, batches, contexts)
        return
    target = Chip(**chip)
    if target.backend == "hip":  # what a runtime asks as it is imported
        torch.version.hip = "0"
    triton.runtime.driver.set_active(Driver(target))
    subject = _subject(package, original)
    runtime = str(importlib.import_module(subject.rewritten.__module__).__package__)
    launch = runtime_part(runtime, "launching/launch")
    launch._pretended = launch.Target(target.backend, target.arch, target.processors, target.shared_of_group)
    _take_tables(runtime, Card(**card).device)
    model = _model(subject, config, dtype)
    jobs: dict[Any, Any] = {}
    with torch.no_grad():
        for batch in batches:
            for context in contexts:
                jobs |= _launches(runtime, model, batch, context)
    for number, job in enumerate(jobs.values()):
        compiled = job()
        if target.backend == "cuda":
            _build_launcher(compiled)
        name = _name_of(job.kernel.jit_function.__name__)
        print(MARK + json.dumps([name, target.arch, number + 1, len(jobs)]), flush=True)


def _work_here(
    package: str, original: str | None, config: Mapping[str, Any], dtype: str, batches: Sequence[int],
    contexts: Sequence[int],
) -> None:  # fmt: skip
    """Capture steps and prompts on the GPU that is here, and print a line for each kernel in Triton's cache then."""
    import torch

    subject = _subject(package, original)
    runtime = str(importlib.import_module(subject.rewritten.__module__).__package__)
    graphs, sampling = runtime_part(runtime, "decode/step_graph"), runtime_part(runtime, "sampling/sampling")
    models = importlib.import_module("rewrite.benchmark.benchmark_models")
    model = models.build(subject.rewritten, _configuration(subject, config, dtype), dtype, "cuda")
    for batch in batches:
        for context in contexts:
            graph = graphs.DecodeGraph(model, batch, context)
            graph.prefill(torch.ones(batch, min(PROMPT, context // 2), dtype=torch.int64, device="cuda"))
            for greedy in _greedy(sampling, model):
                graph.program(greedy)
            graph.release()
    arch = runtime_part(runtime, "launching/launch").target(torch.cuda.current_device()).arch
    names = names_in(Path(os.environ["TRITON_CACHE_DIR"]))
    for number, name in enumerate(names):
        print(MARK + json.dumps([name, arch, number + 1, len(names)]), flush=True)


def names_in(cache: Path) -> list[str]:
    """Return the name of each kernel in a cache on disk of Triton's, once for each of its variants."""
    return [_name_of(group.stem.removeprefix(GROUP)) for group in sorted(cache.glob(f"*/{GROUP}*.json"))]


def _name_of(function: str) -> str:
    """Return the name that is told of a kernel, by that of its function, `_rms_norm_kernel`."""
    return function.strip("_").removesuffix("_kernel")


def _subject(package: str, original: str | None) -> Any:
    """Return the classes of a package.

    Raises:
        VerificationError: its main class reads more than a text, or generates none.
    """
    models = importlib.import_module("rewrite.benchmark.benchmark_models")
    try:
        return models.load(Path(package), original)
    except VerificationError as error:
        raise VerificationError(f"only models of text alone are compiled ahead of time ({error})") from error


def _take_tables(runtime: str, device: str) -> None:
    """Let tiles be those that were measured on a card, in the runtime's tables and in `tuned.json`."""
    tables, tiles = runtime_part(runtime, "launching/card_tables"), runtime_part(runtime, "launching/tiles")
    entries = dict(tiles.MEASURED.get(device, {}))
    tuned = tables.read(tables.TUNED).get(device, {})
    entries |= {name: None if found is None else tuple(map(int, found)) for name, found in tuned.items()}
    tiles.try_out(entries)


def _configuration(subject: Any, given: Mapping[str, Any], dtype: str) -> Any:
    """Return the configuration, of fewer layers."""
    import torch

    if given.get("path"):
        config = subject.original.config_class.from_pretrained(given["path"])
    else:
        presets = importlib.import_module("rewrite.measure.presets")
        config = presets.config_for(subject.original.config_class, given["shape"])
    with torch.device("meta"):
        whole = subject.rewritten._from_config(copy.deepcopy(config), dtype=getattr(torch, dtype))
    return shortened(config, whole)


def _model(subject: Any, given: Mapping[str, Any], dtype: str) -> Any:
    """Return the model on the CPU without weights."""
    import torch

    config = _configuration(subject, given, dtype)
    with torch.device("meta"):
        model = subject.rewritten._from_config(config, dtype=getattr(torch, dtype))
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    model.tie_weights()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.nbytes < SMALL:
            tensor.zero_()
    return model


def shortened(config: Any, whole: Any) -> Any:
    """Return the configuration of a model with its first layers, as many as have each kind of layer once; two or more.

    Args:
        config: of the whole model.
        whole: that model, on the meta device.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    stacks = [list(module) for module in whole.modules() if type(module).__name__ == "ModuleList"]
    stacks = [stack for stack in stacks if len(stack) == count]
    if not isinstance(count, int) or not stacks:
        return short
    kinds = [[_kind(layer) for layer in stack] for stack in stacks]
    kept = max(2, *(1 + max(map(of.index, of)) for of in kinds)) if count > 1 else 1
    if kept < count:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == count:
                setattr(text, name, value[:kept])
        text.num_hidden_layers = kept
    return short


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return what the kernels of a layer depend on: its modules, their sizes and settings."""
    return tuple(
        (
            name,
            type(module).__name__,
            [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)],
            sorted(
                (key, str(value))
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str, type(None))) and key != "layer_idx"
            ),
        )
        for name, module in layer.named_modules()
    )


def _launches(runtime: str, model: Any, batch: int, context: int) -> dict[Any, Any]:
    """Return what a call of `generate()` launches that a graph may hold, by a key."""
    import torch

    graphs, launch = runtime_part(runtime, "decode/step_graph"), runtime_part(runtime, "launching/launch")
    backend, sampling = runtime_part(runtime, "core/backend"), runtime_part(runtime, "sampling/sampling")
    graph = graphs.DecodeGraph(model, batch, context, captures=False)
    graph.prompts.rehearses_every_form = True  # one layer of each kind: the last one has no others before it
    tokens = min(PROMPT, context // 2)
    found: dict[Any, Any] = {}
    with backend.plainly():  # makes what a model computes once and keeps
        model(torch.zeros(batch, tokens, dtype=torch.int64), logits_to_keep=1, **graph.call.cached)
        graph.begin(torch.full((batch, 1), tokens), None)
        graph.call.plain_step()
    with launch.rehearsing():
        for greedy in _greedy(sampling, model):
            for run in graph.kernels.launching(tokens, greedy):
                launch.collect(found.setdefault)
                try:
                    run()
                finally:
                    launch.collect(None)
                graph.cache.rewind(tokens)
    return found


def _greedy(sampling: Any, model: Any) -> Iterator[Any]:
    """Yield the greedy choice without ends, and with as many as the model's configuration has."""
    import torch

    yield sampling.Sampling([], False, None, None)
    given = getattr(model.generation_config, "eos_token_id", None)
    ends = given if isinstance(given, list) else [0 if given is None else given]
    where = {"dtype": torch.int64, "device": model.device}
    yield sampling.Sampling([], False, torch.tensor(ends, **where), torch.zeros(1, **where))


def _build_launcher(compiled: Any) -> None:
    """Build the C function that launches a kernel of NVIDIA's, where Triton has one for each and a C compiler is here.

    It cannot be loaded here, which wants a driver, and does not have to be.
    """
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(nvidia, "make_launcher") and os.environ.get(BUILDS) == "1":
        with contextlib.suppress(ImportError):
            nvidia.CudaUtils()
        with contextlib.suppress(ImportError):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
