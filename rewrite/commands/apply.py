"""`rewrite MODEL --out DIR`: the main job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.commands.options import (
    FOLDER,
    OUTPUT,
    Command,
    bisect_option,
    complete_models,
    complete_transforms,
    complete_wanted,
    diff_option,
    features_of,
    is_typed,
    reporting_options,
    runtime_option,
    transformers_option,
    verification_options,
)
from rewrite.package import features, targets
from rewrite.package.features import FEATURES
from rewrite.package.targets import TARGETS

if TYPE_CHECKING:
    from rewrite.deliver.beside import Judge
    from rewrite.deliver.verification import Request
    from rewrite.engine.build import Build
    from rewrite.package.output import Output
    from rewrite.show.console import Screen
    from rewrite.transform import Transform
    from rewrite.upstream.installed import Installed
    from rewrite.upstream.source import Source


WANTED = " or ".join(features.ON_REQUEST)


@dataclass(frozen=True)
class Job:
    """One run of the main command."""

    model: str
    out: Path | None
    """None for a dry run without a folder."""
    only: tuple[str, ...]
    skip: tuple[str, ...]
    also: tuple[str, ...]
    """Transforms that run on request, less what `wanted` has."""
    target: str | None
    wanted: tuple[str, ...]
    """What the runtime is to have, keys of `features.FEATURES`."""
    unwanted: tuple[str, ...]
    """What it is not to have."""
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
    runtime: Path | None = None
    """The folder of a runtime to share with other packages."""
    quiet: bool = False
    bisect: bool = True
    judge: Judge | None = None
    """What verifies, if not this process."""


@click.command(
    cls=Command,
    name="apply",
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
    metavar="NAME",
    shell_complete=complete_wanted,
    help=f"Run this transform too, which runs on request only, or have {WANTED} in the runtime; repeatable.",
)
@transformers_option("Take the model from there, not from what is installed")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hub.")
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    help="GPUs that the runtime is for: rocm adds AMD's aiter and settings to what cuda has. Default: this machine's.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    type=click.Choice(tuple(FEATURES)),
    help=f"Leave {' or '.join(sorted(FEATURES))} out of the runtime; repeatable. A package keeps its choice until "
    "told. docs/size.md has sizes.",
)
@runtime_option
@click.option("--verify/--no-verify", default=True, help="Without: write and run nothing; works without torch.")
@click.option("--dry-run", is_flag=True, help="Write nothing; in a pipe, print a patch that git applies.")
@diff_option(None, "Show the changes instead of their statistics.")
@verification_options
@bisect_option
@reporting_options
@click.option("--force", is_flag=True, help="Replace an edited package or another model's; kept as a backup.")
def apply(**given: Any) -> int:
    """Rewrite the modeling file of MODEL and write the result, verified, to a folder.

    MODEL is a model type of transformers (llama, XLM-RoBERTa), a class (LlamaForCausalLM), a path of a modeling file,
    which takes its neighbours along, a dotted module, a checkpoint folder or its config.json, or ORG/NAME on the Hub.
    """
    from rewrite.show.console import Screen

    job = _job(**given)
    screen = Screen(patch=job.diff_style == "unified", json=job.json_path, quiet=job.quiet)
    return _run(job, screen)


def _job(
    model: str,
    out: Path | None,
    also: tuple[str, ...],
    without: tuple[str, ...],
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
    from rewrite.deliver.verification import Request

    if not model.strip():
        raise click.UsageError("MODEL is empty: name a model (`rewrite models` lists the types)")
    if out is None and not dry_run:
        raise click.UsageError("--out DIR is missing: where should the package go? (or --dry-run to see the diff)")
    if not verify and any(map(is_typed, ("device", "dtype", "weights", "seed", "quick"))):
        if is_typed("verify"):
            raise click.UsageError(
                "--device, --dtype, --weights, --seed and --quick are for the verification: drop --no-verify"
            )
        verify = True  # what is typed goes before what a file says
    if str(json_path) == OUTPUT or (quiet and not is_typed("diff_style")):
        diff_style = "none"
    elif diff_style is None:
        diff_style = "unified" if dry_run and not sys.stdout.isatty() else "stat"
    transforms, wanted, unwanted = features_of(also, without)
    return Job(
        model=model,
        out=out,
        also=transforms,
        wanted=wanted,
        unwanted=unwanted,
        verify=verify and not dry_run,
        dry_run=dry_run,
        diff_style=diff_style,
        json_path=json_path,
        quiet=quiet,
        request=Request(device, dtype, weights, seed=seed, quick=quick),
        **rest,
    )


def _run(job: Job, screen: Screen) -> int:
    from rewrite.deliver import beside

    own = bool(click.get_current_context().obj)
    with beside.judge(own and job.verify and not job.dry_run and job.out is not None, job.request.quick) as judge:
        return _all(replace(job, judge=judge), screen)


def _all(job: Job, screen: Screen) -> int:
    from rewrite import collector
    from rewrite.upstream import release

    # Without a verification nothing outlives the rewriting that would be worth collecting.
    with release.library(job.asked) as library, contextlib.nullcontext() if job.verify else collector.paused():
        return _with(library, job, screen)


def _with(library: Installed | None, job: Job, screen: Screen) -> int:
    """Run the job on the model that a transformers has."""
    from rewrite.deliver import verification
    from rewrite.package import output, swap
    from rewrite.transforms import select
    from rewrite.upstream import verifiable
    from rewrite.upstream.source import resolve, weights_fit

    transforms = select(job.only, job.skip, job.also, job.out, FEATURES if job.also else ())
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
    from rewrite.deliver import report, summary
    from rewrite.deliver.delivery import Delivery, deliver
    from rewrite.engine.build import require_sites, tried
    from rewrite.package import original, output
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options
    from rewrite.package.targets import of_machine

    summary.show_source(screen, source)
    with screen.working(f"rewriting {source.path.name}"):
        built = tried(source, transforms)
    if not built.rewritten.sites:
        report.write(job.json_path, "apply", {**report.of_build(built), "written": False})
    require_sites(built)
    before, name = original.text_of(source.path), original.patch_path(source)
    screen.show_diff(before, built.rewritten.text, name, job.diff_style)
    if place is None:
        summary.show_build(screen, built, transforms)
        screen.line("written", "nothing (--dry-run)")
        screen.line("next", f"rewrite {job.model} --out {_folder_for(source)}")
        report.write(job.json_path, "apply", report.of_build(built))
        return 0
    without = _without(job, screen, built, place)
    options = Options(job.only, job.skip, job.also, job.target or of_machine(), _runtime(job, place), without)
    package = assemble(built, transforms, options, place.folder)
    output.check_shared(place.shown, package)
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


def _without(job: Job, screen: Screen, built: Build, place: Output) -> tuple[str, ...]:
    """Return what the runtime does not have: what nobody asked for and nothing shows to be needed; say the latter."""
    from rewrite.upstream.checkpoint import read_config

    source = built.source
    folder = source.checkpoint or job.request.weights
    config = {} if folder is None else read_config(folder)
    needed = features.needed_for(config, source.model_type or "", targets.cards(), built.rewritten.text)
    before = None if place.previous is None else place.previous.options.without
    for name, why in needed.items():
        if name not in (*job.wanted, *job.unwanted):
            screen.line("runtime", f"with {name}: {why}")
    return features.without(before, (*job.wanted, *needed), job.unwanted)


def _runtime(job: Job, place: Output) -> str | None:
    """Return the way to the runtime that the package shares: the one asked for, else that of the package before."""
    from rewrite.package import shared

    if job.runtime is not None:
        return shared.way_to(place.folder, job.runtime)
    if place.previous is None or (folder := shared.of(place.folder, place.previous)) is None:
        return None
    shared.read(folder)
    return place.previous.options.runtime


def _folder_for(source: Source) -> str:
    """Return a folder that a package could go to."""
    return f"./optimized_{source.path.stem.removeprefix('modeling_')}"
