"""What torch should be told on an AMD GPU, as one call: `configure()`. Importing this changes nothing.

It tells inductor to leave matrix products to the vendor's libraries and graphs to us, sets the environment of the HIP
runtime, and lets Dynamo compile while a graph is being captured. Every setting is looked for in the torch that is
installed: one that it does not have is reported and not set. `tunable_op` is the switch of torch's own tuner.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from ..launching import card_tables

INDUCTOR: dict[str, tuple[object, str]] = {
    "max_autotune": (False, "tries Triton products for minutes, which rocBLAS then beats"),
    "max_autotune_gemm": (False, "likewise"),
    "max_autotune_gemm_backends": ("ATEN", "products by rocBLAS and hipBLASLt"),
    "triton.cudagraphs": (False, "generate() captures graphs itself; two captures conflict"),
    "memory_planning": (False, "recurses too deeply on ROCm"),
    "freezing": (True, "weights become constants: do not change them once compiled"),
    "epilogue_fusion": (True, "what follows a product into its kernel"),
    "aggressive_fusion": (True, "fewer kernels"),
    "group_fusion": (True, "likewise"),
    "max_fusion_size": (128, "operators in one kernel"),
    "shape_padding": (True, "products with even sizes"),
    "pattern_matcher": (True, "known patterns into known kernels"),
}
"""Value and why, by name in `torch._inductor.config`."""
FINE_TUNING: dict[str, tuple[object, str]] = {
    "coordinate_descent_tuning": (True, "block sizes kernel by kernel; compiles longer"),
    "benchmark_kernel": (True, "for the choice among variants"),
    "triton.multi_kernel": (1, "several variants, the fastest stays"),
}
DYNAMO: dict[str, tuple[object, str]] = {"recompile_limit": (256, "variants of one function before it gives up")}
ENVIRONMENT = {
    "HIP_LAUNCH_BLOCKING": ("0", "launches do not wait for the kernel"),
    "AMD_LOG_LEVEL": ("0", "the runtime writes no log"),
    "HSA_ENABLE_SDMA": ("1", "copies by the engines made for it"),
}
"""Read by the HIP runtime when it starts. HIP_CACHE_ENABLED, which notes on the web add, AMD documents nowhere."""
RNG_GUARD = "RNG guard of Dynamo"

Outcome = Literal["set", "as it was", "not in this torch", "too late", "yours"]


@dataclass(frozen=True)
class Setting:
    """One setting and what became of it."""

    name: str
    value: object
    """As wanted; for `yours` what it is."""
    outcome: Outcome
    """`set`; `as it was` if it had the value before; `not in this torch`; `too late` where the HIP runtime has read it
    already; `yours` for an environment variable that has another value."""
    why: str = ""


@dataclass(frozen=True)
class Configuration:
    """What `configure` or `tunable_op` did. As a context manager, or by `undo()`, everything is put back."""

    note: str = ""
    """Why nothing was set; empty if something was."""
    settings: tuple[Setting, ...] = ()
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Put every setting back to what it was. What is undone stays undone: a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Configuration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.settings:
            return self.note
        rows = [(s.name, repr(s.value), s.outcome, s.why) for s in self.settings]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]).rstrip() for row in rows]
        return "\n".join([self.note, *lines] if self.note else lines)


def configure(*, fine_tuning: bool = False, force: bool = False) -> Configuration:
    """Set what makes inference fast and stable on ROCm. Call it before the first use of the GPU.

    Torch keeps the options of inductor and Dynamo for each thread (2.13): call it in the thread that compiles.

    Args:
        fine_tuning: also have inductor try variants of its kernels, which takes longer to compile.
        force: also on a torch that was not built for ROCm, where otherwise nothing is set.

    Returns:
        Every setting with its outcome; it prints as a table and can be undone.
    """
    if torch.version.hip is None and not force:
        return Configuration("not ROCm: nothing set")
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    wanted = INDUCTOR | (FINE_TUNING if fine_tuning else {})
    made = Configuration()
    settings = [_option("inductor", inductor, name, *pair, made._undo) for name, pair in wanted.items()]
    settings += [_option("dynamo", dynamo, name, *pair, made._undo) for name, pair in DYNAMO.items()]
    settings += [_variable(name, *pair, made._undo) for name, pair in ENVIRONMENT.items()]
    settings.append(_rng_guard(made._undo))
    return Configuration(settings=tuple(settings), _undo=made._undo)


def _option(of: str, config: Any, name: str, value: object, why: str, undo: list[Callable[[], object]]) -> Setting:
    *parents, last = name.split(".")
    for parent in parents:
        config = getattr(config, parent, None)
    name = f"{of} {name}"
    if not hasattr(config, last):
        return Setting(name, value, "not in this torch", why)
    before = getattr(config, last)
    if before == value:
        return Setting(name, value, "as it was", why)
    setattr(config, last, value)
    undo.append(lambda: setattr(config, last, before))
    return Setting(name, value, "set", why)


def _variable(name: str, value: str, why: str, undo: list[Callable[[], object]]) -> Setting:
    before = os.environ.get(name)
    if before is not None and before != value:
        return Setting(name, before, "yours", why)
    if before == value:
        return Setting(name, value, "as it was", why)
    if torch.cuda.is_initialized():
        return Setting(name, value, "too late", why)
    os.environ[name] = value
    undo.append(lambda: os.environ.pop(name, None))
    return Setting(name, value, "set", why)


def _rng_guard(undo: list[Callable[[], object]]) -> Setting:
    """Let torch's compiler skip the GPU's random state while a stream is being captured, which may not be read then.

    Dynamo saves it around each compilation and puts it back. Only the compiler's own calls are answered so: anybody
    else's still raise.
    """
    from torch._dynamo import convert_frame

    why = "compiling during a capture"
    if "cuda.get_rng_state" not in inspect.getsource(convert_frame):
        return Setting(RNG_GUARD, True, "not in this torch", why)
    if getattr(torch.cuda.get_rng_state, "guarded", False):
        return Setting(RNG_GUARD, True, "as it was", why)
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        if _is_compiler(sys._getframe(1)) and torch.cuda.is_current_stream_capturing():
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return before[0](*args, **kwargs)

    def set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> None:
        if new_state.numel():
            before[1](new_state, *args, **kwargs)

    get_rng_state.guarded = True  # type: ignore[attr-defined]
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = get_rng_state, set_rng_state

    def restore() -> None:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = before

    undo.append(restore)
    return Setting(RNG_GUARD, True, "set", why)


def _is_compiler(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("torch._dynamo.", "torch._functorch.", "torch._inductor."))


def tunable_op(on: bool = True, *, tune: bool = False, record: bool = False, force: bool = False) -> Configuration:
    """Switch TunableOp, with which torch takes the fastest solution of rocBLAS and hipBLASLt for each product.

    Its results are in `tunableop.csv` (`launching/card_tables.py`), to whose name torch adds the card's number. With
    `tune` a product that is not there yet is tuned when it is first called, which takes seconds: run the model once
    like that, eagerly and with every shape, and never inside a capture.

    Args:
        on: whether products take the tuned solutions.
        tune: whether products without one are tuned.
        record: whether they are written down instead, by torch into `tunableop_untuned0.csv` of the working directory,
            for another process to tune with `torch.cuda.tunable.tune_gemm_in_file`.
        force: also on a torch that was not built for ROCm, where there is nothing to choose from.

    Returns:
        What was set; it prints as a table and can be undone.
    """
    tunable = torch.cuda.tunable
    if not hasattr(torch._C, "_cuda_tunableop_enable") or (torch.version.hip is None and not force):
        return Configuration("not ROCm: nothing set")
    enabled = os.environ.get("PYTORCH_TUNABLEOP_ENABLED")
    if enabled is not None and enabled != str(int(on)):
        return Configuration(f"PYTORCH_TUNABLEOP_ENABLED={enabled} decides: nothing set")
    before = tunable.is_enabled(), tunable.tuning_is_enabled(), tunable.get_filename()
    yours = "PYTORCH_TUNABLEOP_RECORD_UNTUNED" in os.environ
    records = hasattr(torch._C, "_cuda_record_untuned_enable") and not yours
    recorded = records and tunable.record_untuned_is_enabled()
    tune, record = on and tune and not record, on and record
    if on:
        card_tables.folder().mkdir(parents=True, exist_ok=True)
        tunable.set_filename(str(card_tables.folder() / card_tables.TUNABLE_OP), insert_device_ordinal=True)
    tunable.enable(on)
    tunable.tuning_enable(tune)
    if records:
        tunable.record_untuned_enable(record)
    file = tunable.get_filename()
    there = on and os.path.exists(file)
    read = there and tunable.read_file(file)

    def restore() -> None:
        tunable.set_filename(before[2])
        if records:
            tunable.record_untuned_enable(recorded)
        tunable.tuning_enable(before[1])
        tunable.enable(before[0])

    settings = [
        Setting("TunableOp", on, "set" if on != before[0] else "as it was", "solutions found by tuning"),
        Setting("TunableOp tunes", tune, "set" if tune != before[1] else "as it was", "new products"),
    ]
    if record:
        outcome: Outcome = "yours" if yours else "not in this torch"
        if records:
            outcome = "as it was" if recorded else "set"
        settings.append(Setting("TunableOp records", True, outcome, "new products, for tune_gemm_in_file"))
    if on:
        found = "read" if read else "of other versions, not read" if there else "not there yet"
        settings.append(Setting("TunableOp file", file, "set", found))
    return Configuration(settings=tuple(settings), _undo=[restore])
