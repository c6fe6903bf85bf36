"""`rewrite MODEL --out DIR`: the main job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.commands.options import (
    FOLDER,
    complete_models,
    complete_transforms,
    diff_option,
    json_option,
    transformers_option,
    verification_options,
)

if TYPE_CHECKING:
    from rewrite.deliver.beside import Judge
    from rewrite.deliver.verification import Request
    from rewrite.package.output import Output
    from rewrite.show.console import Screen
    from rewrite.transform import Transform
    from rewrite.upstream.installed import Installed
    from rewrite.upstream.source import Source


@dataclass(frozen=True)
class Job:
    """One run of the main command."""

    model: str
    out: Path | None
    """None for a dry run without a folder."""
    only: tuple[str, ...]
    skip: tuple[str, ...]
    also: tuple[str, ...]
    verify: bool
    dry_run: bool
    diff_style: str
    force: bool
    trust_remote_code: bool
    revision: str | None
    asked: str | None
    """Which transformers, as the user named it; None is the installed one."""
    request: Request
    json_path: Path | None
    judge: Judge | None = None
    """What verifies, if not this process."""


@click.command(name="apply", short_help="Rewrite a model into a folder (the default command).")
@click.argument("model", shell_complete=complete_models)
@click.option("--out", "-o", type=FOLDER, metavar="DIR", help="Folder to write; created with its parents.")
@click.option(
    "--only", multiple=True, metavar="TRANSFORM", shell_complete=complete_transforms, help="Run only this; repeatable."
)
@click.option(
    "--skip",
    multiple=True,
    metavar="TRANSFORM",
    shell_complete=complete_transforms,
    help="Leave this out; repeatable.",
)
@click.option(
    "--with",
    "also",
    multiple=True,
    metavar="TRANSFORM",
    shell_complete=complete_transforms,
    help="Run this too, which only runs on request; repeatable.",
)
@transformers_option("Take the model from there, not from what is installed")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
@click.option("--no-verify", is_flag=True, help="Write without running anything; works without torch.")
@click.option("--dry-run", is_flag=True, help="Show the diff and write nothing.")
@diff_option(None, "How to show the changes. Default: unified on a terminal, stat elsewhere.")
@verification_options
@json_option
@click.option("--force", is_flag=True, help="Replace an edited package or another model's; kept as a backup.")
def apply(**given: Any) -> int:
    """Rewrite the modeling file of MODEL and write the result, verified, to a folder.

    MODEL is a model type of transformers (llama, XLM-RoBERTa), a class (LlamaForCausalLM), a path of a modeling file,
    which takes its neighbours along, a dotted module, a checkpoint folder or its config.json, or ORG/NAME on the Hub.
    """
    from rewrite.show.console import Screen

    job = _job(**given)
    screen = Screen(quiet_output=_patch_on_output(job))
    return _run(job, screen)


def _job(
    model: str,
    out: Path | None,
    no_verify: bool,
    dry_run: bool,
    diff_style: str | None,
    json_path: Path | None,
    device: str | None,
    dtype: str | None,
    weights: Path | None,
    seed: int | None,
    quick: bool,
    **rest: Any,
) -> Job:
    from rewrite.deliver.verification import Request

    if out is None and not dry_run:
        raise click.UsageError("--out DIR is missing: where should the package go? (or --dry-run to see the diff)")
    if no_verify and (device or dtype or weights or seed is not None or quick):
        raise click.UsageError(
            "--device, --dtype, --weights, --seed and --quick are for the verification: drop --no-verify"
        )
    if diff_style is None:
        terminal = sys.stdout.isatty()
        diff_style = "none" if str(json_path) == "-" else "unified" if terminal or dry_run else "stat"
    return Job(
        model=model,
        out=out,
        verify=not no_verify and not dry_run,
        dry_run=dry_run,
        diff_style=diff_style,
        json_path=json_path,
        request=Request(device, dtype, weights, seed=seed, quick=quick),
        **rest,
    )


def _patch_on_output(job: Job) -> bool:
    """Whether standard output is for the patch, or the report, alone."""
    return job.diff_style == "unified" or str(job.json_path) == "-"


def _run(job: Job, screen: Screen) -> int:
    from rewrite.deliver import beside

    own = bool(click.get_current_context().obj)
    with beside.judge(own and job.verify and not job.dry_run and job.out is not None, job.request.quick) as judge:
        return _all(replace(job, judge=judge), screen)


def _all(job: Job, screen: Screen) -> int:
    from rewrite.upstream import release

    with release.library(job.asked) as library:
        return _with(library, job, screen)


def _with(library: Installed | None, job: Job, screen: Screen) -> int:
    """Run the job on the model that a transformers has."""
    from rewrite.deliver import verification
    from rewrite.package import output, swap
    from rewrite.transforms import select
    from rewrite.upstream import verifiable
    from rewrite.upstream.source import resolve, weights_fit

    transforms = select(job.only, job.skip, job.also, job.out)
    with screen.working(f"finding {job.model}"):
        source = resolve(job.model, job.trust_remote_code, job.revision, library)
    if job.verify:
        verification.require_libraries("verification (--no-verify leaves it out)")
        source = verifiable.as_installed(source) if job.asked is not None else source
    if job.request.weights is not None:
        weights_fit(source, job.request.weights)
    if job.dry_run or job.out is None:
        return _rewrite(job, screen, source, transforms, None)
    with swap.alone(job.out):
        place = output.for_model(output.prepare(job.out, source.path, job.force), source, job.force)
        return _rewrite(job, screen, source, transforms, place)


def _rewrite(job: Job, screen: Screen, source: Source, transforms: Sequence[Transform], place: Output | None) -> int:
    from rewrite.deliver import report
    from rewrite.deliver.delivery import Delivery, deliver
    from rewrite.engine.build import build
    from rewrite.package import original
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options

    with screen.working(f"rewriting {source.path.name}"):
        built = build(source, transforms)
    report.show_build(screen, built)
    before, name = original.text_of(source.path), original.patch_path(source)
    screen.show_diff(before, built.rewritten.text, name, job.diff_style)
    if place is None:
        screen.line("written", "nothing (--dry-run)")
        report.write(job.json_path, report.of_build(built))
        return 0
    package = assemble(built, transforms, Options(job.only, job.skip, job.also), place.folder)
    delivery = Delivery(job.verify, job.request, job.trust_remote_code, job.force, job.json_path, judge=job.judge)
    return deliver(delivery, screen, built, package, place)
