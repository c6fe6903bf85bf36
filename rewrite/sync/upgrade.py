"""One package made anew, with the user's edits: what `rewrite sync` does to each folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewrite.console.console import Screen
from rewrite.delivery import commits, delivery, verification
from rewrite.delivery.summary import describe
from rewrite.errors import BaseLost, ChangedMeanwhile, EditsBroken, RewriteError, UsageError
from rewrite.package import original, output, swap
from rewrite.package.assemble import KEPT, VERDICT_NAME, Package
from rewrite.package.lock import Lock, read_lock
from rewrite.source.installed import Installed, find_transformers
from rewrite.source.resolve import LOCK_NAME
from rewrite.sync import edits, merge, rebuild
from rewrite.sync.rebuild import Renewal
from rewrite.sync.site_changes import RuleChange
from rewrite.typed import again, typed

VIEWS = ("upstream", "rewritten", "edits")
"""What `--show` shows: the original old → new, the generated text old → new, your edits."""


@dataclass(frozen=True)
class Wish:
    """What the user asked of a sync, for every package alike."""

    library: Installed | None = None
    """The transformers to take the original from; None is the installed one."""
    given: Path | None = None
    accepted: Sequence[str] = ()
    """Rules that may lose places."""
    replaced: Sequence[str] = ()
    """Generated files whose edits may be dropped."""
    resolved: Mapping[str, Path] = field(default_factory=dict)
    verify: bool = False
    request: verification.Request = field(default_factory=verification.Request)
    trust_remote_code: bool = False
    views: Sequence[str] = ()
    diff_style: str = "stat"
    bisect: bool = True
    """Look for the transform at fault where the verification fails."""
    dry_run: bool = False
    commits: bool = False
    """Commit upstream's change to the user's file, then the package."""


@dataclass(frozen=True)
class Result:
    """How the sync of one package ended."""

    code: int
    changed: bool = False
    rules: tuple[RuleChange, ...] = ()
    conflicts: tuple[str, ...] = ()


def sync(folder: Path, wish: Wish, screen: Screen) -> Result:
    """Make the package in `folder` anew, merge the user's edits, and put it in place if it holds together.

    Raises:
        EditsBroken: if the merged text cannot work.
        RewriteError: if a rule lost a place and the user did not accept that, if generated files that are not merged
            were edited, and for everything else that keeps the package from being made.
    """
    output.clean(folder)
    lock = read_lock(folder)
    output.check_links(folder, lock)
    repository = commits.repository_of(folder) if wish.commits and not wish.dry_run else None
    seen = output.snapshot(folder, lock)
    if wish.verify:
        _require_installed(folder, wish.library)
        verification.require_libraries("verification")
    with screen.working(f"rewriting {folder}"):
        source = rebuild.source_of(folder, lock, wish.given, wish.library)
        renewed = rebuild.renewed(folder, lock, source)
    _say(screen, renewed, wish.accepted)
    _show(screen, folder, lock, renewed, wish)
    whole = lock.intact and not wish.resolved and not _damaged(folder, lock, renewed.package)
    if whole and not rebuild.differences(lock, renewed.package):
        edits.check_importable(folder, lock)
        screen.line("written", "nothing: the package is up to date")
        return Result(0, rules=renewed.rules)
    if lost := [rule for rule in renewed.lost if rule not in wish.accepted]:
        raise RewriteError(
            f"{folder} was left as it is: {', '.join(lost)} lost a place (above). To go on without: "
            f"{_again(folder, '--accept', lost)}"
        )
    try:
        merged = edits.with_edits(folder, lock, renewed.package, wish.resolved)
    except BaseLost:
        _check_unchanged(folder, lock)
        raise
    if merged.conflicts:
        return _conflict(screen, folder, merged.conflicts, renewed, wish)
    _check_edits(folder, lock, merged.package, source.transformers_root, wish)
    if wish.dry_run:
        if not wish.views:
            _show_diff(screen, folder, lock, merged.package, wish)
        screen.line("written", "nothing (--dry-run)")
        return Result(0, rules=renewed.rules)
    upstream = _upstream(folder, lock, renewed)
    result = _deliver(screen, folder, lock, replace(renewed, package=merged.package), seen, wish)
    if repository is not None and result.changed:
        version = source.transformers_version if source.module else source.path.name
        said = (
            f"{lock.modeling}: what changed in {source.path.name} ({version})",
            f"Sync {folder.name} by hf-rewrite",
        )
        made = commits.commit(repository, lock.modeling, upstream, said)
        screen.line("committed", ", ".join(one[:9] for one in made))
    return result


def _upstream(folder: Path, lock: Lock, renewed: Renewal) -> str | None:
    """Return the user's file with what changed in its original alone; None where that is nothing, or conflicts."""
    if renewed.before is None or renewed.before == renewed.source.text:
        return None
    merged = merge.three_way(renewed.before, original.text_of(folder / lock.modeling), renewed.source.text)
    return None if merged.conflicts else merged.text


def _deliver(
    screen: Screen, folder: Path, lock: Lock, renewed: Renewal, seen: Mapping[str, str], wish: Wish
) -> Result:
    """Put a package in place if its folder is still as it was `seen` when the merge began."""
    package = renewed.package
    _show_diff(screen, folder, lock, package, wish)
    dropped = [name for name in wish.replaced if name in output.edited_files(folder, lock)]
    if dropped:
        aside = {output.free_name(folder, name, ".edited"): (folder / name).read_bytes() for name in dropped}
        package = replace(package, files={**package.files, **aside})
    with swap.alone(folder):
        place = output.prepare(
            folder,
            renewed.source.path,
            merged=(*edits.merged_names(lock), *dropped, *(n for n in lock.files if n.startswith(f"{KEPT}/"))),
            kept=() if wish.verify else (VERDICT_NAME,),
        )
        how = delivery.Delivery(
            wish.verify,
            wish.request,
            wish.trust_remote_code,
            force=True,
            unverified="not run (--verify runs it)",
            bisect=wish.bisect,
        )
        code = delivery.deliver(how, screen, renewed.build, package, replace(place, seen=seen))
    return Result(code, changed=code == 0, rules=renewed.rules)


def _conflict(screen: Screen, folder: Path, conflicts: Mapping[str, str], renewed: Renewal, wish: Wish) -> Result:
    copies = [folder / f"{name}.conflict" for name in conflicts]
    if not wish.dry_run:
        with swap.alone(folder):
            for copy, text in zip(copies, conflicts.values(), strict=True):
                output.write_beside(copy, text.encode("utf-8"))
    screen.problem("written", "nothing: your edits and the new text change the same lines")
    if wish.dry_run:
        screen.problem("", f"what to resolve is written by: {_again(folder, '--resolved', ())}")
        return Result(1, rules=renewed.rules, conflicts=tuple(conflicts))
    for copy in copies:
        screen.problem("conflict", f"in {copy} take out the markers: yours, generated last, generated now")
    screen.problem("", f"then: {_again(folder, '--resolved', copies)}")
    return Result(1, rules=renewed.rules, conflicts=tuple(conflicts))


def _check_edits(folder: Path, lock: Lock, package: Package, root: Path | None, wish: Wish) -> None:
    allowed = {*edits.merged_names(lock), *wish.replaced}
    edited = [name for name in output.edited_files(folder, lock) if name not in allowed]
    # an edit of the kept texts, or of what a newer version no longer has, takes nothing away from the user's file
    edited = [name for name in edited if not name.startswith(f"{KEPT}/")]
    if edited:
        _check_unchanged(folder, lock)
        raise RewriteError(
            f"{folder} has your edits in {', '.join(edited)}, which sync does not merge. Move them into the modeling "
            f"file, or drop them: {_again(folder, '--replace', edited)} (each is kept beside the new one as .edited)."
        )
    for name, problems in edits.problems(folder, package, root).items():
        raise EditsBroken(folder, name, problems)


def _check_unchanged(folder: Path, lock: Lock) -> None:
    """Check that no other run was faster: what it wrote is no edit.

    Raises:
        ChangedMeanwhile: if one was.
    """
    if read_lock(folder) != lock:
        raise ChangedMeanwhile(folder, LOCK_NAME)


def _damaged(folder: Path, lock: Lock, package: Package) -> bool:
    """Return whether a generated file is missing, or a kept text or a shared file is not as it was generated."""
    missing = any(not (folder / name).is_file() for name in lock.files)
    return missing or any(name.startswith(f"{KEPT}/") for name in output.edited_files(folder, lock))


def _require_installed(folder: Path, library: Installed | None) -> None:
    installed = find_transformers()
    if library is not None and (installed is None or installed.version != library.version):
        found = f"transformers {installed.version} is" if installed else "none is"
        raise UsageError(
            f"{folder} cannot be verified with transformers {library.version}: {found} installed. "
            f"Sync without --verify, install transformers {library.version}, then: {typed('verify', folder)}"
        )


def _say(screen: Screen, renewed: Renewal, accepted: Sequence[str]) -> None:
    """Say rule by rule what became of its places, and of those that find what they found how many they are."""
    screen.line("source", describe(renewed.source))
    label = "rules"
    if same := [change for change in renewed.rules if change.applied and not change.moved]:
        places = sum(change.applied for change in same)
        screen.line(label, f"{len(same)} as before, at {places} place{'s'[: places > 1]}", "dim")
        label = ""
    for change in renewed.rules:
        if not change.moved:
            continue
        counts = f"applied {change.applied} · unchanged {len(change.unchanged)} · newly matches {len(change.new)}"
        style = "red" if change.lost else "dim"
        screen.line(label, f"{change.rule}: {counts} · lost {len(change.lost)}", style)
        label = ""
        for site in change.new:
            screen.line("", f"  newly matches {_line(site)}", "green")
        for lost in change.lost:
            text = f"  lost {_line(lost.site)}: {lost.why}"
            if change.rule in accepted:
                screen.line("", text)
            else:
                screen.problem("", text)
        for taken in change.adopted:
            screen.line("", f"  done upstream {_line(taken.site)}: {taken.why}")
        for site in change.gone:
            screen.line("", f"  no longer there upstream {_line(site)}")


def _show_diff(screen: Screen, folder: Path, lock: Lock, package: Package, wish: Wish) -> None:
    before = original.text_of(folder / lock.modeling)
    screen.show_diff(before, package.files[lock.modeling].decode("utf-8"), lock.modeling, wish.diff_style)


def _show(screen: Screen, folder: Path, lock: Lock, renewed: Renewal, wish: Wish) -> None:
    name = lock.modeling
    now = renewed.package.files[name].decode("utf-8")
    style = "unified" if wish.diff_style == "stat" and wish.views else wish.diff_style
    for view in wish.views:
        if view == "upstream" and renewed.before is None:
            screen.warn(f"{folder} has not kept the original that it was made from")
        elif view == "upstream":
            screen.show_diff(renewed.before or "", renewed.source.text, renewed.source.path.name, style)
        elif view == "rewritten":
            screen.show_diff(edits.kept_text(folder, name), now, name, style)
        else:
            screen.show_diff(
                edits.generated_like_yours(folder, lock, name), original.text_of(folder / name), name, style
            )


def _line(site: str) -> str:
    return " ".join(site.split())


def _again(folder: Path, option: str, values: Sequence[object]) -> str:
    """Return the call at hand for one package, written this time, with an option for each value."""
    words = [word for value in values for word in (option, value)]
    return again(*words, arguments=(folder,), without=("--dry-run", "--resolved"))
