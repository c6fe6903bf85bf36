"""When an operator of aiter runs in place of a bundled one, and the record of what was refused.

No call reaches aiter before three questions are answered: is it wanted (backend, switches, chip), do its gates hold (a
fault on the GPU cannot be caught), and is this variant proven: compiled and compared with the torch reference, at its
first use and never during a capture. A variant that raises or computes something else is out for the process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core import aiter_probe, backend
from ..launching import launch

Result = TypeVar("Result")

SWITCH = "REWRITE_AITER_OFF"
"""Environment variable: operators that aiter is not to run, by comma, or `all`."""
NAMED = "REWRITE_AITER_ON"
"""Environment variable: operators that it runs besides, by comma, of those that have to be named."""


class Operator(NamedTuple):
    """Where aiter's form of an operator may run."""

    chips: frozenset[str]
    auto: bool
    """Whether the backend `auto` takes it, or only `aiter`."""
    named: bool = False
    """Whether it has to be named besides: it takes memory, rounds, or lays a cache otherwise than the bundled form."""


_MI300 = frozenset({"gfx942", "gfx950"})
_CDNA = _MI300 | {"gfx90a"}
OPERATORS = {
    "attention": Operator(_CDNA, auto=True),  # the only one for which there is no kernel of our own
    "rms_norm": Operator(_CDNA, auto=False),
    "add_rms_norm": Operator(_CDNA, auto=False),
    "layer_norm": Operator(_CDNA, auto=False),
    "gated_activation": Operator(_CDNA, auto=False),
    "gemm": Operator(_MI300, auto=True),  # with the gate that a tuned table is there
    "add_rmsnorm_quant": Operator(_MI300, auto=False, named=True),  # rounds by other scales
    "gemm_a8w8": Operator(_MI300, auto=False, named=True),  # copies of weights
    "gemm_a8w8_blockscale": Operator(_MI300, auto=False, named=True),  # rounds the input
    "fused_moe": Operator(_MI300, auto=False),  # with the gate that the table has the shape
    "unified_attention": Operator(_CDNA, auto=False),
    "mla_decode": Operator(_MI300, auto=False, named=True),  # latents lie otherwise
    "topk_softmax": Operator(_CDNA, auto=False),
    "biased_grouped_topk": Operator(_CDNA, auto=False),
}
_AUTO_CHIPS = _MI300

REASONS = {
    "import_failed": "aiter, or the part of it that is needed, cannot be imported",
    "missing": "this release of aiter does not have the function",
    "signature": "the function takes other parameters in this release",
    "signature_unknown": "nothing says which parameters the function takes",
    "chip": "the operator is not used on this chip",
    "not_warm": "its first use would come during a capture, where nothing may be compiled or compared",
    "raised": "aiter's function raised an error",
    "differs": "it computes something else than the reference",
    "unexpected_result": "it returned no tensor of the expected shape, dtype and device",
    "dtype": "only fp16 and bf16, weights in the dtype of the input",
    "empty": "there is nothing to compute",
    "layout": "the tensors do not lie in memory as the kernel reads them",
    "hidden_size": "the hidden size is no multiple of 8",
    "weight": "the weight is missing, or not one vector of the hidden size",
    "no_equal_mode": "none of aiter's rounding modes is that of the modeling file",
    "head_dim": "the head dimension is over 256 or no multiple of 8",
    "single_query": "aiter's kernel is for prompts: one query gives it a workgroup a head and a row, of 304",
    "heads": "the query heads are no multiple of the key heads, or batches or lengths differ",
    "latent_heads": "aiter has kernels for 16 and for 128 heads that read latents in bf16",
    "more_queries_than_keys": "aiter aligns the causal mask with the last key, torch with the first",
    "mask": "a mask (padding, static cache, window) is given",
    "dropout": "dropout is wanted",
    "softcap": "scores are capped, biased or have sinks",
    "packed_sequences": "several sequences may lie in one row",
    "compiled": "torch.compile would trace what is decided from values",
    "gradient_wanted": "gradients are wanted",
    "activation": "aiter has no such activation",
    "untuned_experts": "no table of fused experts (AITER_CONFIG_FMOE) has the shape: its form may not be sound",
    "no_copy": "there can be no copy of the weights in the order that aiter's kernels read",
    "rule": "the router chooses, or weighs, by another rule than aiter's functions have",
    "groups": "not 1, 2, 4 or 8 equal groups of experts, or more chosen than there are threads or experts for",
    "form": "the experts compute something else than silu(gate) * up, or have biases",
    "untuned": "no tuned table is given (AITER_CONFIG_GEMM_BF16), and without one it is torch's own product",
}

_states: dict[tuple[object, ...], str | None] = {}


def chosen(operator: str, tensor: Tensor) -> bool:
    """Return whether calls of `operator` on `tensor` are for aiter: backend, switch, chip, and an aiter to import.

    On anything but an AMD GPU the answer costs a comparison. Nothing is imported: gates come first.
    """
    chip = aiter_probe.chip(tensor.device)
    if chip is None or not _selected(operator, chip) or aiter_probe.absence() is not None:
        return False
    if chip not in OPERATORS[operator].chips:
        refuse(operator, "chip")
        return False
    return True


def function(
    operator: str,
    path: str,
    tensors: tuple[str, ...],
    keywords: Collection[str],
    module: str | tuple[str, ...] = "aiter",
) -> Callable[..., Any] | None:
    """Return the function of aiter that `operator` is to call, as `aiter_probe.function`; None, and counted, if none.

    Of several modules the first that can be imported has it. The first call imports aiter, which may take a while.
    """
    if not aiter_probe.tried():
        if capturing():
            refuse(operator, "not_warm")
            return None
        backend.warn_once(
            f"aiter {aiter_probe.version()} is used: the first use of each of its kernels may compile for minutes "
            f"({SWITCH}=all, or a list of {', '.join(OPERATORS)}, turns it off)"
        )
    failure = aiter_probe.failure()
    if failure is not None:
        backend.warn_once(f"aiter is not used: {failure}")
        refuse(operator, "import_failed")
        return None
    found: Callable[..., Any] | str = "import_failed"
    for each in (module,) if isinstance(module, str) else module:
        if (found := aiter_probe.function(path, tensors, keywords, each)) != "import_failed":
            break
    if isinstance(found, str):
        refuse(operator, found)
        return None
    return found


def _selected(operator: str, chip: str) -> bool:
    named = backend.get_backend()
    if named not in ("auto", "aiter") or backend.runs_plainly() or operator in listed(SWITCH):
        return False
    if OPERATORS[operator].named and operator not in listed(NAMED):
        return False
    return named == "aiter" or (OPERATORS[operator].auto and chip in _AUTO_CHIPS)


@torch.compiler.assume_constant_result
def candidate(operator: str) -> bool:
    """Return whether calls of `operator` may go to aiter in this process; a compiler takes the answer as it is now."""
    chip = aiter_probe.chip()
    return chip is not None and _selected(operator, chip) and aiter_probe.absence() is None


def listed(variable: str) -> frozenset[str]:
    """Return the operators that `REWRITE_AITER_OFF` or `REWRITE_AITER_ON` lists.

    Raises:
        ValueError: if it names something else.
    """
    return _listed(variable, os.environ.get(variable, ""))


@functools.lru_cache(maxsize=8)
def _listed(variable: str, value: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in value.split(",") if name.strip())
    if variable == SWITCH and "all" in names:
        return frozenset(OPERATORS)
    known = [name for name, operator in OPERATORS.items() if variable == SWITCH or operator.named]
    if names - set(known):
        unknown = ", ".join(sorted(names - set(known)))
        raise ValueError(
            f"{variable} names '{unknown}': choose from {'all, ' * (variable == SWITCH)}{', '.join(known)}"
        )
    return names


def refuse(operator: str, reason: str) -> None:
    """Count a call that aiter does not get, for `explain`; say so once where aiter was asked for by name."""
    if torch.compiler.is_compiling() or launch.collects():
        return
    said = f"aiter does not run {operator} here: {REASONS[reason]}"
    backend.count_fallback(f"aiter.{operator}", reason)
    if backend.get_backend() == "aiter":
        backend.warn_once(said)


def capturing() -> bool:
    """Return whether the current stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def run(
    operator: str,
    like: Tensor,
    variant: tuple[object, ...],
    call: Callable[[], Result | None],
    proof: Callable[[], bool],
) -> Result | None:
    """Return `call()`, once `proof()` has held for the variant in this process; None where aiter is not to be used.

    Args:
        operator: a key of `OPERATORS`.
        like: a tensor on the device of the call, which is made the current one: aiter launches on its stream.
        variant: everything that decides which of aiter's kernels runs, dtype and device included.
        call: runs aiter's function; None where its result is not what was expected.
        proof: compares it with the reference, on tensors of its own. It compiles the kernels, too.
    """
    with backend.device_guard(like):
        return _run(operator, (operator, *variant), call, proof)


def _run(
    operator: str, key: tuple[object, ...], call: Callable[[], Result | None], proof: Callable[[], bool]
) -> Result | None:
    if key not in _states:
        if capturing():
            refuse(operator, "not_warm")
            return None
        holds, reason = _attempt(key, proof)
        if reason is None:
            _settle(key, None if holds else "differs")
    reason = _states[key]
    if reason is None:
        result, reason = _attempt(key, call)
        if result is not None:
            return result
        if reason is None:
            _settle(key, reason := "unexpected_result")
    refuse(operator, reason)
    return None


def _attempt(key: tuple[object, ...], call: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return what `call` returns, or why it did not."""
    try:
        return call(), None
    except Exception as error:  # a failed compilation, a missing variant, an assertion: aiter raises anything
        _settle(key, "raised", f" ({type(error).__name__}: {error})")
        return None, "raised"


def _settle(key: tuple[object, ...], reason: str | None, detail: str = "") -> None:
    """Remember whether a variant may be used; say once that it may not."""
    _states[key] = reason
    if reason is not None:
        what = ", ".join(str(part).removeprefix("torch.") for part in key[1:])
        backend.warn_once(f"aiter's {key[0]} is off in this process for {what}: {REASONS[reason]}{detail}")


def is_result(found: object, shape: tuple[int, ...], like: Tensor) -> bool:
    """Return whether aiter returned a tensor as wanted."""
    return (
        isinstance(found, Tensor)
        and found.shape == torch.Size(shape)
        and found.dtype == like.dtype
        and found.device == like.device
    )


def samples(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return normal numbers in the dtype and on the device of `like`: always the same, from a generator of our own."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype) for shape in shapes]


PERIOD = 1_000_003
"""Numbers after which those of `many_samples` come again: a prime, so that no two rows or pages are alike."""


def many_samples(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return what `samples` does for tensors of any size: numbers that come again after `PERIOD`, made in a moment."""
    (few,) = samples(like, (PERIOD,))
    made = []
    for place, shape in enumerate(shapes):
        size, first = torch.Size(shape).numel(), 4099 * place
        made.append(few.repeat(-(-(first + size) // PERIOD))[first : first + size].view(shape))
    return made


def mostly_equal(got: Tensor, wanted: Tensor, most_unequal: float = 0.01, ulps: float = 4.0) -> bool:
    """Return whether two tensors round alike: nearly all elements equal, the others some roundings of a row apart.

    Sums in another order move one bf16 element in ten thousand to the neighbouring number; a weight multiplied before
    the rounding, and not after it, moves one in five.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not bool(torch.isfinite(got).all()):
        return False
    apart = (got.double() - wanted.double()).abs()
    largest = wanted.double().abs().amax(-1, keepdim=True)
    near = bool((apart <= ulps * torch.finfo(wanted.dtype).eps * largest).all())
    return near and float((apart > 0).double().mean()) <= most_unequal


def states() -> dict[tuple[object, ...], str | None]:
    """Return every variant that was tried, as operator and variant, and why it is off; None where it is in use."""
    return dict(_states)


def forget() -> None:
    """Start as in a new process."""
    _states.clear()
    aiter_probe.forget()


def describe_process() -> list[str]:
    """Return a line for each operator that aiter was tried for."""
    lines = []
    for operator in OPERATORS:
        reasons = [reason for key, reason in _states.items() if key[0] == operator]
        off = sorted({reason for reason in reasons if reason is not None})
        if reasons:
            said = f", {len(reasons) - reasons.count(None)} off ({', '.join(off)})" if off else ""
            lines.append(f"aiter {aiter_probe.version()}: {operator} in {reasons.count(None)} variants{said}")
    return lines
