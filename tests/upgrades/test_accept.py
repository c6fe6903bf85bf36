"""`rewrite accept`: an edit that is meant to change the numbers, and what holds it to that."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import rewrite

from rewrite.delivery import acceptance
from rewrite.package.lock import read_lock
from rewrite.verify.judging.verdict import Check, Gate, Identity, Options, Verdict

from .conftest import Releases, edit

SDPA = ("_supports_sdpa = True", "_supports_sdpa = False")
MINE = "self.scaling = 1.1 * self.head_dim**-0.5"
PLACE = "your edits in TinyLlamaAttention.__init__"
ACCEPT = ("accept", "out", "--reason", "sharper | attention")


class Judge:
    """Stands in for the verifier: `logits` differ where the file has the edit, and what `planted` says besides.

    `raised` are checks that cannot run, `idle` those that do not apply; `keys` is one that passes otherwise.
    """

    def __init__(self) -> None:
        self.planted: dict[str, dict[str, Any]] = {}
        self.raised: tuple[str, ...] = ()
        self.idle: tuple[str, ...] = ()
        self.error = 0.3
        self.words = "planted"
        self.asked: list[tuple[Path, Path, Any]] = []

    def __call__(self, original: Path, rewritten: Path, request: Any, progress: Any) -> Verdict:
        self.asked.append((original, rewritten, request))
        found = dict(self.planted)
        if MINE in next(rewritten.glob("modeling_*.py")).read_text():
            found["logits"] = {"max": self.error, "tensors": 1}
        checks = tuple(Check(name, "failed", self.words, figures) for name, figures in found.items())
        plain = [name for name in ("keys",) if name not in (*self.raised, *self.idle)]
        checks += tuple(Check(name, "failed", "KeyError: 'x'", failure="raised") for name in self.raised)
        others = (*(Check(name, "passed") for name in plain), *(Check(n, "not run", "no keys") for n in self.idle))
        side = Identity(str(rewritten), str(rewritten), "0" * 64)
        gates = (Gate(2, "parity", (*checks, *others), 0.1),)
        return Verdict(not checks, side, side, "Tiny", gates, None, "", {"torch": "2"}, Options(), 0.1)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    judge = Judge()
    monkeypatch.setattr("rewrite.delivery.verification.judge", judge)
    return judge


@pytest.fixture
def edited(package: Path) -> Path:
    edit(package / "modeling_tiny.py", "self.scaling = self.head_dim**-0.5", MINE)
    return package


@pytest.fixture
def accepted(edited: Path, judge: Judge, original: tuple[str, str]) -> Path:
    assert rewrite(*ACCEPT, *original).code == 0
    return edited


@pytest.fixture
def tree(releases: Releases) -> Path:
    return releases("6.0.0")


@pytest.fixture
def original(tree: Path) -> tuple[str, str]:
    return ("--original", str(tree / "transformers" / "models" / "tiny" / "modeling_tiny.py"))


def kept(package: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((package / acceptance.NAME).read_text())
    return data


def test_what_fails_is_recorded_with_its_figures(
    edited: Path, judge: Judge, tree: Path, original: tuple[str, str]
) -> None:
    checked = rewrite("check", edited, "--transformers", tree)
    assert (checked.code, checked.out) == (0, f"unverified  out: {PLACE}, never verified (rewrite verify out)\n")
    assert rewrite("verify", edited, *original).code == 1
    assert "rewrite accept out --reason TEXT" in rewrite("check", edited, "--transformers", tree).out
    judge.planted = {"tokens": {"max": float("inf")}}  # no figure to name
    done = rewrite(*ACCEPT, *original)
    assert "2 checks differ, the most parity: logits: 0.3" in done.out
    judge.planted = {}
    done = rewrite(*ACCEPT, *original)
    assert (done.code, "1 check differs, the most parity: logits: 0.3" in done.out) == (0, True), done.err
    figures = {"parity: logits": {"max": 0.3, "tensors": 1}}
    assert kept(edited)["original"]["failed"] == kept(edited)["generated"]["failed"] == figures
    against = [original.name for original, _, _ in judge.asked[-2:]]
    assert against == ["modeling_tiny.py", "out"]
    assert all(request.keep_going for _, _, request in judge.asked[-2:])
    assert MINE not in acceptance.read(edited).reason  # type: ignore[union-attr]
    assert rewrite("check", edited, "--transformers", tree).out == f"up to date  out: {PLACE}, accepted\n"
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_failure_says_how_edits_are_accepted(edited: Path, judge: Judge, original: tuple[str, str]) -> None:
    failed = rewrite("verify", edited, *original, "--quick", "--no-bisect")
    (line,) = (line for line in (failed.out + failed.err).splitlines() if "rewrite accept" in line)
    words = shlex.split(line.partition("where they are meant: rewrite ")[2])
    assert sorted(words) == sorted(["accept", "out", *original, "--quick", "--reason", "TEXT"])
    assert rewrite(*words).code == 0
    passed = rewrite("verify", edited, *original, "--no-bisect")
    assert "rewrite accept" not in passed.out + passed.err


def test_a_check_that_cannot_run_is_no_edit_to_accept(edited: Path, judge: Judge, original: tuple[str, str]) -> None:
    judge.raised = ("keys",)
    failed = rewrite("verify", edited, *original, "--no-bisect")
    said = failed.out + failed.err
    assert ("mend your edits in " in said, "rewrite accept" in said) == (True, False)


def test_the_comment_of_the_pull_request_shows_it(accepted: Path) -> None:
    text = rewrite("diff", accepted, "--format", "markdown").out
    assert "differs from the original, as accepted" in text
    assert "**Accepted**: sharper \\| attention" in text
    assert "| the generated text | 1 check differs, the most parity: logits: 0.3 |" in text


def test_another_edit_is_not_accepted(accepted: Path, tree: Path) -> None:
    edit(accepted / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    checked = rewrite("check", accepted, "--transformers", tree)
    assert (checked.code, "is not as it was when `sharper | attention` was accepted" in checked.out) == (1, True)
    assert "**Accepted** (of other files than these)" in rewrite("diff", accepted, "--format", "markdown").out


def test_a_formatter_does_not_undo_it(accepted: Path, tree: Path) -> None:
    path = accepted / "modeling_tiny.py"
    path.write_text(path.read_text().replace(" = self.", " =  self."))
    assert rewrite("check", accepted, "--transformers", tree).code == 0


@pytest.mark.parametrize(
    ("planted", "error", "refused"),
    [
        ({}, 0.35, None),
        ({}, 0.7, "parity: logits: max 0.7, accepted were 0.3"),
        ({}, float("nan"), "parity: logits: max inf, accepted were 0.3"),
        ({"loss": {"max": 1e-9}}, 0.3, "parity: loss was not accepted"),
    ],
)
def test_a_later_verification_is_held_to_it(
    accepted: Path,
    judge: Judge,
    original: tuple[str, str],
    planted: dict[str, Any],
    error: float,
    refused: str | None,
) -> None:
    judge.planted, judge.error = planted, error
    done = rewrite("verify", accepted, *original)
    assert (done.code, (refused or "what fails was accepted: sharper") in done.out) == (int(refused is not None), True)
    assert kept(accepted)["original"]["failed"]["parity: logits"]["max"] == 0.3  # does not creep
    quiet = rewrite("verify", accepted, *original, "--quiet")
    assert (quiet.code, quiet.out) == (done.code, "")
    assert ("FAIL" in quiet.err, "what fails was accepted: sharper" in quiet.err) == (bool(refused), not refused)


@pytest.mark.parametrize(
    ("raised", "idle", "said"),
    [
        (("keys",), (), "parity: keys ran when it was accepted and does not any more: KeyError: 'x'"),
        (("logits",), (), "parity: logits ran when it was accepted and does not any more"),
        (("new",), (), "parity: new could not run: KeyError"),
        ((), ("keys",), "parity: keys ran when it was accepted and does not any more: no keys"),
    ],
)
def test_a_check_that_no_longer_runs_is_worse_than_one_that_fails(
    accepted: Path,
    judge: Judge,
    tree: Path,
    releases: Releases,
    original: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    raised: tuple[str, ...],
    idle: tuple[str, ...],
    said: str,
) -> None:
    judge.raised, judge.idle = raised, idle
    verified = rewrite("verify", accepted, *original)
    assert (verified.code, "refused" in verified.out, said in " ".join(verified.out.split())) == (1, True, True)
    checked = rewrite("check", accepted, "--transformers", tree)  # of the very files that were accepted
    assert (checked.code, f"what fails was not accepted: {said}" in checked.out) == (1, True)
    monkeypatch.setattr("rewrite.sync.upgrade._require_installed", lambda *_: None)
    monkeypatch.setattr("rewrite.delivery.precheck.importing", lambda *_: contextlib.nullcontext())
    synced = rewrite("sync", accepted, "--transformers", releases("6.1.0", SDPA), "--verify", "--no-bisect")
    assert (synced.code, said in " ".join(synced.out.split())) == (1, True)
    judge.raised = judge.idle = ()
    assert rewrite("verify", accepted, *original).code == 0
    assert rewrite("check", accepted, "--transformers", tree).code == 0


def test_what_could_not_run_is_not_accepted(edited: Path, judge: Judge, tree: Path, original: tuple[str, str]) -> None:
    judge.raised = ("keys", "loss")
    done = rewrite(*ACCEPT, *original, "--json", "-")
    assert done.code == 1
    assert "2 of 3 checks could not run" in done.err
    assert "parity: keys: KeyError: 'x'" in done.err
    assert json.loads(done.out)["accepted"] is False
    assert not (edited / acceptance.NAME).exists()
    checked = rewrite("check", edited, "--transformers", tree)
    assert (checked.code, "2 checks could not run, which cannot be accepted" in checked.out) == (1, True)


def test_where_no_number_is_compared_nothing_is_accepted(
    edited: Path, judge: Judge, original: tuple[str, str]
) -> None:
    edit(edited / "modeling_tiny.py", MINE, "self.scaling = self.head_dim**-0.5")
    judge.planted = {"names": {}}
    done = rewrite(*ACCEPT, *original)
    assert (done.code, "no number could be compared" in done.err) == (1, True)


def test_what_is_found_in_words_is_held_to_as_well(edited: Path, judge: Judge, original: tuple[str, str]) -> None:
    judge.planted = {"names": {}}
    assert rewrite(*ACCEPT, *original).code == 0
    assert kept(edited)["original"]["failed"]["parity: names"] == {"says": "planted"}
    assert rewrite("verify", edited, *original).code == 0
    judge.words = "other keys"
    refused = rewrite("verify", edited, *original)
    said = "parity: names finds something else than what was accepted: other keys"
    assert (refused.code, said in " ".join(refused.out.split())) == (1, True)


def test_a_sync_verifies_against_it(
    accepted: Path, judge: Judge, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewrite.sync.upgrade._require_installed", lambda *_: None)
    monkeypatch.setattr("rewrite.delivery.precheck.importing", lambda *_: contextlib.nullcontext())
    sync = ("sync", accepted, "--transformers", releases("6.1.0", SDPA), "--verify")
    before = (accepted / "modeling_tiny.py").read_text()
    judge.planted = {"loss": {"max": 1e-9}}
    refused = rewrite(*sync)
    assert (refused.code, "parity: loss was not accepted" in refused.out) == (1, True)
    assert (accepted / "modeling_tiny.py").read_text() == before
    judge.planted = {}
    done = rewrite(*sync)
    assert (done.code, "what fails was accepted" in done.out) == (0, True), done.err
    assert MINE in (accepted / "modeling_tiny.py").read_text()
    assert kept(accepted)["original"]["sha256"] == read_lock(accepted).source.sha256
    checked = rewrite("check", accepted, "--transformers", releases("6.1.0", SDPA))
    assert (checked.code, checked.out) == (0, f"up to date  out: {PLACE}, accepted\n")


def test_a_fault_of_ours_does_not_hide_behind_it(
    accepted: Path, judge: Judge, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generated text fails in the very check that was accepted for the edit."""
    monkeypatch.setattr("rewrite.sync.upgrade._require_installed", lambda *_: None)
    monkeypatch.setattr("rewrite.delivery.precheck.importing", lambda *_: contextlib.nullcontext())
    judge.planted = {"logits": {"max": 0.3}}
    refused = rewrite("sync", accepted, "--transformers", releases("6.1.0", SDPA), "--verify")
    assert (refused.code, "without your edits it fails too" in refused.out) == (1, True)


def test_nothing_to_accept(package: Path, judge: Judge, original: tuple[str, str]) -> None:
    done = rewrite(*ACCEPT, *original)
    assert (done.code, "there is nothing to accept" in done.out) == (0, True)
    assert not (package / acceptance.NAME).exists()


@pytest.mark.parametrize("text", ["[]", "{", '{"reason": "x"}', '{"original": {"failed": {"a": 1}}}'])
def test_a_record_that_cannot_be_read_is_one_error(
    accepted: Path, tree: Path, original: tuple[str, str], text: str
) -> None:
    (accepted / acceptance.NAME).write_text(text)
    checked = rewrite("check", accepted, "--transformers", tree)
    assert (checked.code, "accepted.json is not as `rewrite accept` wrote it" in checked.out) == (1, True)
    refused = rewrite("verify", accepted, *original)
    assert (refused.code, "accepted.json is not as `rewrite accept` wrote it" in refused.err) == (1, True)


def test_bad_input(package: Path) -> None:
    assert rewrite("accept", package).code == 2
    empty = rewrite("accept", package, "--reason", " ")
    assert (empty.code, "--reason is empty" in empty.err) == (2, True)
    assert rewrite("accept", "nowhere", "--reason", "x").code == 2
