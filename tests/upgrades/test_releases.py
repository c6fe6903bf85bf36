"""Packages synced to a transformers that is not installed, and what becomes of each rule's places."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.errors import UsageError
from rewrite.package.lock import Lock, Options, Origin, read_lock
from rewrite.source import pins, release, verifiable
from rewrite.source.installed import copy_at
from rewrite.source.resolve import resolve
from rewrite.sync.site_changes import rule_changes
from rewrite.transform import SkippedSite, TransformReport

from .conftest import Releases, edit

DROPOUT = ("attention_dropout = 0.0", "attention_dropout = 0.1")
QKV = ("= self.k_proj(hidden_states)", "= self.k_proj(hidden_states * 1)")


def test_a_wheel_is_read_and_the_edit_stays(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    (package / "modeling_tiny.py").chmod(0o755)  # git would show another mode as a change
    wheel = releases.wheel("6.1.0", DROPOUT)
    done = rewrite("sync", package, "--transformers", wheel)
    assert done.code == 0, done.err
    text = (package / "modeling_tiny.py").read_text()
    assert "# mine\n" in text
    assert "attention_dropout = 0.1" in text
    assert (package / "modeling_tiny.py").stat().st_mode & 0o777 == 0o755
    lock = read_lock(package)
    assert (lock.source.transformers, lock.source.module) == ("6.1.0", "transformers.models.tiny.modeling_tiny")
    assert str(releases.folder) not in (package / "rewrite.lock").read_text()
    assert rewrite("check", package, "--transformers", wheel).code == 0
    assert rewrite("check", package, "--transformers", releases("6.0.0")).code == 1


def test_the_same_file_in_another_version_changes_nothing(package: Path, releases: Releases) -> None:
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    tree = releases("6.0.1")
    assert rewrite("check", package, "--transformers", tree).code == 0
    assert "up to date" in rewrite("sync", package, "--transformers", tree).out
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before


def test_the_same_file_beside_others_that_changed_is_of_the_new_version(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    tree = releases("6.0.1")
    (tree / "transformers" / "masking_utils.py").write_text("def create_causal_mask(config, **kwargs):\n    pass\n")
    checked = rewrite("check", package, "--transformers", tree, "--format", "json")
    (finding,) = json.loads(checked.out)["packages"]["out"]
    assert (finding["kind"], "transformers 6.0.0 → 6.0.1" in finding["message"]) == ("transformers-moved", True)
    assert rewrite("sync", package, "--transformers", tree).code == 0
    text = (package / "modeling_tiny.py").read_text()
    assert ("# mine\n" in text, "from transformers 6.0.1" in text) == (True, True)
    assert "from transformers 6.0.1" in (package / "__init__.py").read_text()
    assert read_lock(package).source.transformers == "6.0.1"
    assert rewrite("check", package, "--transformers", tree).code == 0


def test_a_lost_place_fails_unless_its_rule_is_accepted(package: Path, releases: Releases) -> None:
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    tree = releases("6.1.0", QKV)
    checked = rewrite("check", package, "--transformers", tree)
    assert "fuse_qkv lost TinyLlamaAttention.forward: q_proj, k_proj, v_proj" in checked.out
    lost = rewrite("sync", package, "--transformers", tree)
    assert lost.code == 1
    assert "--accept fuse_qkv" in lost.err
    assert "lost TinyLlamaAttention.forward" in lost.out
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before
    assert rewrite("sync", package, "--transformers", tree, "--accept", "fuse_gate_up").code == 1
    rules = sorted(set(lost.err.split("--accept ")[1:]))
    accepted = [part for rule in rules for part in ("--accept", rule.split()[0])]
    assert rewrite("sync", package, "--transformers", tree, *accepted).code == 0
    assert rewrite("check", package, "--transformers", tree).code == 0


def test_every_rule_is_counted(package: Path, releases: Releases) -> None:
    done = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT), "--json", "report.json")
    assert re.search(r"rules +\d+ as before, at \d+ places", done.out)
    (result,) = json.loads(Path("report.json").read_text())["packages"].values()
    assert {rule["rule"] for rule in result["rules"]} >= {"fuse_qkv", "fuse_gate_up"}


def test_three_differences_and_a_dry_run_writes_nothing(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    tree = releases("6.1.0", DROPOUT)
    shown = {
        view: rewrite("sync", package, "--transformers", tree, "--dry-run", "--show", view).out
        for view in ("upstream", "rewritten", "edits")
    }
    for view, has in {"upstream": True, "rewritten": True, "edits": False}.items():
        assert ("attention_dropout = 0.1" in shown[view]) is has, shown[view]
    assert "+# mine" in shown["edits"]
    assert "packed_linear" not in shown["upstream"]
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before


def test_an_edit_that_reads_what_upstream_took_away_is_refused(package: Path, releases: Releases) -> None:
    path = package / "modeling_tiny.py"
    mine = edit(path, "class TinyLlamaMLP", "def mine(q):\n    return apply_rotary_pos_emb(q)\n\n\nclass TinyLlamaMLP")
    tree = releases("6.1.0", ("apply_rotary_pos_emb", "apply_rotary"))
    refused = rewrite("sync", package, "--transformers", tree)
    assert refused.code == 1
    assert "mine reads apply_rotary_pos_emb, which nothing defines any more" in refused.err
    assert path.read_text() == mine
    edit(path, "return apply_rotary_pos_emb(q)", "return apply_rotary(q)")
    assert rewrite("sync", package, "--transformers", tree).code == 0


def test_an_edit_that_reads_an_argument_by_its_former_name_is_told_the_one_it_has_now(
    package: Path, releases: Releases
) -> None:
    path = package / "modeling_tiny.py"
    line = "        cos, sin = position_embeddings\n"
    mine = edit(path, line, f"{line}        assert past_key_values is None or past_key_values.layers\n")
    both = ("        cache=None,  # its name from transformers 5.24 on\n", "")
    tree = releases(
        "6.1.0", both, ("past_key_values if cache is None else cache", "cache"), ("past_key_values", "cache")
    )
    refused = rewrite("sync", package, "--transformers", tree)
    assert refused.code == 1
    assert "reads past_key_values, which nothing defines any more (the argument is called cache now)" in refused.err
    assert path.read_text() == mine
    edit(path, "assert past_key_values is None or past_key_values.layers", "assert cache is None or cache.layers")
    assert rewrite("sync", package, "--transformers", tree).code == 0
    assert "assert cache is None or cache.layers" in path.read_text()


def test_what_the_edit_lacked_before_does_not_stop_a_sync(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "def mine():\n    return later\n\n\nclass TinyLlamaMLP")
    assert rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT)).code == 0


def test_a_model_that_is_gone(package: Path, releases: Releases) -> None:
    tree = releases("7.0.0")
    (tree / "transformers" / "models" / "tiny" / "modeling_tiny.py").unlink()
    assert "is not in transformers 7.0.0" in rewrite("check", package, "--transformers", tree).out
    gone = rewrite("sync", package, "--transformers", tree)
    assert (gone.code, "is not in transformers 7.0.0" in gone.err) == (1, True)


@pytest.mark.parametrize("asked", ["nowhere", "./nowhere.whl", "."])
def test_no_such_release(package: Path, asked: str) -> None:
    done = rewrite("sync", package, "--transformers", asked)
    assert (done.code, f"no transformers '{asked.removeprefix('./')}'" in done.err) == (2, True)


def test_a_wheel_that_is_none(package: Path, releases: Releases) -> None:
    wheel = releases.wheel("6.1.0")
    wheel.write_bytes(wheel.read_bytes()[:100])
    done = rewrite("sync", package, "--transformers", wheel)
    assert (done.code, "cannot be read as a wheel" in done.err) == (2, True)


@pytest.fixture
def asked(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of a pip that has transformers 6.1.0."""
    wheel, asked = releases.wheel("6.1.0", DROPOUT), []
    run = subprocess.run

    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "download" not in command:  # the formatter, which is a process too
            return run(command, **options)  # type: ignore[call-overload]
        asked.append(command)
        (Path(command[-1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("rewrite.source.release.subprocess.run", download)
    return asked


def test_a_version_is_downloaded_once(
    package: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        dry = rewrite("sync", package, "--transformers", "6.1.0", "--dry-run")
        assert (dry.code, " changed, " in dry.out) == (0, True)
    assert len(asked) == 1
    assert "transformers==6.1.0" in asked[0]
    assert "--no-deps" in asked[0]


def test_a_version_without_a_place_to_keep_it(
    package: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")  # nothing can be made below it, by root either
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert rewrite("sync", package, "--transformers", "6.1.0", "--dry-run").code == 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # of a user that no list has
    assert rewrite("sync", package, "--transformers", "6.1.0", "--dry-run").code == 0
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("there", "expected"),
    [({"uv", "pip3"}, ["/bin/uv", "tool", "run", "--quiet", "pip"]), ({"pip3"}, ["/bin/pip3"]), (set(), None)],
)
def test_an_environment_without_pip(
    package: Path, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, there: set[str], expected: list[str] | None
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in there else None)
    done = rewrite("sync", package, "--transformers", "6.1.0", "--dry-run")
    assert (done.code, "there is no pip and no uv" in done.err) == (0 if expected else 2, not expected), done.err
    assert [command[: command.index("download")] for command in asked] == ([expected] if expected else [])


def test_several_packages_go_on_after_an_error(package: Path, releases: Releases) -> None:
    tree = releases("6.0.0")
    original = tree / "transformers" / "models" / "tiny" / "modeling_tiny.py"
    assert rewrite(original, "--out", "a/other", "--no-verify", "--diff", "none", "--only", "fuse_qkv").code == 0
    (Path("a") / "other" / "rewrite.lock").write_text("{")
    moved = releases("6.1.0", DROPOUT)
    done = rewrite("sync", "--transformers", moved, "--exit-non-zero-on-change")
    assert done.code == 2
    assert "a/other is not a rewritten package" in done.err
    assert "attention_dropout = 0.1" in (package / "modeling_tiny.py").read_text()
    checked = rewrite("check", "--transformers", moved)
    assert checked.out.splitlines()[0].startswith("out of date a/other: ")
    assert checked.out.splitlines()[1] == "unverified  out: never verified (rewrite verify out)"


def test_the_transformers_of_the_project(
    here: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    site = here / ".venv" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (site / "transformers").symlink_to(releases("6.3.0") / "transformers")
    inner = here / "deep" / "er"
    inner.mkdir(parents=True)
    found = release.of_project(inner)
    assert found is not None
    assert found.version == "6.3.0"
    monkeypatch.chdir(inner)
    with release.library("project") as library:
        assert library is not None
        assert library.version == "6.3.0"
    assert os.listdir(site) == ["transformers"]


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("requirements.txt", "torch\ntransformers==5.17.0  # pinned\n", "5.17.0"),
        ("requirements-gpu.txt", "transformers[torch] == 5.23.0 ; python_version > '3'\n", "5.23.0"),
        ("pyproject.toml", '[project]\ndependencies = ["transformers==5.0.0"]\n', "5.0.0"),
        ("uv.lock", '[[package]]\nname = "transformers"\nversion = "5.5.4"\n', "5.5.4"),
        ("environment.yml", "dependencies:\n  - transformers=5.1.2\n", "5.1.2"),
        ("requirements.txt", "sentence-transformers==5.0.0\ntransformers>=5\n", None),
        ("requirements.txt", "transformers==5.*\n# transformers==5.0.0\n", None),
    ],
)
def test_pins(here: Path, name: str, text: str, version: str | None) -> None:
    (here / name).write_text(text)
    (here / "package").mkdir()
    found = pins.transformers_pin(here / "package")
    assert (found.version if found else None) == version


def test_a_pin_of_another_version_is_a_finding(package: Path, releases: Releases) -> None:
    tree = releases("6.0.0")
    Path("requirements.txt").write_text("transformers==6.0.0\n")
    assert rewrite("check", package, "--transformers", tree).code == 0
    Path("requirements.txt").write_text("torch\ntransformers==6.5.0\n")
    done = rewrite("check", package, "--transformers", tree, "--format", "github")
    assert done.code == 1
    assert "requirements.txt,line=2," in done.out


# rule by rule, without a file

BEFORE = """
class Attention:
    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x)

class MLP:
    def forward(self, x):
        return self.act(self.gate(x)) * self.up(x)

class Model:
    def forward(self, x):
        return torch.arange(x, device=x.device)
"""


def changed(rule: str, site: str, after: str, skipped: tuple[SkippedSite, ...] = (), *now: str):  # type: ignore[no-untyped-def]
    origin = Origin("t", "t.py", "", None, None, None)
    lock = Lock("0", origin, Options(), {}, (TransformReport(rule, (site,)),), {})
    (change,) = rule_changes(lock, [TransformReport(rule, now, skipped)], BEFORE, after)
    return change


def test_what_is_no_longer_there_upstream_is_gone() -> None:
    after = BEFORE.replace("torch.arange(x, device=x.device)", "x")
    change = changed("static_cache", "Model.forward: torch.arange(x, device=x.device)", after)
    assert (change.lost, len(change.gone)) == ((), 1)
    assert changed("fuse_qkv", "Attention.forward: q_proj, k_proj", BEFORE.replace("Attention", "Other")).gone


def test_what_is_there_and_not_rewritten_is_lost() -> None:
    change = changed("static_cache", "Model.forward: torch.arange(x, device=x.device)", BEFORE)
    assert [lost.why for lost in change.lost] == ["the place is there and is not recognised any more"]
    skip = SkippedSite("Attention.forward: q_proj, k_proj", "not_linear")
    assert [lost.why for lost in changed("fuse_qkv", skip.site, BEFORE, (skip,)).lost] == ["not_linear"]


def test_a_renamed_class_that_is_skipped_now_is_lost() -> None:
    skip = SkippedSite("Other.forward: q_proj, k_proj", "called_twice")
    change = changed("fuse_qkv", "Attention.forward: q_proj, k_proj", BEFORE.replace("Attention", "Other"), (skip,))
    assert "it may be Other.forward: q_proj, k_proj now" in change.lost[0].why


def test_a_renamed_class_that_is_rewritten_is_new_and_gone() -> None:
    after = BEFORE.replace("Attention", "Other")
    change = changed("fuse_qkv", "Attention.forward: q_proj, k_proj", after, (), "Other.forward: q_proj, k_proj")
    assert (len(change.new), len(change.gone), change.lost) == (1, 1, ())


def test_a_fusion_that_upstream_adopted_is_said() -> None:
    after = BEFORE.replace("self.act(self.gate(x)) * self.up(x)", "self.gate_up(x).chunk(2)")
    change = changed("fuse_gate_up", "MLP.forward: gate, up", after)
    assert [taken.why for taken in change.adopted] == ["upstream projects gate and up at once"]
    assert (change.lost, change.gone) == ((), ())


def test_formatting_is_no_change_of_a_site() -> None:
    site, again = (
        "Model.forward: torch.arange( x, device=x.device, )",
        "Model.forward: torch.arange(x, device=x.device)",
    )
    change = changed("static_cache", site, BEFORE, (), again)
    assert (change.unchanged, change.new, change.lost) == ((again,), (), ())


def test_a_rule_that_this_version_does_not_have_loses_its_places() -> None:
    lock = Lock("0", Origin("t", "t.py", "", None, None, None), Options(), {}, (TransformReport("old", ("MLP",)),), {})
    (change,) = rule_changes(lock, [], BEFORE, BEFORE)
    assert "no such rule" in change.lost[0].why


def test_the_main_command_takes_another_release(here: Path, releases: Releases) -> None:
    wheel = releases.wheel("6.3.0")
    arguments = ("Tiny", "--out", "made", "--transformers", wheel, "--only", "fuse_qkv")
    refused = rewrite(*arguments)
    assert refused.code == 2
    assert "'Tiny' of transformers 6.3.0 cannot be verified here" in refused.err
    assert "pip install transformers==6.3.0 first, or write it with --no-verify" in refused.err
    assert not (here / "made").exists()
    assert rewrite(*arguments, "--no-verify").code == 0
    origin = read_lock(here / "made").source
    assert (origin.module, origin.transformers) == ("transformers.models.tiny.modeling_tiny", "6.3.0")
    assert rewrite("check", "made", "--transformers", wheel).code == 0
    listed = rewrite("models", "tin", "--transformers", wheel)
    assert listed.out == "tiny\tmodels/tiny/modeling_tiny.py\n"


def test_what_is_installed_is_verified_whatever_names_it(
    here: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = {"one": (), "same": (), "changed": (DROPOUT,)}
    one, same, changed = (
        copy_at(releases("6.0.0", *changes).rename(here / name) / "transformers") for name, changes in trees.items()
    )
    assert one is not None
    monkeypatch.setattr("rewrite.source.verifiable.find_transformers", lambda: one)
    source = resolve("tiny", library=same)
    assert verifiable.as_installed(source).path == one.root / "models" / "tiny" / "modeling_tiny.py"
    with pytest.raises(UsageError, match=r"6\.0\.0 with another text of this file"):
        verifiable.as_installed(resolve("tiny", library=changed))


def test_a_project_may_have_transformers_from_a_checkout(tmp_path: Path) -> None:
    """`pip install -e`: a file of the environment names the folder."""
    source = tmp_path / "checkout" / "src" / "transformers"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('__version__ = "6.0.0.dev0"\n')
    site = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "distutils-precedence.pth").write_text("import os; var = 'x'\n")
    (site / "__editable__.transformers-6.0.0.dev0.pth").write_text(f"{source.parent}\n")
    found = release.of_project(tmp_path)
    assert found is not None
    assert (found.version, found.root) == ("6.0.0.dev0", source)
