"""Small bugs made by rule in what was generated, and how many of them `verify` catches.

    python bench/mutants.py [MODEL ...] [--each 60] [--jobs 2] [--limit-seconds S] [--rows DIR] [--seed 0]
                            [--device cpu] [--quick] [--baselines] [--only NAME ... [--checks CHECK ...]]
                            [--of FILE ...] [--json FILE]

Each model is rewritten into a package. A mutant is the package with one change (`bench/mutation.py`), in the modeling
file or in the runtime that is vendored beside it, half of the sample in either, every rule in its turn. Each is
verified on its own until its first failed check; one that ends its process, or that says nothing for two minutes,
*broke off*.

What no check runs is told from what runs and is not seen: the package itself is verified first (`--baselines`: nothing
else) with the lines and branches counted that run. A mutant elsewhere is *not reached*, and no part of the sample; nor
is one that Python compiles to the same code, or on a CPU one in a kernel, or one that a rule of `bench/equivalent.py`
finds to be the same program. A survivor is *equivalent* where `bench/equivalent.json` says why, and else counts as
missed. Of each it is said which checks measured something else than in the package itself: where none did, the numbers
came out the same on another way.

With `--rows` a later call goes on where this one stops. `--of` draws from a few files alone, from what changed lately,
say: files of a package (`modeling_llama.py`), or of this repository (`runtime/speculative/speculative_loop.py`), whose
classes and functions the package has. `--only` tries the mutants with these names (as a survivor's row has them; their
beginnings do) again and no others; with `--checks` by these checks alone, which is soon over: what they catch is
caught, and of the rest nothing is kept. The table and `--json` name function, rule and change, never a line of a
model's source.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from equivalent import Package, Review, review
from mutation import Mutant, another_program, changed, in_turn, mutants
from trials import PATIENCE_S, Row, Tell, Trial, arguments_of, judged, original, packages, results

from rewrite.verify import Options, Verdict, verify
from rewrite.verify.line_coverage import Reach
from rewrite.verify.models import loaded_sides

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("llama", "qwen3_moe", "gemma2", "bert", "t5", "qwen3_next")
STATUSES = ("caught", "broke off", "survived", "equivalent")
APART = ("in kernels", "not reached", "same code", "same on a CPU", "read by nothing", "default always given")


@dataclass(frozen=True)
class Sample:
    """The mutants of one model to try, and how many others there are and why."""

    model: str
    package: Path
    picked: tuple[Mutant, ...]
    measured: dict[str, str]
    apart: Counter[str]


def baseline(model: str, package: Path, options: Options, tell: Tell) -> Row:
    """Verify the package as it is, and say which of its lines and branches no check runs."""
    reach = Reach.of(loaded_sides.locate(package), wanted=True)
    assert reach.counter is not None
    with reach.counted():
        verdict = verify(original(model), package, replace(options, quick=False), tell)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "reached.json"
        reach.counter.json_report(morfs=[str(file) for file in reach.files], outfile=str(report))
        counts = json.loads(report.read_text("utf-8"))["files"]
    found = {str(Path(name).resolve().relative_to(package.resolve())): count for name, count in counts.items()}
    missed = {name: [count["missing_lines"], count["missing_branches"]] for name, count in found.items()}
    longest = max((check.seconds, check.name) for gate in verdict.gates for check in gate.checks)
    said = {"passed": verdict.passed, "reason": verdict.reason, "longest": longest, "measured": measured(verdict)}
    return {"model": model, "missed": missed, **said}


def measured(verdict: Verdict) -> dict[str, str]:
    """What every check came to, by its name."""
    checks = [check for gate in verdict.gates for check in gate.checks]
    return {check.name: f"{check.status} {dict(check.figures)}" for check in checks}


def ran(mutant: Mutant, missed: dict[str, Any]) -> bool:
    """Whether any check ran what a mutant changes."""
    lines, branches = missed.get(mutant.file, ([], []))
    untaken = [end for start, end in branches if start == mutant.line]
    one_way = mutant.taken in untaken if mutant.taken else any(end != mutant.skipped for end in untaken)
    return mutant.line not in lines and not ((mutant.taken or mutant.skipped) and one_way)


def named(package: Path, row: Row, names: list[str]) -> Sample:
    """The mutants of a model whose names begin so."""
    picked = [one for one in mutants(package) if name_of(row["model"], one).startswith(tuple(names))]
    return Sample(row["model"], package, tuple(picked), row["measured"], Counter())


def within(files: list[str]) -> Callable[[Mutant], bool]:
    """Return what says whether a mutant is in one of these files, of a package or of this repository, if any."""
    texts = [file.read_text("utf-8") for name in files if (file := ROOT / name).is_file()]
    names = {getattr(node, "name", "") for text in texts for node in ast.parse(text).body} - {""}
    return lambda mutant: not files or mutant.file in files or mutant.where.partition(".")[0] in names


def sample(package: Path, row: Row, options: argparse.Namespace) -> Sample:
    """Draw the mutants of a model by its baseline, half of them in what was generated and half in the runtime."""
    if options.only:
        return named(package, row, options.only)
    apart: Counter[str] = Counter()
    whole = Package(package, row["missed"])
    able: dict[str, list[Mutant]] = {"generated": [], "runtime": []}
    wanted = within(options.of)
    for mutant in mutants(package):
        if not wanted(mutant):
            continue
        if mutant.kernel and options.device == "cpu":
            apart["in kernels"] += 1
        elif not mutant.kernel and not ran(mutant, row["missed"]):
            apart["not reached"] += 1
        else:
            able[mutant.place].append(mutant)
    picked: list[Mutant] = []
    for found, count in zip(able.values(), (options.each // 2, options.each), strict=True):
        for mutant in in_turn(found, f"{options.seed} {row['model']}"):
            if len(picked) == count:
                break
            text = (package / mutant.file).read_text("utf-8")
            other = another_program(text, mutant)
            if other is False:
                apart["same code"] += 1
            elif other and options.device == "cpu" and whole.same_on_a_cpu(mutant):
                apart["same on a CPU"] += 1
            elif other and whole.read_by_nothing(mutant):
                apart["read by nothing"] += 1
            elif other and whole.default_always_given(mutant):
                apart["default always given"] += 1
            elif other:
                picked.append(mutant)
    return Sample(row["model"], package, tuple(picked), row["measured"], apart)


def tried(found: Sample, mutant: Mutant, options: Options, tell: Tell) -> Row:
    """Verify a package with a mutant in it; if it survives, name the checks that measured something else."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / found.package.name
        shutil.copytree(found.package, copy)
        file = copy / mutant.file
        file.write_text(changed(file.read_text("utf-8"), mutant), "utf-8")
        row, verdict = judged(found.model, copy, options, tell)
    if verdict.passed:
        now = measured(verdict)
        row["differs"] = [name for name in found.measured if now.get(name) != found.measured.get(name)]
        row["by"] = (
            ", ".join(row["differs"][:3]) + f" ({len(row['differs'])}) differ" if row["differs"] else "none differs"
        )
    return row


def trials(found: Sample, options: Options) -> Iterator[Trial]:
    """Yield the trials of a sample."""
    for mutant in found.picked:
        about = {name: getattr(mutant, name) for name in ("file", "where", "line", "rule", "change", "place")}
        run = partial(tried, found, mutant, options)
        yield Trial(name_of(found.model, mutant), run, {"model": found.model, **about})


def name_of(model: str, mutant: Mutant) -> str:
    """What a mutant's row is called."""
    return f"{model}-{hashlib.sha256(repr(mutant).encode()).hexdigest()[:10]}"


def reviews(found: Sample) -> Iterator[tuple[str, Review]]:
    """Yield what is known by hand about mutants of a sample, by their names."""
    for mutant in found.picked:
        known = review(found.model, mutant, (found.package / mutant.file).read_text("utf-8"))
        if known is not None:
            yield name_of(found.model, mutant), known


def said(row: Row) -> str:
    """One line about a mutant."""
    place = f"{row['model']} {row['file']}:{row['line']} {row['where']}"
    why = "".join(f" · {row[name]}" for name in ("why", "caught_by") if row.get(name))
    return f"{row['status']:<10} {row['seconds']:5.0f} s  {place} · {row['rule']}: {row['change']} · {row['by']}{why}"


def table(rows: list[Row], samples: list[Sample]) -> str:
    """The counts by model, by rule and by place, and the survivors."""
    lines = ["| | tried | caught | broke off | survived | equivalent | caught of the others |", "|---" * 7 + "|"]
    for key in ("model", "rule", "place"):
        for name in dict.fromkeys(row[key] for row in rows):
            lines.append(_counted(name, [row for row in rows if row[key] == name]))
    lines += [_counted("all", rows), "", f"| no part of the sample | {' | '.join(APART)} |", "|---" * 7 + "|"]
    lines += [f"| {one.model} | {' | '.join(str(one.apart[kind]) for kind in APART)} |" for one in samples]
    unseen = [said(row) for row in sorted(rows, key=lambda row: row["status"]) if row["status"] != "caught"]
    times = [row.get("processor", 0) for row in rows] or [0]
    lines += ["", f"{sum(times) / len(times):.1f} processor seconds a mutant, {max(times):.0f} at most", *unseen]
    return "\n".join(lines)


def _counted(name: str, rows: list[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    others = len(rows) - counts["equivalent"]
    share = 1 - counts["survived"] / others if others else 0
    return f"| {name} | {len(rows)} | {' | '.join(str(counts[status]) for status in STATUSES)} | {share:.1%} |"


def samples(arguments: argparse.Namespace, folder: Path, options: Options, deadline: float) -> Iterator[Sample]:
    """Verify the packages as they are, and draw the mutants of those that pass."""
    made = packages(arguments.models, folder / "packages", arguments.jobs, vendored=True)
    firsts = [Trial(f"{model}-baseline", partial(baseline, model, made[model], options)) for model in made]
    for row in results(firsts, folder / "mutants", arguments.jobs, deadline):
        if not row.get("passed"):
            sys.exit(f"{row['name']}: the package itself does not pass: {row.get('reason') or row['by']}")
        print(f"{row['model']} itself: {row['seconds']:.0f} s, longest check {row['longest']}", flush=True)
        assert row["longest"][0] * 2 < PATIENCE_S, "a check that is right takes nearly as long as one that hangs"
        yield sample(made[row["model"]], row, arguments)


def judged_by_hand(row: Row, known: Review | None) -> Row:
    """A row of a survivor with what is known of it."""
    if row["status"] != "survived" or known is None:
        return row
    if known.equivalent:
        return {**row, "status": "equivalent", "why": known.why}
    return {**row, "why": known.why, "caught_by": known.caught_by}


def survey(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], list[Sample]]:
    """Try the mutants of each package that passes."""
    deadline = time.monotonic() + arguments.limit_seconds
    options = Options(
        device=arguments.device, quick=arguments.quick, seed=arguments.seed, fail_fast=True, clean_process=False,
        reach=False, gates=("structure", "parity", "generation"), checks=tuple(arguments.checks),
    )  # fmt: skip
    drawn = list(samples(arguments, folder, options, deadline))
    drawn.sort(key=lambda one: arguments.models.index(one.model))
    found = [] if arguments.baselines else [trial for one in drawn for trial in trials(one, options)]
    if arguments.only:
        for trial in found:
            (folder / "mutants" / f"{trial.name}.json").unlink(missing_ok=True)
    random.Random(arguments.seed).shuffle(found)  # what is cut off is a sample of every model
    known = {name: one for sample in drawn for name, one in reviews(sample)}
    rows = []
    for row in results(found, folder / "mutants", arguments.jobs, deadline):
        if arguments.checks and row["status"] == "survived":
            (folder / "mutants" / f"{row['name']}.json").unlink()
        rows.append(row := judged_by_hand(row, known.get(row["name"])))
        print(said(row), flush=True)
    print(f"{len(rows)} of {len(found)} mutants tried")
    return rows, drawn


def main() -> None:
    """Make mutants, verify them, print and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--of", nargs="+", metavar="FILE", default=[])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--checks", nargs="+", metavar="CHECK", default=[])
    parser.add_argument("--json", type=Path)
    arguments = arguments_of(parser)
    with tempfile.TemporaryDirectory() as folder:
        rows, drawn = survey(arguments, arguments.rows or Path(folder))
    print(table(rows, drawn))
    if arguments.json is not None:
        apart = {one.model: dict(one.apart) for one in drawn}
        about = {"seed": arguments.seed, "machine": machine(arguments.device), "kinds": APART, "apart": apart}
        about["drawn"] = sum(len(one.picked) for one in drawn)
        rows.sort(key=lambda row: row["name"])
        arguments.json.write_text(
            json.dumps({**about, "rows": [plain(row) for row in rows]}, indent=1) + "\n", "utf-8"
        )


def machine(device: str) -> str:
    """Where it ran."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{device.upper()}, {versions}, {date.today().isoformat()}"


def plain(row: Row) -> Row:
    """A row without what depends on the machine's load."""
    return {name: value for name, value in row.items() if name not in ("seconds", "differs", "gate", "line")}


if __name__ == "__main__":
    main()
