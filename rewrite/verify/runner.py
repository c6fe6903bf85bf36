"""Runs the gates in order, cheapest first, and stops at the first that fails.

Reading on: `runtime/core/backend.py`.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from rewrite import gc_paused
from rewrite.console.progress_steps import Step
from rewrite.errors import SourceDoesNotImport

from .isolation import CleanImport
from .judging.checks import CheckRun, Done, Progress, describe, one_by_one, run_gate
from .judging.compare import DoesNotRun
from .judging.verdict import IMPORTS, ITSELF, POLYNOMIALS, Divergence, Figure, Gate, Options, Verdict
from .judging.watchdog import Hung, of_original, watched
from .line_coverage import Reach
from .models import loaded_sides
from .models.inputs import random_state_kept
from .models.loaded_sides import Side, Source
from .models.model_pair import Workbench
from .models.rounding import Rounding
from .models.subjects import Subjects, find_subjects
from .state.class_structure import class_checks, state_checks, text_checks

if TYPE_CHECKING:
    from .parallel import Part

TITLES = {"structure": 1, "parity": 2, "model": 3, "generation": 4, "latency": 5}


def verify(
    original: Side, rewritten: Side, options: Options | None = None, progress: Progress | None = None
) -> Verdict:
    """Compare a rewritten modeling file with its original.

    Raises:
        SideNotFound: one of the two is not there.
        VerificationError: the original cannot be built, so there is nothing to compare with.
    """
    with gc_paused.paused():  # it may import transformers
        sources = loaded_sides.locate(original), loaded_sides.locate(rewritten)
    return _Run(*sources, options or Options(), progress or (lambda message: None)).verdict()


@dataclass
class _Run:
    original: Source
    rewritten: Source
    options: Options
    progress: Progress
    gates: list[Gate] = field(default_factory=list)
    complete: bool = True
    clean: CleanImport | None = None
    modules: tuple[ModuleType, ModuleType] | None = None
    subjects: Subjects | None = None
    bench: Workbench | None = None
    endless: bool = False
    """Whether a check did not end: nothing is asked of that side again."""
    ended: int = 0
    """Parts of all gates that ended; structure is one."""
    parts: int = 0
    """How many there are; 0 until that is known."""

    def verdict(self) -> Verdict:
        started = time.perf_counter()
        reach = self._reach()
        identities = self.original.identity, self.rewritten.identity
        with settled(self.options):
            try:
                divergence = self._all_gates(reach)
                environment = _environment(self.options)
            finally:
                if self.clean is not None:
                    self.clean.stop()
        failed = next((gate for gate in self.gates if gate.status == "failed"), None)
        return Verdict(
            passed=failed is None and self.complete,
            original=identities[0],
            rewritten=identities[1],
            model_class=self.subjects.main.name if self.subjects else "",
            gates=tuple(self.gates),
            divergence=divergence,
            reason=self._reason(failed),
            environment=environment,
            options=self.options,
            seconds=time.perf_counter() - started,
            reached=reach.reached(self.rewritten),
            config_fields=tuple(self.bench.fields) if self.bench else (),
            asked=self.bench.record.asked() if self.bench else (),
        )

    def _reason(self, failed: Gate | None) -> str:
        if failed is not None:
            first = failed.said_first
            return f"gate {failed.number} ({failed.name}): {first.name}: {first.detail}"
        if not self.complete:
            return "an essential check could not run, so nothing is proven"
        return ""

    def _all_gates(self, reach: Reach) -> Divergence | None:
        """Run the gates asked for. Returns the first divergence, if one failed and has one."""
        divergence = None
        for name in TITLES:
            if name != "structure" and name not in self.options.gates:
                continue
            with contextlib.closing(self._results(name, reach)) as results:
                gate, complete = run_gate(TITLES[name], name, self._noted(results), self.options.fail_fast)
            if not gate.checks:
                continue
            self.gates.append(gate)
            self.complete &= complete
            if self.endless:
                break
            if gate.status == "failed":
                divergence = divergence or self._divergence(gate)
                if self.bench is None or not self.options.keep_going:
                    break
        return divergence

    def _noted(self, results: Iterable[Done]) -> Iterator[Done]:
        for done in results:
            self.endless |= done.endless
            yield done

    def _results(self, name: str, reach: Reach) -> Generator[Done, None, None]:
        """The checks of a gate as they run, in several processes where that is possible."""

        def progress(message: str) -> None:
            self.progress(Step(f"{name}: {message}", self.ended, self.parts, beside))

        parts = () if name == "structure" else self._parts(name)
        options, beside = self.options, 0
        if len(parts) > 1 and options.workers > 1 and options.device == "cpu" and options.weights is None:
            from .parallel import Pool

            assert self.bench is not None
            beside = options.workers - 1
            pool = Pool(self.bench, options.workers, progress, self._reach, reach, self._one_ended)
            yield from pool.run(parts)
            return
        checks = self._one_after_another(parts) if name != "structure" else self._wanted(self._structure)
        with reach.counted() if name != "latency" else contextlib.nullcontext():
            yield from one_by_one(checks, progress)

    def _one_after_another(self, parts: Sequence[Part]) -> Iterator[CheckRun]:
        for part in parts:
            yield from part.checks()
            self.ended += part.shares

    def _one_ended(self) -> None:
        self.ended += 1

    def _wanted(self, checks: Callable[[], Iterator[CheckRun]]) -> Iterator[CheckRun]:
        """The checks that were asked for, and those that others cannot do without."""
        names = self.options.checks
        return (check for check in checks() if not names or check.stops or check.name in names)

    def _count_parts(self) -> None:
        """Learn how many parts all gates have, once it is known what there is to verify."""
        assert self.bench is not None
        gates = [name for name in TITLES if name != "structure" and name in self.options.gates]
        self.parts = 1 + sum(part.shares for name in gates for part in self._parts(name))
        self.ended = 1

    def _reach(self) -> Reach:
        return Reach.of(self.rewritten, self.options.reach and not self.options.quick)

    def _structure(self) -> Iterator[CheckRun]:
        from .state.checkpoints import checkpoint_checks
        from .state.declarations import declared_checks
        from .state.initial import initial_checks

        yield from text_checks(self.rewritten)
        yield CheckRun(IMPORTS, self._import, stops=True)
        yield CheckRun("the main class is there", self._pair, stops=True)
        if self.modules is None or self.subjects is None:
            return
        yield from class_checks(self.subjects, self.modules[1])
        self.bench = self._workbench(self.subjects)
        self._count_parts()
        yield from state_checks(self.bench)
        yield from checkpoint_checks(self.bench)
        yield from declared_checks(self.subjects, self.modules, self.bench)
        yield from initial_checks(self.bench)
        if self.clean is not None:
            yield from self.clean.checks()

    def _import(self) -> Mapping[str, Figure]:
        if self.options.clean_process and not self.options.quick:
            self.clean = CleanImport.start(self.rewritten, self.original)
        try:
            with gc_paused.paused(), of_original():
                upstream = loaded_sides.load(self.original)
        except Exception as error:  # a file from outside, for another release, may raise anything
            raise SourceDoesNotImport(self.original.path, describe(error)) from error
        try:
            with gc_paused.paused():
                self.modules = upstream, loaded_sides.load(self.rewritten)
        except Exception as error:  # the file under test may raise anything while it is imported
            raise DoesNotRun(f"the rewritten side does not import: {describe(error)}") from error
        return {}

    def _pair(self) -> Mapping[str, Figure]:
        assert self.modules is not None
        self.subjects = find_subjects(*self.modules, self.options.main_class)
        return {"classes": 1 + len(self.subjects.others)}

    def _workbench(self, subjects: Subjects) -> Workbench:
        from .models.configs import small_variants

        main = subjects.main
        variants = small_variants(main.original, main.causal, self.options.config)
        return Workbench(main, variants, self.options, Rounding.of(self.rewritten))

    def _parts(self, name: str) -> Sequence[Part]:
        from .gates import parts_of

        assert self.bench is not None
        assert self.subjects is not None
        parts = parts_of(name, self.bench, self.subjects)
        return [replace(part, checks=partial(self._wanted, part.checks)) for part in parts]

    def _divergence(self, gate: Gate) -> Divergence | None:
        against = (check for check in gate.failures if not check.name.startswith(ITSELF))
        found = sorted(
            (check for check in against if check.failure != "raised"), key=lambda one: one.name == POLYNOMIALS
        )
        differs = found[0] if found else None
        if self.bench is None or differs is None or gate.name not in ("parity", "generation"):
            return None
        from .divergence import PADDED, first_divergence

        self.progress("looking for the first module that differs")
        try:
            with watched():
                padded = differs.name == POLYNOMIALS and self.bench.subject.accepts("attention_mask")
                return first_divergence(self.bench, f"{differs.name}: {PADDED}" if padded else differs.name)
        except Hung:  # with a hook on a module it may go another way than in the check
            return None


def _environment(options: Options) -> dict[str, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else platform.processor()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device or platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


@contextlib.contextmanager
def settled(options: Options) -> Iterator[None]:
    """Full fp32 matrix products, transformers' chatter off, the caller's random state and settings kept.

    Tiny models run on one thread: on a busy machine the threads of a small product wait for each other, which made a
    verification of 20 s take more than ten minutes (4 cores under load, torch 2.13).
    """
    import torch
    from transformers.utils import logging

    verbosity, precision = logging.get_verbosity(), torch.get_float32_matmul_precision()
    bars = logging.is_progress_bar_enabled()
    threads = torch.get_num_threads()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    if options.weights is None:
        torch.set_num_threads(1)
    try:
        with random_state_kept():
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()
