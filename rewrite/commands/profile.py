"""`rewrite profile DIR|MODEL`: where the time of a step goes, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import DTYPES, FOLDER, OUTPUT, Command, complete_models, reporting_options

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.profile.subject import Plan

SHAPES = ("tiny", "1b", "8b", "30b-a3b", "default")
FILE = click.Path(dir_okay=False, path_type=Path)


HEADINGS = {
    "What is profiled": ("decode", "prompt", "forward", "train", "trace", "needless"),
    "Of which model": (
        "shape", "weights", "config", "layers", "class", "dtype", "device", "original", "trust-remote-code",
    ),
    "How": ("batch", "context", "seconds"),
    "What is said": ("html", "markdown", "png", "traces", "json", "quiet"),
}  # fmt: skip


@click.command(
    cls=Command,
    headings=HEADINGS,
    short_help="Show where the time of a step goes, before and after.",
    examples=(
        "rewrite profile ./optimized_llama --device cuda --shape 1b --html report.html",
        "rewrite profile bert --class BertModel --forward --shape default",
        "rewrite profile --trace results.json.gz",
    ),
)
@click.argument("target", metavar="DIR|MODEL", required=False, shell_complete=complete_models)
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), metavar="FILE", help="Read a trace instead.")
@click.option("--decode", "kind", flag_value="decode", help="One token of generate(), the default.")
@click.option("--prompt", "kind", flag_value="prompt", help="A prompt, up to its first token.")
@click.option("--forward", "kind", flag_value="forward", help="One call of the model.")
@click.option("--train", "kind", flag_value="train", help="Forward and backward of a call with labels.")
@click.option(
    "--shape", type=click.Choice(SHAPES), help="Sizes, with random weights. Default: 1b on a GPU, else tiny."
)
@click.option("--weights", type=FOLDER, metavar="DIR", help="A checkpoint instead of a shape.")
@click.option("--config", type=FILE, metavar="FILE", help="A config.json instead of a shape, with random weights.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Only so many layers.")
@click.option("--class", "class_name", metavar="NAME", help="Another class of the file than its main one.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Rows.")
@click.option("--context", type=click.IntRange(1), metavar="N", help="Tokens of a row.  [default: 512, on a CPU 64]")
@click.option("--device", metavar="DEVICE", help="Profile on this device: cpu, cuda, cuda:1.")
@click.option(
    "--dtype", type=click.Choice((*DTYPES, "float32")), help="Precision. Default: bfloat16, on a CPU float32."
)
@click.option("--seconds", type=float, default=6.0, show_default=True, help="Time for the wall clock of both sides.")
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option("--trust-remote-code", is_flag=True, help="Let a modeling file that came with a checkpoint run.")
@click.option("--needless/--no-needless", default=True, help="Look for compute that need not happen.")
@click.option("--markdown", type=FILE, metavar="FILE", help="Write it as Markdown, for a pull request.")
@click.option("--html", type=FILE, metavar="FILE", help="Write a report, one file.")
@click.option("--png", type=FILE, metavar="FILE", help="Draw the bars of both sides, also for dark pages.")
@click.option("--traces", type=FOLDER, metavar="DIR", help="Keep the traces of both sides, for Perfetto.")
@reporting_options
def profile(target: str | None, trace_path: Path | None, quiet: bool, **options: Any) -> int:
    """Say what each µs of a step is spent on, by category, module and line, and how far each is from its limit.

    DIR is a package; a MODEL is rewritten for the profile. With --trace a trace made elsewhere is divided by category:
    of torch.profiler, rocprof or rocprofv3.
    """
    from rewrite.console.console import Screen

    if (target is None) == (trace_path is None):
        raise click.UsageError("give either DIR|MODEL or --trace FILE")
    screen = Screen(json=options["json_path"], quiet=quiet)
    if options["html"] is not None or options["png"] is not None:
        from rewrite.profile.html_report import require_libraries

        require_libraries()
    if trace_path is not None:
        from rewrite.profile.external_trace import record_of

        record = record_of(trace_path)
    else:
        assert target is not None
        record = _profiled(screen, target, options)
    _show(screen, record)
    _write(record, options)
    return 0


def _profiled(screen: Screen, target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from rewrite.benchmark.benchmark_models import lock_of
    from rewrite.commands.bench import _package, say_of_a_cpu
    from rewrite.delivery import verification
    from rewrite.profile import advice, measure
    from rewrite.redundant import redundancy_search

    verification.require_libraries("profiling")
    say_of_a_cpu(screen, options["device"])
    if options["traces"] is not None:
        options["traces"].mkdir(parents=True, exist_ok=True)
    with _package(screen, target, options) as found, screen.working("profiling") as progress:
        plan = _plan(found.package, str(found.source.path), options)
        record = measure.profile(plan, progress, options["traces"])
        if options["needless"]:
            record["needless"] = redundancy_search.look(plan, progress)
        record["advice"] = advice.derive(record, lock_of(found.package))
    return record


def _plan(package: Path, original: str, options: Mapping[str, Any]) -> Plan:
    from rewrite.profile.subject import Plan
    from rewrite.verify.models.device import usable_device

    device = usable_device(options["device"])
    on_cpu = device == "cpu"
    return Plan(
        package,
        original,
        options["kind"],
        options["shape"] or ("tiny" if on_cpu else "1b"),
        weights=options["weights"],
        config=options["config"],
        layers=options["layers"],
        class_name=options["class_name"],
        device=device,
        dtype=options["dtype"] or ("float32" if on_cpu else "bfloat16"),
        batch=options["batch"],
        tokens=options["context"] or (64 if on_cpu else 512),
        seconds=min(options["seconds"], 2.0) if on_cpu else options["seconds"],
    )


def _show(screen: Screen, record: Mapping[str, Any]) -> None:
    from rewrite.profile import profile_tables

    screen.line("profile", profile_tables.conditions(record))
    screen.line("", profile_tables.summary(record))
    made = [profile_tables.shares(record)]
    for name, side in record["sides"].items():
        title = (
            "the largest kernels" if record["kind"] == "trace" else f"{profile_tables.NAMES[name]}: the largest rows"
        )
        made.append(profile_tables.rows(side, title))
    for table in made:
        screen.figures(table.title, table.headings, table.rows, table.notes)
    for number, each in enumerate(record.get("advice", [])):
        screen.line("advice" if not number else "", each["text"])
    for number, each in enumerate(record.get("needless", {}).get("findings", [])):
        screen.line("needless" if not number else "", each["text"])


def _write(record: dict[str, Any], options: Mapping[str, Any]) -> None:
    from rewrite.benchmark.benchmark_plan import plain
    from rewrite.delivery import json_report
    from rewrite.profile import profile_tables

    json_report.write(options["json_path"], "profile", plain(record))
    if options["markdown"] is not None:
        _put(options["markdown"], profile_tables.markdown(record))
    if options["html"] is not None or options["png"] is not None:
        from rewrite.profile import html_report as drawn

        if options["html"] is not None:
            _put(options["html"], drawn.html(record))
        if options["png"] is not None:
            drawn.png(record, options["png"])


def _put(path: Path, text: str) -> None:
    if str(path) == OUTPUT:
        click.echo(text, nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
