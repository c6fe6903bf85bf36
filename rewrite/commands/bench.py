"""`rewrite bench DIR|MODEL`: how fast a package is against its original, with parity and the memory limit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rewrite.options.shared_options import DTYPES, FOLDER, OUTPUT, Command, complete_models, reporting_options

if TYPE_CHECKING:
    from rewrite.benchmark import Plan
    from rewrite.benchmark.benchmark_tables import Table
    from rewrite.console.console import Screen
    from rewrite.source.resolve import Source

SHAPES = ("tiny", "1b", "8b", "70b", "30b-a3b")
SIDES = ("original", "static", "step", "liger", "ours")
FOR_TRAINING = ("fuse_loss", "spare_activation")
"""Transforms that a package for training has."""
TRAINING_SIDES = ("original", "compiled", "liger", "ours", "ours compiled")


def numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return the numbers in `128,512`."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        said = f"'{value}' should be whole numbers from 1 with commas between them, like 128,512"
        raise click.BadParameter(said, ctx, param)
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Target:
    """What is measured: a package, and its original."""

    package: Path
    source: Source


HEADINGS = {
    "What is measured": ("forward", "train", "tp", "ladder", "ladder-prepare", "side"),
    "Of which model": ("shape", "weights", "layers", "dtype", "device", "original", "trust-remote-code"),
    "How": ("batch", "context", "new-tokens", "prefill", "seconds"),
    "What is said": ("png", "json", "quiet"),
}


@click.command(
    cls=Command,
    headings=HEADINGS,
    short_help="Measure a package against its original.",
    examples=(
        "rewrite bench ./optimized_llama --device cuda --shape 8b --batch 1,8",
        "rewrite bench ./optimized_llama --train --batch 4 --context 2048",
    ),
)
@click.argument("target", metavar="DIR|MODEL", shell_complete=complete_models)
@click.option(
    "--shape", type=click.Choice(SHAPES), help="Sizes, with random weights. Default: 1b on a GPU, else tiny."
)
@click.option("--weights", type=FOLDER, metavar="DIR", help="A checkpoint instead of a shape.")
@click.option("--batch", callback=numbers, default="1", metavar="N,…", help="Rows.  [default: 1]")
@click.option(
    "--context", callback=numbers, default=None, metavar="N,…", help="Tokens before decoding. [default: 512]"
)
@click.option("--new-tokens", type=click.IntRange(8), default=128, metavar="N", help="Tokens decoded a repeat.")
@click.option(
    "--prefill", callback=numbers, default=None, metavar="N,…", help="Prompt lengths.  [default: 128,512,2048]"
)
@click.option("--train", is_flag=True, help="Measure training steps of --batch rows of --context tokens instead.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="With --train or --tp: cut the shape to N layers.")
@click.option(
    "--side",
    "sides",
    type=click.Choice(tuple(dict.fromkeys(SIDES + TRAINING_SIDES))),
    multiple=True,
    help="Measure only this side; repeatable.",
)
@click.option("--seconds", type=float, default=8.0, show_default=True, help="Time for the repeats of one batch shape.")
@click.option("--device", metavar="DEVICE", help="Measure on this device: cpu, cuda, cuda:1.")
@click.option(
    "--dtype", type=click.Choice((*DTYPES, "float32")), help="Precision. Default: bfloat16, on a CPU float32."
)
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option("--trust-remote-code", is_flag=True, help="Let a modeling file that came with a checkpoint run.")
@click.option("--tp", type=click.IntRange(2), metavar="N", help="Measure on N cards: tensor parallel under torchrun.")
@click.option("--forward", is_flag=True, help="Measure calls of the model instead of its generate().")
@click.option("--ladder", is_flag=True, help="Measure one transform more at a time instead.")
@click.option(
    "--ladder-prepare", type=FOLDER, metavar="DIR", help="Only write the ladder's packages, to be measured there."
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a chart, and one for dark pages.",
)
@reporting_options
def bench(
    target: str,
    tp: int | None,
    forward: bool,
    ladder: bool,
    ladder_prepare: Path | None,
    train: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Measure prefill, decode and generate() of a package, its original, and the original compiled.

    DIR is a package, or what --ladder-prepare wrote; a MODEL is rewritten for the measurement. All sides are timed in
    turn; a ratio comes with its 95% interval. With --train it is the time and memory of training steps, and the
    gradients are compared. The exit code is 1 if the package is slower than its original as it
    stands, or if its tokens are not the original's.

    --forward measures a call instead, of any model: batch 1 and 32, texts of --context tokens (default: 128), images
    of the configuration's size, 10 s of sound; eager and compiled.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import verification

    screen = Screen(json=options["json_path"], quiet=quiet)
    if ladder_prepare is not None:
        return _prepare(screen, _source(target, options), ladder_prepare)
    verification.require_libraries("measuring")
    say_of_a_cpu(screen, options["device"])
    if tp is not None:
        with _package(screen, target, {**options, "tp": tp}) as found:
            return _ranks(screen, _plan(found.package, str(found.source.path), options), tp, options)
    if options["png"] is not None:
        from rewrite.benchmark.chart import require_matplotlib

        require_matplotlib()
    if ladder:
        return _ladder(screen, target, options)
    if forward:
        with _package(screen, target, {**options, "train": False}) as found:
            return _forward(screen, found, options)
    with _package(screen, target, {**options, "train": train}) as found:
        if train:
            return _train(screen, _plan(found.package, str(found.source.path), options), options)
        return _bench(screen, _plan(found.package, str(found.source.path), options), options)


def say_of_a_cpu(screen: Screen, device: str | None) -> None:
    """Say before anything is measured on a CPU that no gain is to be expected there.

    Raises:
        UsageError: torch cannot use the device.
    """
    from rewrite.verify.models.device import usable_device

    if usable_device(device) == "cpu":
        said = "a package is slower than its original (0.66 to 0.84 times where it was tried): "
        screen.line("on a CPU", f"{said}no figure of this run says anything of a GPU, which it is for")


def _bench(screen: Screen, plan: Plan, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import benchmark_run, benchmark_tables, chart

    with screen.working("measuring") as progress:
        record = benchmark_run.measure(plan, _keep(options), progress)
    _show(screen, options, record, (*benchmark_tables.tables(record),))
    if options["png"] is not None:
        chart.draw(record, options["png"])
    slower = "it is slower than its original as it stands, did not run, or its tokens differ"
    return _ended(screen, benchmark_tables.exit_code(record), slower)


def _ranks(screen: Screen, plan: Plan, ranks: int, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import rank_speed as several
    from rewrite.benchmark import rank_tables

    with screen.working("measuring on several ranks"):
        record = several.measure(plan, ranks)
    screen.line("model", f"{record['model']}, {record['shape'] or 'checkpoint'}, {record['dtype']}, random weights")
    screen.line("on", f"{ranks} × {record['device']}")
    _show(screen, options, record, (*rank_tables.tables(record),), head=False)
    slower = "it is slower than its original on the same ranks, or its tokens differ"
    return _ended(screen, rank_tables.exit_code(record), slower)


def _forward(screen: Screen, target: Target, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import forward_run
    from rewrite.verify.models.device import usable_device

    device = usable_device(options["device"])
    chosen = click.get_current_context().get_parameter_source("batch") != ParameterSource.DEFAULT
    plan = forward_run.ForwardPlan(
        target.package,
        str(target.source.path),
        shape=options["shape"],
        weights=str(options["weights"]) if options["weights"] else None,
        device=device,
        dtype=options["dtype"] or ("float32" if device == "cpu" else "bfloat16"),
        batches=options["batch"] if chosen else (1, 32),
        tokens=(options["context"] or ((16,) if device == "cpu" else (128,)))[0],
        seconds=min(options["seconds"], 1.0) if device == "cpu" else options["seconds"],
    )
    with screen.working("measuring") as progress:
        record = forward_run.measure(plan, progress)
    _show(screen, options, record, (*forward_run.tables(record),))
    screen.line("explain", record["explain"])
    slower = "it is slower than its original as it stands, did not run, or its outputs differ"
    return _ended(screen, forward_run.exit_code(record), slower)


def _train(screen: Screen, plan: Plan, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import training_speed

    asked = tuple(side for side in TRAINING_SIDES if side in options["sides"] or side in ("original", "ours"))
    default = TRAINING_SIDES if plan.device != "cpu" else ("original", "ours")
    plan = replace(plan, sides=asked if options["sides"] else default)
    with screen.working("measuring") as progress:
        record = training_speed.measure(plan, _keep(options), progress)
    _show(screen, options, record, (*training_speed.tables(record),))
    slower = "its gradients differ, it is slower than its original, or it did not run"
    return _ended(screen, training_speed.exit_code(record), slower)


def _ladder(screen: Screen, target: str, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import ladder

    with contextlib.ExitStack() as stack:
        folder, original = Path(target), None
        if not (folder / ladder.MANIFEST).is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ladder"
            source = _source(target, options)
            _prepare(screen, source, folder)
            original = str(source.path)
        with screen.working("climbing") as progress:
            record = ladder.measure(folder, _plan(folder, original, options), _keep(options), progress)
    _show(screen, options, record, (ladder.table(record),), head=False)
    return _ended(screen, ladder.exit_code(record), "a rung did not run, or its tokens are not the original's")


def _prepare(screen: Screen, source: Source, folder: Path) -> int:
    from rewrite.benchmark.rungs import prepare
    from rewrite.transforms import select

    with screen.working("rewriting") as progress:
        rungs = prepare(source, select(), folder, progress)
    screen.line("ladder", f"{len(rungs)} packages in {folder}")
    return 0


def _plan(package: Path, original: str | None, options: Mapping[str, Any]) -> Plan:
    from rewrite.benchmark import Plan
    from rewrite.benchmark.benchmark_plan import cells
    from rewrite.verify.models.device import usable_device

    device = usable_device(options["device"])
    on_cpu = device == "cpu"
    contexts = options["context"] or ((64,) if on_cpu else (512,))
    weights = options["weights"]
    return Plan(
        package,
        original,
        shape=None if weights else options["shape"] or ("tiny" if on_cpu else "1b"),
        weights=str(weights) if weights else None,
        device=device,
        dtype=options["dtype"] or ("float32" if on_cpu else "bfloat16"),
        cells=cells(options["batch"], contexts),
        prefill=options["prefill"] or ((64,) if on_cpu else (128, 512, 2048)),
        sides=tuple(dict.fromkeys((*options["sides"], "original", "ours"))) if options["sides"] else SIDES,
        new_tokens=options["new_tokens"],
        seconds=min(options["seconds"], 2.0) if on_cpu else options["seconds"],
        parity_tokens=16 if on_cpu else 64,
        layers=options["layers"],
    )


@contextlib.contextmanager
def _package(screen: Screen, target: str, options: Mapping[str, Any]) -> Iterator[Target]:
    """The package in a folder; one made for the time of the measurement where a model is named."""
    from rewrite.benchmark.rungs import write
    from rewrite.codemod.build import build
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options
    from rewrite.transforms import select

    source = _source(target, options)
    if _is_package(target):
        yield Target(Path(target), source)
        return
    transforms = select(also=FOR_TRAINING if options.get("train") else ())
    built = build(source, transforms)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "measured"
        write(assemble(built, transforms, Options(), package), package)
        yield Target(package, source)


def _source(target: str, options: Mapping[str, Any]) -> Source:
    """The original of a package, or the file of a model."""
    from rewrite.delivery import verification
    from rewrite.package import original
    from rewrite.package.lock import read_lock
    from rewrite.source.resolve import resolve

    if _is_package(target):
        source = original.find(Path(target), read_lock(Path(target)), options["given"])
    else:
        source = resolve(target, options["trust_remote_code"])
    verification.require_trust(source, options["trust_remote_code"])
    return source


def _is_package(target: str) -> bool:
    """Whether a folder is meant that is no checkpoint; `read_lock` says what is wrong with it."""
    folder = Path(target)
    return folder.is_dir() and not (folder / "config.json").is_file()


def _keep(options: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    """What writes a record as far as it is measured, where there is a file for it."""
    from rewrite.benchmark.benchmark_plan import write_json

    path = options["json_path"]
    if path is None or str(path) == OUTPUT:
        return lambda record: None
    return lambda record: write_json(path, record)


def _show(
    screen: Screen, options: Mapping[str, Any], record: dict[str, Any], shown: Iterable[Table], head: bool = True
) -> None:
    """Show and write what was measured."""
    from rewrite.benchmark import benchmark_tables
    from rewrite.benchmark.benchmark_plan import plain
    from rewrite.delivery import json_report

    for label, text in benchmark_tables.head(record) if head else ():
        screen.line(label, text)
    for table in shown:
        screen.figures(table.title, table.headings, table.rows, table.notes)
    json_report.write(options["json_path"], "bench", plain(record))


def _ended(screen: Screen, code: int, problem: str) -> int:
    """Say what is wrong if something is, and return the exit code."""
    if code:
        screen.problem("failed", problem)
    return code
