"""`rewrite bench DIR|MODEL`: how fast a package is against its original, with parity and the memory limit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@click.command(
    cls=Command,
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
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a bar chart.")
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


def _bench(screen: Screen, plan: Plan, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import benchmark_run, benchmark_tables, chart
    from rewrite.benchmark.benchmark_plan import plain, write_json
    from rewrite.delivery import json_report

    json_path = options["json_path"]
    keep = (lambda record: write_json(json_path, record)) if _is_file(json_path) else (lambda record: None)
    with screen.working("measuring") as progress:
        record = benchmark_run.measure(plan, keep, progress)
    for label, text in benchmark_tables.head(record):
        screen.line(label, text)
    for table in benchmark_tables.tables(record):
        _show(screen, table)
    json_report.write(json_path, "bench", plain(record))
    if options["png"] is not None:
        chart.draw(record, options["png"])
    code = benchmark_tables.exit_code(record)
    if code:
        screen.problem("failed", "it is slower than its original as it stands, did not run, or its tokens differ")
    return code


def _ranks(screen: Screen, plan: Plan, ranks: int, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import rank_speed as several
    from rewrite.benchmark import rank_tables
    from rewrite.benchmark.benchmark_plan import plain
    from rewrite.delivery import json_report

    with screen.working("measuring on several ranks"):
        record = several.measure(plan, ranks)
    screen.line("model", f"{record['model']}, {record['shape'] or 'checkpoint'}, {record['dtype']}, random weights")
    screen.line("on", f"{ranks} × {record['device']}")
    for table in rank_tables.tables(record):
        _show(screen, table)
    json_report.write(options["json_path"], "bench", plain(record))
    code = rank_tables.exit_code(record)
    if code:
        screen.problem("failed", "it is slower than its original on the same ranks, or its tokens differ")
    return code


def _forward(screen: Screen, target: Target, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import benchmark_tables, forward_run
    from rewrite.benchmark.benchmark_plan import plain
    from rewrite.delivery import json_report
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
    for label, text in benchmark_tables.head(record):
        screen.line(label, text)
    for table in forward_run.tables(record):
        _show(screen, table)
    screen.line("explain", record["explain"])
    json_report.write(options["json_path"], "bench", plain(record))
    code = forward_run.exit_code(record)
    if code:
        screen.problem("failed", "it is slower than its original as it stands, did not run, or its outputs differ")
    return code


def _train(screen: Screen, plan: Plan, options: Mapping[str, Any]) -> int:
    from dataclasses import replace

    from rewrite.benchmark import benchmark_tables, training_speed
    from rewrite.benchmark.benchmark_plan import plain, write_json
    from rewrite.delivery import json_report

    asked = tuple(side for side in TRAINING_SIDES if side in options["sides"] or side in ("original", "ours"))
    default = TRAINING_SIDES if plan.device != "cpu" else ("original", "ours")
    plan = replace(plan, sides=asked if options["sides"] else default)
    json_path = options["json_path"]
    keep = (lambda record: write_json(json_path, record)) if _is_file(json_path) else (lambda record: None)
    with screen.working("measuring") as progress:
        record = training_speed.measure(plan, keep, progress)
    for label, text in benchmark_tables.head(record):
        screen.line(label, text)
    for table in training_speed.tables(record):
        _show(screen, table)
    json_report.write(json_path, "bench", plain(record))
    code = training_speed.exit_code(record)
    if code:
        screen.problem("failed", "its gradients differ, it is slower than its original, or it did not run")
    return code


def _ladder(screen: Screen, target: str, options: Mapping[str, Any]) -> int:
    from rewrite.benchmark import ladder
    from rewrite.benchmark.benchmark_plan import plain, write_json
    from rewrite.delivery import json_report

    with contextlib.ExitStack() as stack:
        folder, original = Path(target), None
        if not (folder / ladder.MANIFEST).is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ladder"
            source = _source(target, options)
            _prepare(screen, source, folder)
            original = str(source.path)
        json_path = options["json_path"]
        keep = (lambda record: write_json(json_path, record)) if _is_file(json_path) else (lambda record: None)
        with screen.working("climbing") as progress:
            record = ladder.measure(folder, _plan(folder, original, options), keep, progress)
    _show(screen, ladder.table(record))
    json_report.write(json_path, "bench", plain(record))
    code = ladder.exit_code(record)
    if code:
        screen.problem("failed", "a rung did not run, or its tokens are not the original's")
    return code


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


def _is_file(path: Path | None) -> bool:
    return path is not None and str(path) != OUTPUT


def _show(screen: Screen, table: Table) -> None:
    screen.figures(table.title, table.headings, table.rows, table.notes)
