"""What the main command does with a verdict, and one run with the real verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import rewrite
from kept_verdicts import keep, verdict

from rewrite.delivery import verdict_file
from rewrite.package.lock import read_lock
from rewrite.verify import Check, Gate, Verdict, worst

ARGUMENTS = ("modeling_tiny.py", "--only", "fuse_qkv", "--diff", "none")
FAILED = Check("logits", "failed", "planted", {"max": 0.5}, failure="differs")


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the verifier; the list holds whether to pass, then what it was asked."""
    asked: list[Any] = [True]

    def judge(original: Path, rewritten: Path, request: Any, progress: Any) -> Verdict:
        asked.append((original, rewritten, request))
        progress("half way")
        return verdict(*([] if asked[0] else [FAILED]), quick=request.quick)

    monkeypatch.setattr("rewrite.delivery.verification.judge", judge)
    return asked


def test_a_pass_is_written_with_its_verdict(here: Path, judged: list[Any]) -> None:
    asked = ("--device", "cpu", "--dtype", "float16", "--seed", "7")
    done = rewrite(*ARGUMENTS, "--out", "out", *asked, "--json", "report.json")
    assert done.code == 0, done.err
    assert "parity: pass" in done.out
    original, rewritten, request = judged[1]
    assert original == Path("modeling_tiny.py")
    assert rewritten.name == "out"  # under its final name, beside its place
    assert (request.device, request.dtype, request.seed) == ("cpu", "float16", 7)
    text = (here / "out" / "verify.json").read_text()
    assert str(here) not in text
    kept = json.loads(text)
    lock = json.loads((here / "out" / "rewrite.lock").read_text())
    assert kept["passed"] is True
    assert kept["covers"]["modeling_tiny.py"]["sha256"] == lock["files"]["modeling_tiny.py"]
    assert kept["original"]["sha256"] == lock["source"]["sha256"]
    assert json.loads((here / "report.json").read_text())["verify"]["passed"] is True


def test_a_failure_leaves_what_was_there(package: Path, judged: list[Any]) -> None:
    judged[0] = False
    before = {path: path.read_bytes() for path in package.rglob("*.py")}
    failed = rewrite(*ARGUMENTS, "--out", package)
    assert failed.code == 1
    assert "gate 2 (parity): logits: planted" in failed.out
    assert {path: path.read_bytes() for path in package.rglob("*.py")} == before
    rejected = package.with_name("out.rejected")
    kept = json.loads((rejected / "verify.json").read_text())
    failed = {"gate": "parity", "name": "logits", "detail": "planted", "failure": "differs", "figures": "max 0.5"}
    assert (kept["passed"], kept["failed"]) == (False, [failed])
    assert not [path for path in package.parent.iterdir() if path.name.startswith(".")]


def test_a_failure_is_said_in_quiet_too(here: Path, judged: list[Any]) -> None:
    judged[0] = False
    failed = rewrite(*ARGUMENTS, "--out", "out", "--quiet", "--no-bisect")
    assert (failed.code, failed.out) == (1, "")
    assert failed.err == "verify     FAIL: 1 of 1 checks, gate parity · TinyLlama · 0 s\n"
    found = rewrite(*ARGUMENTS, "--out", "out", "--quiet", "--json")
    assert "at fault   fuse_qkv, and no other transform rewrites anything (1 run, " in found.err
    report = json.loads(found.out)
    assert (report["written"], report["bisection"]["at_fault"]) == (False, ["fuse_qkv"])


def test_code_that_came_with_a_checkpoint_is_not_run(here: Path, judged: list[Any]) -> None:
    folder = here / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}')
    (folder / "modeling_own.py").write_bytes((here / "modeling_tiny.py").read_bytes())
    arguments = ("./checkpoint", "--only", "fuse_qkv", "--diff", "none", "--force", "--out", "out")
    done = rewrite(*arguments)
    assert done.code == 0
    assert "--trust-remote-code allows it to run" in done.out
    assert len(judged) == 1
    assert rewrite(*arguments, "--trust-remote-code").code == 0
    assert len(judged) == 2


def test_verify_keeps_the_verdict_on_the_files_as_they_are(package: Path, judged: list[Any]) -> None:
    path = package / "modeling_tiny.py"
    path.write_text(path.read_text() + "# mine\n")
    assert rewrite("verify", package).code == 0
    kept = json.loads((package / "verify.json").read_text())
    lock = json.loads((package / "rewrite.lock").read_text())
    assert kept["covers"]["modeling_tiny.py"]["sha256"] != lock["files"]["modeling_tiny.py"]
    judged[0] = False
    assert rewrite("verify", package).code == 1
    assert rewrite("verify", "modeling_tiny.py", package).code == 1


def test_a_quick_verdict_stands_beside_a_full_one(here: Path, judged: list[Any]) -> None:
    def kept() -> dict[str, Any]:
        data: dict[str, Any] = json.loads((here / "out" / "verify.json").read_text())
        return data

    assert rewrite(*ARGUMENTS, "--out", "out", "--quick").code == 0
    assert kept()["options"]["quick"] is True
    assert rewrite("verify", "out").code == 0
    for arguments in (("verify", "out", "--quick"), (*ARGUMENTS, "--out", "out", "--quick")):
        done = rewrite(*arguments)
        assert (done.code, "keeps the full verification of these files, which passed" in done.out) == (0, True)
        assert (kept()["options"]["quick"], kept()["quick"]["options"]["quick"]) == (False, True)
    judged[0] = False
    assert rewrite("verify", "out", "--quick").code == 1
    assert kept()["passed"] is True
    assert "a later quick verification failed" in rewrite("check", "out").out
    path = here / "out" / "modeling_tiny.py"
    path.write_text(path.read_text() + "# mine\n")
    judged[0] = True
    assert rewrite("verify", "out", "--quick").code == 0
    assert kept()["options"]["quick"] is True


def test_a_verdict_fits_a_screen(package: Path) -> None:
    """Two hundred checks are a line; what did not run is a line for each reason."""
    passed = [Check(f"check {number}", "passed", figures={"max": 1e-7, "bound": 2e-6}) for number in range(200)]
    skipped = [Check(f"kernel {number}", "not run", "no GPU") for number in range(20)]
    text = keep(package, *passed, *skipped)
    assert len(text.splitlines()) <= 25
    kept = json.loads(text)
    gate = {"name": "parity", "status": "passed", "passed": 200, "failed": 0, "not run": 20}
    assert kept["gates"] == [{**gate, "worst": "max 1e-07 of 2e-06 (check 0)"}]
    assert [(one["reason"], len(one["checks"])) for one in kept["not_run"]] == [("no GPU", 20)]
    assert kept["options"] == {"device": "cpu", "dtype": "bfloat16", "quick": False, "seed": 0}
    assert text == keep(package, *passed, *skipped)
    assert list(kept) == sorted(kept)


def test_a_vendored_runtime_is_one_line(package: Path) -> None:
    assert rewrite("vendor", package).code == 0
    assert list(json.loads(keep(package))["covers"]) == ["__init__.py", "_runtime", "modeling_tiny.py"]
    assert rewrite("check", package).code == 0
    path = package / "_runtime" / "linear" / "packing.py"
    path.write_text(path.read_text() + "\n")  # layout
    kept = verdict_file.read(package)
    assert kept is not None
    names = verdict_file.importable(read_lock(package))
    assert kept.changed(package, names) is None
    path.write_text(path.read_text() + "# mine\n")
    assert kept.changed(package, names) == "_runtime"
    assert "_runtime has changed since it was verified" in rewrite("check", package).out


def test_the_figures_nearest_to_their_bounds() -> None:
    several = {"sdpa max": 0.0, "sdpa bound": 2e-6, "lengths, max": 1e-6, "lengths, bound": 2e-6}
    checks = (
        Check("far", "passed", figures={"max": 4e-6, "bound": 5e-5, "rms": 1.0}),
        Check("near", "passed", figures=several),
        Check("bfloat16", "passed", figures={"max ratio": 1.25, "bound": 2.0}),
        Check("not finite", "failed", figures={"gradients max": float("inf"), "largest": 3.0, "modules": 2}),
        Check("decode", "passed", figures={"speed-up": 1.5, "outcome": "faster"}),
        Check("prefill", "passed", figures={"speed-up": 1.1, "outcome": "no difference shown"}),
        Check("on a CPU", "passed", figures={"speed-up": 0.9, "outcome": "not claimed on a CPU"}),
    )
    said = "max 1e-06 of 2e-06 (near); max ratio 1.2 of 2 (bfloat16); speed-up 1.10 (prefill)"
    assert worst(Gate(2, "parity", checks, 0.0)) == said
    beyond = Check("beyond", "failed", figures={"max": float("inf"), "bound": 2e-6})
    assert worst(Gate(2, "parity", (*checks, beyond), 0.0)).startswith("max inf of 2e-06 (beyond)")
    assert worst(Gate(1, "structure", (Check("the output parses", "passed", figures={"files": 2}),), 0.0)) == ""


@pytest.mark.slow
def test_the_fixture_passes_the_real_verifier(here: Path) -> None:
    done = rewrite("modeling_tiny.py", "--quick", "--out", "out", "--diff", "none")
    assert done.code == 0, done.out
    assert (here / "out" / "verify.json").is_file()
    path = here / "out" / "modeling_tiny.py"
    path.write_text(path.read_text().replace("self.k_proj, self.v_proj)", "self.k_proj, self.k_proj)"))
    failed = rewrite("verify", "out", "--quick")
    assert failed.code == 1
    assert "NOT PASSED" in failed.out


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_torch_cannot_use(package: Path, device: str) -> None:
    failed = rewrite("verify", package, "--device", device)
    assert failed.code == 2
    assert f"error: device '{device}' cannot be used: " in failed.err
