"""`rewrite bench DIR`: latency of a package and its original, interleaved."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import DTYPES, FOLDER, json_option


@click.command(short_help="Measure a package against its original.")
@click.argument("folder", type=FOLDER)
@click.option("--device", metavar="DEVICE", help="Measure on this device: cpu, cuda, cuda:1.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Measure in this precision.")
@click.option("--shape", type=click.Choice(("tiny", "1b", "8b")), help="Size of the model measured.")
@click.option("--original", "given", type=click.Path(path_type=Path), metavar="FILE", help="Where the original is.")
@click.option("--trust-remote-code", is_flag=True, help="Let a modeling file that came with a checkpoint run.")
@json_option
def bench(
    folder: Path,
    device: str | None,
    dtype: str | None,
    shape: str | None,
    given: Path | None,
    trust_remote_code: bool,
    json_path: Path | None,
) -> int:
    """Measure the package in FOLDER against the file that it was made from; slower is a failure."""
    from rewrite import judge, original, report
    from rewrite.console import Screen
    from rewrite.lock import read_lock

    judge.require_libraries("measuring")
    source = original.find(folder, read_lock(folder), given)
    judge.require_trust(source, trust_remote_code)
    screen = Screen(quiet_output=str(json_path) == "-")
    request = judge.Request(device, dtype, shape=shape, gates=judge.LATENCY_ONLY)
    with screen.working("measuring") as progress:
        verdict = judge.judge(source.path, folder, request, progress)
    screen.said.print(judge.rendered(verdict), markup=False, soft_wrap=True)
    report.write(json_path, verdict.to_json())
    return 0 if verdict.passed else 1
