"""Real upgrades: packages made from one release of transformers and synced through the next ones.

    python bench/upgrades.py chains --wheels DIR --python 5.0.0=/env/bin/python … [--jobs 2] [--edited]
    python bench/upgrades.py edits --wheels DIR [--pairs 300]
    python bench/upgrades.py kills [--kills 200]
    python bench/upgrades.py guard --wheels DIR
    python bench/upgrades.py pages

Each writes its part of bench/results/upgrades.json; `pages` writes the tables of docs/upgrades.md from it. The wheels
come from `pip download --no-deps transformers==VERSION -d DIR`; a release whose Python is given is verified there, and
it has `runtime/` installed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "upgrades.json"
PAGE = ROOT / "docs" / "upgrades.md"
RELEASES = ("5.0.0", "5.5.4", "5.11.0", "5.17.0", "5.23.0")
MODELS = ("llama", "qwen3", "gemma3", "mixtral", "phi3", "qwen3_moe", "mistral", "olmo2", "glm4", "cohere2")
FROM_4 = ("llama", "qwen3", "gemma3")
SEED = 20261121

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "rewrite.cli", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)


def unpacked(wheels: Path, folder: Path) -> dict[str, Path]:
    """Unpack every wheel once, and return the folder that transformers lies in, by version."""
    from rewrite.source import release

    found = {}
    for wheel in sorted(wheels.glob("transformers-*.whl")):
        version = wheel.name.split("-")[1]
        release._unpacked(wheel, folder / version)
        found[version] = folder / version
    return found


def original(tree: Path, model: str) -> Path:
    return tree / "transformers" / "models" / model / f"modeling_{model}.py"


# chains


def chain(
    model: str,
    releases: tuple[str, ...],
    trees: dict[str, Path],
    wheels: Path,
    pythons: dict[str, str],
    edited: bool = False,
) -> list[dict[str, Any]]:
    """Make a package from the first release, sync it through the others, and return one row a step.

    With `edited`, a method, a comment and a log line in a rewritten method are added first; a conflict ends the chain.
    """
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = command(
            original(trees[releases[0]], model), "--out", model, "--no-verify", "--diff", "none", cwd=folder
        )
        if made.returncode:
            raise SystemExit(f"{model} {releases[0]}: {made.stderr}")
        mine = with_edits(folder / model / f"modeling_{model}.py", random.Random(model)) if edited else []
        for before, after in itertools.pairwise(releases):
            wheel = wheels / f"transformers-{after}-py3-none-any.whl"
            started = time.perf_counter()
            synced = command(
                "sync", model, "--transformers", wheel, "--diff", "none", "--json", "report.json", cwd=folder
            )
            row: dict[str, Any] = {"model": model, "from": before, "to": after, "code": synced.returncode}
            row["seconds"] = round(time.perf_counter() - started, 1)
            if synced.returncode:
                row["said"] = synced.stderr.strip().splitlines()[-1:]
            else:
                (result,) = json.loads((folder / "report.json").read_text())["packages"].values()
                row["rules"] = {
                    rule["rule"]: {
                        what: rule[what] if what in ("lost", "adopted") else len(rule[what])
                        for what in ("unchanged", "new", "lost", "gone", "adopted")
                    }
                    for rule in result["rules"]
                    if any(rule[what] for what in ("new", "lost", "gone", "adopted"))
                }
                row["sites"] = sum(len(rule["unchanged"]) + len(rule["new"]) for rule in result["rules"])
            text = (folder / model / f"modeling_{model}.py").read_text().split("\n")
            if lost := [line for line in mine if line not in text]:
                raise SystemExit(f"{model} {before} → {after} lost {lost}")
            row["edits"] = len(mine)
            if after in pythons and not synced.returncode:
                row |= verified(pythons[after], folder / model, model)
            rows.append(row)
            print(model, before, "→", after, row["code"], row.get("parity", "not run"), flush=True)
            if edited and synced.returncode:
                break
    return rows


def with_edits(path: Path, choose: random.Random) -> list[str]:
    """Edit a file such that it computes the same, and return the lines that were added."""
    from upgrades.random_edits import EDITS

    text = before = path.read_text()
    for kind in ("add a method", "comment", "log in a rewritten method"):
        text = EDITS[kind](text, choose)
    path.write_text(text)
    return sorted((Counter(text.split("\n")) - Counter(before.split("\n"))) - Counter([""]))


def verified(python: str, package: Path, model: str) -> dict[str, Any]:
    """Verify a package against its original in the environment of its transformers, and run its own self test."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    module = f"transformers.models.{model}.modeling_{model}"
    code = "import sys; from rewrite.verify import Options, summary, verify; "
    code += "found = verify(*sys.argv[1:], Options(quick=True)); print(summary(found)); sys.exit(found.exit_code)"
    done = subprocess.run(
        [python, "-c", code, module, str(package)], env=environment, capture_output=True, text=True, timeout=900
    )
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    code = f"import sys; sys.path.insert(0, '.'); import {package.name} as p; print(p.selftest())"
    tested = subprocess.run(
        [python, "-c", code], cwd=package.parent, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = (tested.stdout.strip() or tested.stderr.strip()).splitlines()[-1]
    return {"parity": done.returncode == 0, "verdict": last, "selftest": tested.returncode == 0, "tested": said}


def chains(arguments: argparse.Namespace) -> None:
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        trees = unpacked(arguments.wheels, Path(folder))
        jobs = [(model, RELEASES) for model in MODELS if arguments.only in (None, model)]
        jobs += [(model, ("4.57.6", *RELEASES)) for model in FROM_4 if arguments.only in (None, model)]
        jobs = [job for job in jobs if not arguments.edited or job[1] == RELEASES]
        settings = (trees, arguments.wheels, pythons, arguments.edited)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            rows = [row for several in pool.map(lambda job: chain(*job, *settings), jobs) for row in several]
    keep("edited chains" if arguments.edited else "chains", rows)


# user edits


def edits(arguments: argparse.Namespace) -> None:
    """Random edits over random upgrades: no edit is lost, and what cannot be merged is a conflict."""
    from upgrades.random_edits import EDITS, outcome

    generator = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = unpacked(arguments.wheels, folder)
        texts = generated_texts(trees)
        counts: dict[str, Counter[str]] = {}
        for number in range(arguments.pairs):
            model = generator.choice(MODELS)
            start = generator.randrange(len(RELEASES) - 1)
            base, new = texts[model, RELEASES[start]], texts[model, RELEASES[start + 1]]
            kinds = generator.sample(sorted(EDITS), generator.choice((1, 1, 2, 3)))
            result = outcome(base, new, kinds, generator)
            for kind in kinds:
                counts.setdefault(kind, Counter())[result] += 1
            counts.setdefault("all", Counter())[result] += 1
            if result not in ("merged", "conflict", "refused"):
                raise SystemExit(f"pair {number}: {model} {RELEASES[start]} {kinds}: {result}")
    keep("edits", {kind: dict(sorted(counter.items())) for kind, counter in sorted(counts.items())})
    print(json.dumps({kind: dict(counter) for kind, counter in counts.items()}, indent=2))


def generated_texts(trees: dict[str, Path]) -> dict[tuple[str, str], str]:
    from rewrite.codemod.build import build
    from rewrite.source.resolve import resolve
    from rewrite.transforms import select

    found = {}
    for model in MODELS:
        for version in RELEASES:
            found[model, version] = build(resolve(str(original(trees[version], model))), select()).rewritten.text
    return found


# kills


def kills(arguments: argparse.Namespace) -> None:
    """Kill a sync at random moments: what is there afterwards is the old package or the new one, whole."""
    from upgrades.killed import kill_at_random

    counts = kill_at_random(arguments.kills, random.Random(SEED))
    keep("kills", counts)
    print(json.dumps(counts, indent=2))


# the guard


def guard(arguments: argparse.Namespace) -> None:
    """What the guard says where a package of one release meets the next, for every release whose wheel is there.

    A method counts if any modeling file calls one of that name, so that a package warns no more often than this says.
    """
    from hf_rewrite_runtime.compat import fingerprints
    from rewrite.package import definitions

    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = unpacked(arguments.wheels, Path(folder))
        for before, after in itertools.pairwise(release for release in RELEASES if release in trees):
            step = counts[f"{before} → {after}"] = Counter()
            roots = [trees[version] / "transformers" for version in (before, after)]
            texts = {path: path.read_text() for path in sorted((roots[0] / "models").glob("*/modeling_*.py"))}
            imported = {path: _imported(path.relative_to(roots[0]), text) for path, text in texts.items()}
            used = set(re.findall(r"(?:\.|\bdef )(\w+)\(", "\n".join(texts.values())))
            taken = definitions.of_names(roots[0], {name for names in imported.values() for name in names}, used)
            definitions.forget()
            changed = fingerprints.changes(fingerprints.Files(roots[1]), taken, definitions.elsewhere)
            for path, text in texts.items():
                now = roots[1] / path.relative_to(roots[0])
                same = now.is_file() and definitions.of_module(text) == definitions.of_module(now.read_text())
                found = {changed[name] for name in imported[path] if name in changed}
                step["files"] += 1
                step["files with other code, or gone"] += not same
                step["packages: error, a name is gone"] += fingerprints.GONE in found
                step["packages: one warning"] += bool(found) and fingerprints.GONE not in found
                step["packages: not a word"] += not found
            definitions.forget()
    keep("guard", {step: dict(counter) for step, counter in counts.items()})
    print(json.dumps({step: dict(counter) for step, counter in counts.items()}, indent=2))


def _imported(path: Path, text: str) -> set[str]:
    """Return what a modeling file imports of transformers, as fingerprints take it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*path.parts[: -node.level], *(node.module.split(".") if node.module else [])]
            found |= {f"{'.'.join(base)}:{alias.name}" for alias in node.names}
    return found


# results


def keep(part: str, value: Any) -> None:
    data = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    data[part] = value
    RESULTS.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def pages(arguments: argparse.Namespace) -> None:
    data = json.loads(RESULTS.read_text())
    text = PAGE.read_text()
    tables = {
        "chains": chain_table(data["chains"]),
        "edits": edit_table(data["edits"]),
        "edited": chain_table(data["edited chains"]),
        "kills": kill_line(data["kills"]),
        "guard": guard_table(data["guard"]),
    }
    for name, lines in tables.items():
        start, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        head, _, rest = text.partition(start)
        text = head + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(text)


def chain_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    steps = list(dict.fromkeys((row["from"], row["to"]) for row in rows))
    steps.sort(key=lambda step: _numbers(step[0]))
    yield "| model | " + " | ".join(f"{old} → {new}" for old, new in steps) + " |"
    yield "|---" * (len(steps) + 1) + "|"
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for step in steps:
            found = [row for row in rows if (row["model"], row["from"], row["to"]) == (model, *step)]
            cells.append(chain_cell(found) if found else "–")
        yield f"| {model} | " + " | ".join(cells) + " |"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def chain_cell(found: list[dict[str, Any]]) -> str:
    row = found[-1]
    if row["code"] == 1 and row.get("edits"):
        return "conflict shown"
    if any(row["code"] for row in found):
        return f"not clean: {row.get('said', ['?'])[-1]}"
    moves = Counter(dict.fromkeys(("new", "gone", "adopted"), 0))
    for rule in row["rules"].values():
        for what in ("new", "gone"):
            moves[what] += rule[what]
        moves["adopted"] += len(rule["adopted"])
    said = [f"{count} {what}" for what, count in moves.items() if count]
    parity = {True: "parity", False: "**parity fails**"}.get(row.get("parity"), "not run")
    return ", ".join([parity, *said])


def edit_table(counts: dict[str, dict[str, int]]) -> Iterator[str]:
    yield "| edit | merged | conflict shown | merged text refused, with the reason | lost |"
    yield "|---|---|---|---|---|"
    for kind in sorted(counts, key=lambda kind: (kind == "all", kind)):
        row = counts[kind]
        yield f"| {kind} | {row.get('merged', 0)} | {row.get('conflict', 0)} | {row.get('refused', 0)} | 0 |"


def kill_line(counts: dict[str, int]) -> Iterator[str]:
    yield (
        f"{counts['kills']} kills at random among the {counts['steps']} steps of a sync that touch a file: "
        f"{counts.get('old', 0)} left the old package, {counts.get('new', 0)} the new one, 0 anything else; the next "
        "sync ended in the new package every time."
    )


def guard_table(counts: dict[str, dict[str, int]]) -> Iterator[str]:
    steps = sorted(counts, key=lambda step: _numbers(step.partition(" ")[0]))
    yield "| modeling files | " + " | ".join(steps) + " |"
    yield "|---" * (len(steps) + 1) + "|"
    for row in dict.fromkeys(name for step in counts.values() for name in step):
        yield f"| {row} | " + " | ".join(str(counts[step].get(row, 0)) for step in steps) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "chains": chains, "edits": edits, "kills": kills, "guard": guard, "pages": pages,
    }  # fmt: skip
    parser.add_argument("part", choices=parts)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--edited", action="store_true", help="chains of packages with edits in them")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=200)
    arguments = parser.parse_args()
    parts[arguments.part](arguments)


if __name__ == "__main__":
    main()
