"""The sweep's table: totals first, then what failed, what was skipped and why, then every file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.delivery.json_report import envelope
from rewrite.errors import NotASweep
from rewrite.sweep.sweep_row import ClassRow, Row


@dataclass(frozen=True)
class Report:
    """A finished sweep."""

    version: str
    """Of transformers."""
    rows: tuple[Row, ...]
    device: str = "a CPU"
    beside: Report | None = None
    """The same files on another device."""

    def to_json(self) -> dict[str, Any]:
        """The table as plain JSON values; times are left out, so that the same run gives the same file."""
        rows = [{name: value for name, value in row.to_json().items() if name != "seconds"} for row in self.rows]
        return {"transformers": self.version, "device": self.device, "rows": rows}

    def json_text(self) -> str:
        """The same as text, a row a line, so that a change of one file is a change of one line."""
        data = self.to_json()
        rows = ",\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in data["rows"])
        facts = {**envelope("sweep"), **{name: data[name] for name in ("transformers", "device")}}
        head = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
        return f'{{{head}, "rows": [\n{rows}\n]}}\n'

    def summary(self) -> list[str]:
        """The totals, a line each."""
        rows = self.rows
        classes = [found for row in rows for found in row.classes]
        causal = [found for found in classes if found.causal]
        sites = sum(row.count for row in rows)
        skips = sum(sum(row.reasons().values()) for row in rows)
        lines = [
            f"{len(rows)} modeling files of transformers {self.version}, {sites} sites rewritten, {skips} skipped"
        ]
        for name in ("round_trip", "deterministic", "stable", *(["imported"] if self.ran else [])):
            lines.append(f"{name.replace('_', ' ')}: {sum(getattr(row, name) for row in rows)} of {len(rows)}")
        if self.ran:
            lines.append(f"classes: {_tally(classes)}")
            lines.append(f"causal LMs: {_tally(causal)}")
        return lines

    @property
    def ran(self) -> bool:
        """Whether anything was run, as without `--no-verify`."""
        return any(row.imported or row.classes for row in self.rows)

    def markdown(self) -> str:
        """The table as Markdown."""
        column = f" on {self.beside.device} |" if self.beside is not None else ""
        others = {row.file: row for row in self.beside.rows} if self.beside is not None else {}
        lines = [
            "# Coverage",
            "",
            *(self._conditions() if self.ran else self._conditions_unrun()),
            *self._other_device(),
            "",
            *(f"- {line}" for line in self.summary()),
            "",
            *self._failures(),
            *self._skips(),
        ]
        if self.ran:
            lines += [
                *self._not_run(),
                "## Files",
                "",
                "| file | sites | skipped | imported | classes that pass | not run | gates of the causal LM |"
                + column,
                f"|---|---|---|---|---|---|---|{'---|' if column else ''}",
                *(_line(row) + (_elsewhere(others.get(row.file)) if column else "") for row in self.rows),
            ]
        else:
            lines += ["## Files", "", "| file | sites | skipped |", "|---|---|---|"]
            lines += [f"| `{row.file}` | {row.count} | {sum(row.reasons().values())} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def _conditions(self) -> Iterator[str]:
        made = f"with transformers {self.version}, on {self.device},"
        yield f"Made by `python -m rewrite.sweep --markdown docs/coverage.md` {made}"
        yield "with small random models. A class passes if its outputs in fp64 are the original's (fp32 where it has"
        yield "no fp64 run) and its checkpoints too, byte for byte. The first causal LM of a file passes the"
        yield "verifier's quick gates."

    def _conditions_unrun(self) -> Iterator[str]:
        yield "Made by `python -m rewrite.sweep --no-verify --markdown FILE` with transformers"
        yield f"{self.version}: the files were rewritten, and nothing was run."

    def _other_device(self) -> Iterator[str]:
        if self.beside is None:
            return
        classes = [found for row in self.beside.rows for found in row.classes]
        yield ""
        yield f"On {self.beside.device}, with transformers {self.beside.version}, in 16 bits too, by the verifier's"
        yield "yardstick, with the kernels and the captured loop of the main class:"
        ran = len({row.file for row in self.rows} & {row.file for row in self.beside.rows})
        yield f"{_tally(classes)}" + (f"; {ran} of {len(self.rows)} files were run." if ran < len(self.rows) else ".")

    def _failures(self) -> Iterator[str]:
        failed = [row for row in self.rows if row.outcome == "fail"]
        yield from ("## Failures", "")
        yield from [f"- `{row.file}`: {_cell(why(row))}" for row in failed] or ["None."]
        yield ""

    def _skips(self) -> Iterator[str]:
        counts: Counter[tuple[str, str]] = Counter()
        examples: dict[tuple[str, str], str] = {}
        sites: Counter[str] = Counter()
        for row in self.rows:
            counts += row.reasons()
            sites.update({name: len(found) for name, found in row.sites.items()})
            for name, skips in row.skipped.items():
                for site, reason, _ in skips:
                    examples.setdefault((name, reason), f"`{row.file.split('/')[-1]}` {_cell(site)}")
        yield from (
            "## Sites",
            "",
            "| transform | rewritten | skipped | reason | for example |",
            "|---|---|---|---|---|",
        )
        for name in sorted({*sites, *(name for name, _ in counts)}):
            reasons = sorted(((count, key[1]) for key, count in counts.items() if key[0] == name), reverse=True)
            total = sum(count for count, _ in reasons)
            yield f"| {name} | {sites[name]} | {total} | | |"
            for count, reason in reasons:
                yield f"| | | {count} | {reason} | {examples[name, reason]} |"
        yield ""

    def _not_run(self) -> Iterator[str]:
        yield from ("## Causal LMs that were not built", "")
        found = [(row, c) for row in self.rows for c in row.classes if c.causal and c.outcome == "not run"]
        yield from [f"- {c.name} (`{row.file}`): {_cell(c.detail)[:240]}" for row, c in found] or ["None."]
        yield ""


def read(path: Path) -> Report:
    """The table that `json_text` wrote.

    Raises:
        NotASweep: if the file holds something else.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        rows = tuple(map(Row.from_json, data["rows"]))
        return Report(data["transformers"], rows, data.get("device", "a CPU"))
    except OSError as error:
        raise NotASweep(path, error.strerror or str(error)) from error
    except KeyError as error:
        raise NotASweep(path, f"it has no {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise NotASweep(path, str(error)) from error


def why(row: Row) -> str:
    """Why a row fails."""
    if row.error:
        return row.error
    static = [name for name in ("round_trip", "deterministic", "stable") if not getattr(row, name)]
    return "; ".join([*static, *(f"{c.name}: {c.detail}" for c in row.classes if c.outcome == "fail")])


def _tally(classes: list[ClassRow]) -> str:
    counts = Counter(found.outcome for found in classes)
    return f"{counts['pass']} of {len(classes)} pass, {counts['fail']} fail, {counts['not run']} were not built or run"


def _line(row: Row) -> str:
    counts = Counter(found.outcome for found in row.classes)
    sites = ", ".join(f"{name} {len(found)}" for name, found in sorted(row.sites.items())) or "–"
    skips = sum(row.reasons().values())
    gates = ", ".join(f"{name} {outcome}" for name, outcome in row.gates.items()) or "–"
    passed = f"{counts['pass']} of {len(row.classes)}"
    imported = "yes" if row.imported else "no"
    return f"| {row.file} | {sites} | {skips} | {imported} | {passed} | {counts['not run']} | {gates} |"


def _elsewhere(row: Row | None) -> str:
    """The classes of a file that pass on the other device."""
    if row is None:
        return " – |"
    counts = Counter(found.outcome for found in row.classes)
    gates = f", gates {', '.join(sorted(set(row.gates.values())))}" if row.gates else ""
    failed = f", **{counts['fail']} fail**" if counts["fail"] else ""
    return f" {counts['pass']} of {len(row.classes)}{failed}{gates} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
