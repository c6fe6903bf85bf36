"""`rewrite MODEL --out DIR`: the main job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import (
    FOLDER,
    OUTPUT,
    Command,
    bisect_option,
    complete_models,
    complete_transforms,
    diff_option,
    is_typed,
    reporting_options,
    transformers_option,
    verification_options,
)
from rewrite.typed import again

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.delivery.verification import Request
    from rewrite.delivery.worker import Judge
    from rewrite.package.output import Output
    from rewrite.source.installed import Installed
    from rewrite.source.resolve import Source
    from rewrite.transform import Transform


@dataclass(frozen=True)
class Job:
    """One run of the main command."""

    model: str
    out: Path | None
    """None for a dry run without a folder."""
    only: tuple[str, ...]
    skip: tuple[str, ...]
    also: tuple[str, ...]
    """Transforms that run on request."""
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
    quiet: bool = False
    bisect: bool = True
    judge: Judge | None = None
    """What verifies, if not this process."""
    commits: bool = False
    """Commit the original and then the package."""
    explains: bool = False
    """Say what a change of the file would gain, and write nothing."""


HEADINGS = {
    "Which transforms": ("only", "skip", "with"),
    "Which model": ("transformers", "revision", "trust-remote-code"),
    "What is written": ("out", "dry-run", "explain-missing", "commit", "force"),
    "Verification": ("verify", "quick", "device", "dtype", "weights", "seed", "bisect"),
    "What is said": ("diff", "json", "quiet"),
}


class MainCommand(Command):
    """The command that is called by naming a model, not itself."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **given: Any) -> click.Context:
        """Return the context of a call, in which the command is called as it is typed."""
        return super().make_context("MODEL", args, *more, **given)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what stands behind MODEL."""
        return ["--out DIR", "[OPTIONS]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and say of a second word where it was to go: to `--out`, as with `cp`."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            meant = ""
            if len(rest) == 1 and ctx.params["out"] is None:
                with ctx.scope(cleanup=False):
                    meant = f"; the folder stands behind --out: {again('--out', rest[0])}"
            raise click.UsageError(f"'{rest[0]}' is one word too many{meant or ': a rewrite takes one MODEL'}", ctx)
        return rest


@click.command(
    cls=MainCommand,
    name="apply",
    headings=HEADINGS,
    short_help="Rewrite a model into a folder (the default command).",
    examples=("rewrite llama --out ./optimized_llama", "rewrite llama --dry-run > llama.patch"),
)
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
    help="Run this too, which runs on request only; repeatable.",
)
@transformers_option("Take the model from another transformers")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
@click.option(
    "--verify/--no-verify", default=True, help="Verify, or write and run nothing; without, no torch is needed."
)
@click.option(
    "--dry-run", is_flag=True, help="Write nothing, show the changes; in a pipe as a patch that git applies."
)
@click.option(
    "--explain-missing",
    "explains",
    is_flag=True,
    help="Write nothing, say which change of the file would gain what.",
)
@diff_option(None, "Show the changes instead of their statistics.")
@verification_options
@bisect_option
@reporting_options
@click.option(
    "--commit", "commits", is_flag=True, help="Commit the original, then the package: a review sees what changed."
)
@click.option("--force", is_flag=True, help="Replace an edited package or another model's; kept as a backup.")
def apply(**given: Any) -> int:
    """Rewrite the modeling file of MODEL and write the result, verified, to a folder.

    MODEL is a model type of transformers (llama, XLM-RoBERTa), a class (LlamaForCausalLM), a path of a modeling file,
    which takes its neighbours along, a dotted module, a checkpoint folder or its config.json, or ORG/NAME on the Hub.
    """
    from rewrite.console.console import Screen

    job = _job(**given)
    screen = Screen(patch=job.diff_style == "unified", json=job.json_path, quiet=job.quiet)
    return _run(job, screen)


def _job(
    model: str,
    out: Path | None,
    also: tuple[str, ...],
    verify: bool,
    dry_run: bool,
    diff_style: str | None,
    json_path: Path | None,
    device: str | None,
    dtype: str | None,
    weights: Path | None,
    seed: int | None,
    quick: bool,
    quiet: bool,
    **rest: Any,
) -> Job:
    from rewrite.delivery.verification import Request

    dry_run = dry_run or rest["explains"]
    if not model.strip():
        raise click.UsageError("MODEL is empty: name a model (`rewrite models` lists the types)")
    if rest["commits"] and dry_run:
        raise click.UsageError("--commit and --dry-run: which of them?")
    if out is None and not dry_run:
        raise click.UsageError("--out DIR is missing: where should the package go? (or --dry-run to see the diff)")
    if not verify and any(map(is_typed, ("device", "dtype", "weights", "seed", "quick"))):
        if is_typed("verify"):
            raise click.UsageError(
                "--device, --dtype, --weights, --seed and --quick are for the verification: drop --no-verify"
            )
        verify = True  # what is typed goes before what a file says
    if rest["explains"] or str(json_path) == OUTPUT or (quiet and not is_typed("diff_style")):
        diff_style = "none"
    elif diff_style is None:
        diff_style = "unified" if dry_run and not sys.stdout.isatty() else "stat"
    return Job(
        model=model,
        out=out,
        also=also,
        verify=verify and not dry_run,
        dry_run=dry_run,
        diff_style=diff_style,
        json_path=json_path,
        quiet=quiet,
        request=Request(device, dtype, weights, seed=seed, quick=quick),
        **rest,
    )


def _run(job: Job, screen: Screen) -> int:
    from rewrite import gc_paused
    from rewrite.delivery import verification, worker
    from rewrite.source import release
    from rewrite.verify.models.device import usable_device

    if job.verify and job.request.device is not None:
        verification.require_libraries("verification (--no-verify leaves it out)")
        usable_device(job.request.device)
    verifies = bool(click.get_current_context().obj) and job.verify and not job.dry_run and job.out is not None
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(worker.judge(verifies, job.request.quick))
        library = stack.enter_context(release.library(job.asked))
        if not job.verify:  # nothing outlives the rewriting that would be worth collecting
            stack.enter_context(gc_paused.paused())
        return _with(library, replace(job, judge=judge), screen)


def _with(library: Installed | None, job: Job, screen: Screen) -> int:
    """Run the job on the model that a transformers has."""
    from rewrite.delivery import commits, verification
    from rewrite.package import output, swap
    from rewrite.package.assemble import modeling_name
    from rewrite.source import verifiable
    from rewrite.source.resolve import resolve, weights_fit
    from rewrite.transforms import select

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
    repository = commits.repository_of(job.out) if job.commits else None
    with swap.alone(job.out):
        place = output.for_model(output.prepare(job.out, source.path, job.force), source, job.force)
        code = _rewrite(job, screen, source, transforms, place)
    if repository is not None and code == 0:
        name = modeling_name(source)
        said = f"transformers {source.transformers_version}" if source.module else source.path.name
        made = commits.commit(
            repository, f"{name}.py", source.text, (f"Copy {name} of {said}", f"Rewrite {name} by hf-rewrite")
        )
        screen.line("committed", f"{made[0][:9]} the original, {made[1][:9]} the package")
    return code


def _rewrite(job: Job, screen: Screen, source: Source, transforms: Sequence[Transform], place: Output | None) -> int:
    from rewrite.codemod.build import require_sites, tried
    from rewrite.delivery import json_report, summary
    from rewrite.delivery.delivery import Delivery, deliver
    from rewrite.delivery.missing import of_missing, show_missing
    from rewrite.package import original
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options

    summary.show_source(screen, source)
    with screen.working(f"rewriting {source.path.name}"):
        built = tried(source, transforms)
    if job.explains:
        show_missing(screen, built, transforms)
        report = {**json_report.of_build(built), "written": False, "missing": of_missing(built, transforms)}
        json_report.write(job.json_path, "apply", report)
        return 0
    if not built.rewritten.sites:
        json_report.write(job.json_path, "apply", {**json_report.of_build(built), "written": False})
    require_sites(built)
    before, name = original.text_of(source.path), original.patch_path(source)
    screen.show_diff(before, built.rewritten.text, name, job.diff_style)
    if place is None:
        summary.show_build(screen, built, transforms)
        screen.line("written", "nothing (--dry-run)")
        out = () if job.out is not None else ("--out", _folder_for(source))
        screen.line("next", again(*out, without=("--dry-run", "--diff", "--json", "--quiet")))
        json_report.write(job.json_path, "apply", json_report.of_build(built))
        return 0
    vendored = place.previous is not None and place.previous.options.vendored
    package = assemble(built, transforms, Options(job.only, job.skip, job.also, vendored), place.folder)
    delivery = Delivery(
        job.verify,
        job.request,
        job.trust_remote_code,
        job.force,
        job.json_path,
        judge=job.judge,
        bisect=job.bisect,
    )
    return deliver(delivery, screen, built, package, place)


def _folder_for(source: Source) -> str:
    """Return a folder that a package could go to."""
    return f"./optimized_{source.path.stem.removeprefix('modeling_')}"
