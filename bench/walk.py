"""A user's way with a package, from an empty machine to the Hub and the way out, recorded screen by screen.

    python bench/walk.py --write docs/walk.md [--pip-option=-c --pip-option=FILE] [--keep DIR]

Every step runs in a git repository in a temporary folder, with an environment that the script makes, on a terminal of
80 columns (`bench/screens.py`). Its exit code and what it left are checked, and a step that is not as it should be
ends the walk. The tool is installed from this repository's last commit, transformers goes from one release to the
newest that the package index has. Verifications are quick ones, on a CPU. pip's time is counted apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from screens import COLUMNS, Screen, run

ROOT = Path(__file__).parents[1]
OLD = "5.17.0"
PACKAGE, SECOND = "optimized_llama", "optimized_qwen3"
FILE = f"{PACKAGE}/modeling_llama.py"
GENERATED = """\
        logits = linear(hidden_states[:, slice_indices, :], self.lm_head)
"""
CAP = """\
        logits = 30.0 * torch.tanh(logits / 30.0)
"""
RESOLVED = f"""\
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
        logits = linear(hidden_states, self.lm_head)
{CAP}"""
REASON = "logits are capped at 30: our checkpoints are trained with it"
SMALL = """\
import torch
from optimized_llama import LlamaForCausalLM
from transformers import LlamaConfig

torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).eval()
model.lm_head.weight.data *= 200  # large logits: the cap has something to do
model.save_pretrained("checkpoint")
with torch.no_grad():
    torch.save(model(torch.arange(16)[None]).logits, "logits.pt")
"""
LOAD = """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(torch.arange(16)[None]).logits
print(type(model).__module__.rpartition(".")[2], torch.equal(logits, torch.load("logits.pt")))
"""
DECODES = """\
import torch
import transformers
import optimized_llama
from optimized_llama import explain

prompt = torch.arange(16)[None]


def logits(kind, step=False):
    model = kind.from_pretrained("checkpoint").eval()
    model._step_without_graph = step  # takes the step of the loop on a CPU too
    given = dict(max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    text = model.generate(prompt, do_sample=False, **given)
    return model, torch.stack(text.logits)


_, original = logits(transformers.LlamaForCausalLM)
_, plain = logits(optimized_llama.LlamaForCausalLM)
model, steps = logits(optimized_llama.LlamaForCausalLM, step=True)
print("largest logit of each token")
for name, one in dict(original=original, forward=plain, step=steps).items():
    print(f"{name:9}", *(f"{top:5.1f}" for top in one.abs().amax((1, 2))))
assert torch.allclose(plain, steps, atol=1e-3), "a step says what forward says"
print(explain(model))
"""
SPEAKS = """\
import torch
from optimized_llama import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("checkpoint").eval()
with torch.no_grad():
    logits = model(torch.arange(16)[None]).logits
print(torch.equal(logits, torch.load("logits.pt")), model.generate(torch.arange(4)[None], max_new_tokens=4).shape)
"""


@dataclass
class Size:
    """What a package adds to a repository."""

    files: int
    lines: int
    modeling: int
    """Lines of the modeling file."""
    changed: int
    """Lines of the modeling file that the original does not have, or lost."""
    megabytes: float
    seconds: float
    """Of `rewrite llama --out DIR --no-verify`."""


@dataclass
class Walk:
    """The repository, its environment, and what was recorded."""

    home: Path
    pip_options: Sequence[str]
    parts: list[str] = field(default_factory=list)
    screens: list[Screen] = field(default_factory=list)
    pip: dict[str, float] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        """The user's repository."""
        return self.home / "project"

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell has: pip's settings, and nothing of the process that walks."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "LC_"))}
        names = {"GIT_AUTHOR_NAME": "A User", "GIT_AUTHOR_EMAIL": "user@example.com"}
        names |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in names.items()}
        path = f"{self.home / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return {**kept, **names, "HOME": str(self.home), "PATH": path, "GIT_PAGER": "cat", "HF_HUB_OFFLINE": "1"}

    def say(self, text: str) -> None:
        """Add prose to the page."""
        self.parts.append(text)

    def step(self, command: str, code: int = 0, shows: Sequence[str] = (), shown: bool = True) -> Screen:
        """Run a command, check how it ended and what it said, and record its screen."""
        screen = run(command, self.project, self.environment)
        print(f"{screen.seconds:7.1f} s  {screen.code}  {command.splitlines()[0]}", flush=True)
        flat = " ".join(screen.text.split())
        missing = [text for text in shows if text not in flat]
        if screen.code != code or missing:
            sys.exit(f"{command}: exit code {screen.code}, expected {code}; not shown: {missing}\n{screen.text}")
        if shown:
            self.screens.append(screen)
            self.parts.append(self._block(screen))
        return screen

    def install(self, what: str, *arguments: str, venv: str = "venv") -> None:
        """Run pip, whose time is counted apart and whose screen is not recorded."""
        started = time.monotonic()
        pip = self.home / venv / "bin" / "pip"
        done = subprocess.run(
            [pip, "install", "-q", *self.pip_options, *arguments], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"pip install {what}: {done.stderr}")
        self.pip[what] = time.monotonic() - started

    def edit(self, old: str, new: str) -> None:
        """Change the modeling file as an editor would."""
        path = self.project / FILE
        text = path.read_text()
        require(text.count(old) == 1, f"{old!r} is once in {FILE}")
        path.write_text(text.replace(old, new))

    def version(self, name: str) -> str:
        """The version of a distribution in the user's environment."""
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        python = self.home / "venv" / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def _block(self, screen: Screen) -> str:
        notes = [f"exit code {screen.code}", f"{screen.seconds:.1f} s, {screen.processor:.1f} of a processor"]
        if screen.progress:
            notes.append(f"while it ran: `{_clean(screen.progress, self.home)}`")
        text = _clean(screen.text, self.home)
        command = "\n".join(f"{'$' if not n else '>'} {line}" for n, line in enumerate(screen.command.splitlines()))
        return f"```text\n{command}\n{text}".rstrip() + f"\n```\n\n*{' · '.join(notes)}*"


def main(argv: Sequence[str] | None = None) -> None:
    """Walk, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; without it only the times are printed")
    parser.add_argument("--pip-option", action="append", default=[], help="for every `pip install`; repeatable")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="walk here, and leave everything")
    given = parser.parse_args(argv)
    with _folder(given.keep) as home:
        walk = Walk(home, given.pip_option)
        page = _page(walk, walked(walk))
    if given.write is not None:
        given.write.write_text(page, encoding="utf-8")


def walked(walk: Walk) -> dict[str, Size]:
    """Take every step, and return the sizes of the packages that were made."""
    install(walk)
    sizes = package(walk)
    edit(walk)
    upgrade(walk)
    intend(walk)
    leave(walk)
    return sizes


def install(walk: Walk) -> None:
    """A clean machine: an environment with the tool, and a repository."""
    walk.say("## A clean machine")
    for name in ("venv", "lean"):
        subprocess.run([sys.executable, "-m", "venv", walk.home / name], check=True)
    with checkout(walk, "HEAD") as tool:
        extra = "[verify]" if re.search(r"^verify = ", (tool / "pyproject.toml").read_text(), re.M) else ""
        walk.install("hf-rewrite", str(tool), venv="lean")
        walk.install(
            f"hf-rewrite{extra} transformers=={OLD}", f"{tool}/runtime", f"{tool}{extra}", f"transformers=={OLD}"
        )
    rows = [
        ("`pip install hf-rewrite`", walk.pip["hf-rewrite"], megabytes(walk.home / "lean")),
        (f"`pip install 'hf-rewrite{extra}' transformers=={OLD}`", list(walk.pip.values())[-1],
         megabytes(walk.home / "venv")),
    ]  # fmt: skip
    walk.say("\n".join([
        "| in an empty environment | seconds | MB |", "|---|---|---|",
        *(f"| {what} | {seconds:.0f} | {size:,.0f} |" for what, seconds, size in rows),
    ]))  # fmt: skip
    walk.project.mkdir()
    (walk.project / "requirements.txt").write_text(f"transformers=={OLD}\n")
    (walk.project / ".gitignore").write_text("__pycache__/\n")
    walk.step("git init -q && git add . && git commit -qm 'The project'", shown=False)


def package(walk: Walk) -> dict[str, Size]:
    """Make a package and a second one, look at them and commit them."""
    walk.say("## A package")
    walk.step(f"rewrite llama --out {PACKAGE} --quick --commit", shows=["LlamaForCausalLM", "committed"])
    walk.say("Two commits: the original, then the package, so that a review sees the lines that changed.")
    walk.step("git log --reverse -n 2 --stat=80 --format=%s", shows=["rewrite.lock"])
    walk.step(f'python -c "import {PACKAGE}; print({PACKAGE}.selftest())"')
    walk.step(f"rewrite check {PACKAGE}", shows=["up to date"])
    walk.say("A second model of the same repository:")
    walk.step(f"rewrite qwen3 --out {SECOND} --no-verify --diff none", shows=["needs"])
    walk.step("git add . && git commit -qm 'Qwen3, rewritten' && git show --stat=80 --format=%s | tail -n 1")
    sizes = {"now": measured(walk), "second": counted(walk, "HEAD", 0.0, SECOND)}
    walk.say("## The team's formatter\n\nWhat it does is no edit:")
    walk.step(f"ruff format {PACKAGE}", shows=["reformatted"])
    walk.step(f"rewrite check {PACKAGE}", shows=["up to date"])
    walk.step("git commit -qam 'Formatted'", shown=False)
    return sizes


def edit(walk: Walk) -> None:
    """Change a line that the next release changes too."""
    walk.say(
        "## An edit\n\nThe team's checkpoints were trained with capped logits: a line more in the model's `forward`."
    )
    walk.edit(GENERATED, GENERATED + CAP)
    walk.step(f"rewrite diff {PACKAGE} --edits", shows=["torch.tanh"])
    walk.step(f"rewrite check {PACKAGE}", code=1, shows=["out of date"])
    walk.step("git commit -qam 'Cap the logits'", shown=False)


def upgrade(walk: Walk) -> None:
    """Install the next release, meet a conflict and resolve it."""
    walk.install("--upgrade transformers", "--upgrade", "transformers")
    new = walk.version("transformers")
    require(new != OLD, "there is a newer transformers")
    walk.say(f"## transformers {OLD} → {new}, the newest")
    (walk.project / "requirements.txt").write_text(f"transformers=={new}\n")
    walk.step(f"rewrite check {PACKAGE}", code=1, shows=["out of date"])
    before = (walk.project / FILE).read_bytes()
    walk.step(f"rewrite sync {PACKAGE}", code=1, shows=["conflict"])
    require((walk.project / FILE).read_bytes() == before, "the file stays as it was while there is a conflict")
    walk.step(f"sed -n '/<<<<<<</,/>>>>>>>/p' {FILE}.conflict", shows=["torch.tanh", "slice_logits_to_keep"])
    walk.say("Both sides meant something: the new slicing, and the cap. In the copy:")
    copy = walk.project / f"{FILE}.conflict"
    text, count = re.subn(r"<<<<<<<.*?>>>>>>>[^\n]*\n", RESOLVED, copy.read_text(), flags=re.S)
    require(count == 1, "there is one conflict")
    copy.write_text(text)
    walk.step(f"rewrite sync {PACKAGE} --resolved {FILE}.conflict")
    require("torch.tanh" in (walk.project / FILE).read_text(), "the edit is in the merged file")
    require("slice_logits_to_keep" in (walk.project / FILE).read_text(), "the upgrade is in the merged file")
    require(not copy.exists(), "no copy is left")
    walk.say("What the upgrade brought has the team's layout:")
    walk.step(f"ruff format --check {PACKAGE}")
    walk.step(f"rewrite sync {SECOND} --diff none --commit", shows=["committed"])


def intend(walk: Walk) -> None:
    """Say that the edit is meant, and commit."""
    walk.say("## The change is meant")
    walk.step(f"rewrite check {PACKAGE}", code=1, shows=["out of date"])
    walk.step(f"rewrite verify {PACKAGE} --quick", code=1)
    walk.step(f'rewrite accept {PACKAGE} --quick --reason "{REASON}"', shows=["accepted.json"])
    walk.step("rewrite check", shows=["up to date"])
    walk.step(f"rewrite diff {PACKAGE} --format markdown | head -n 40", shows=[REASON])
    walk.step("git add . && git commit -qm 'Llama, upgraded' && git show --stat=80 --format=%s | tail -n 1")
    walk.say("## It acts in decode\n\nA small checkpoint with random weights, saved by the package (`small.py`):")
    for name, text in {"small.py": SMALL, "decodes.py": DECODES, "load.py": LOAD, "speaks.py": SPEAKS}.items():
        (walk.project / name).write_text(text)
    walk.step("python small.py && ls checkpoint", shows=["model.safetensors"])
    walk.say(
        "`decodes.py` generates eight tokens: with the original, with transformers' loop around the package's "
        "`forward`, and with the step that a GPU captures, as plain calls on this CPU."
    )
    walk.step("python decodes.py", shows=["decode loop: yes"])


def leave(walk: Walk) -> None:
    """Export the package with a checkpoint, and do without the tool."""
    walk.say("## To the Hub\n\nThe package as one file, beside that checkpoint:")
    walk.step(f"rewrite export {PACKAGE} --hub checkpoint --checkpoint checkpoint")
    walk.say("`load.py` builds it with `trust_remote_code=True` and compares the logits:")
    walk.step("python load.py", shows=["True"])
    walk.say("## The way out")
    walk.step(f"rewrite eject {PACKAGE}", shows=["ejected"])
    require(not (walk.project / PACKAGE / "rewrite.lock").exists(), "the lock is gone")
    walk.step("pip uninstall -qy hf-rewrite && python speaks.py", shows=["True", "[1, 8]"])


@contextmanager
def checkout(walk: Walk, commit: str) -> Iterator[Path]:
    """Yield the files of a commit of this repository."""
    tree = walk.home / "checkout"
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def measured(walk: Walk) -> Size:
    """Make the package again beside the repository, and count it in a commit that is taken back."""
    line = "rewrite llama --out measured/llama --no-verify --diff none"
    seconds = min(walk.step(f"rm -rf measured && {line}", shown=False).seconds for _ in range(2))
    walk.step("git add measured && git commit -qm measured", shown=False)
    size = counted(walk, "HEAD", seconds, "measured/llama")
    walk.step("git reset -q --hard HEAD~1", shown=False)
    return size


def counted(walk: Walk, commit: str, seconds: float, package: str) -> Size:
    """Return what a commit with a package added, counted as git counts text files; what only moved is nothing."""
    stat = walk.step(f"git show --numstat --format= {commit}", shown=False).text.splitlines()
    rows = [int(line.split()[0]) for line in stat if line[:1].isdigit() and line.split()[:2] != ["0", "0"]]
    folder = walk.project / package
    (model,) = folder.glob("modeling_*.py")
    return Size(len(rows), sum(rows), len(model.read_text().splitlines()), changed(model), megabytes(folder), seconds)


def changed(model: Path) -> int:
    """Return the lines of the diff between a modeling file and its original, kept beside it."""
    original = _kept_original(model)
    if original is None:
        return 0
    import difflib

    pair = [text.splitlines() for text in (original, model.read_text())]
    return sum(1 for line in difflib.ndiff(*pair) if line[:2] in ("+ ", "- "))


def _kept_original(model: Path) -> str | None:
    """Return the original that a package keeps, in an archive or, in those of earlier commits, in a file."""
    kept, name = model.parent / ".rewrite", f"{model.name}.original"
    if (archive := kept / "texts.zip").is_file():
        return zipfile.ZipFile(archive).read(name).decode()
    return (kept / name).read_text() if (kept / name).is_file() else None


def megabytes(folder: Path) -> float:
    """Return the size of the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def require(holds: bool, what: str) -> None:
    """End the walk if something is not as it should be."""
    if not holds:
        sys.exit(f"not so: {what}")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        yield Path(folder).resolve()


def _clean(text: str, home: Path) -> str:
    """Return a text without the folder that the walk took place in."""
    return text.replace(str(home), "~").replace("```", "'''")


def _page(walk: Walk, sizes: dict[str, Size]) -> str:
    screens = walk.screens
    spent, processor = (sum(getattr(one, what) for one in screens) for what in ("seconds", "processor"))
    head = f"""\
# A walk

Made by `python bench/walk.py --write docs/walk.md` on {_machine(walk)}. \
Every command was run in a git repository, on a terminal of {COLUMNS} columns, and what it left was checked.
Verifications are quick ones (`--quick`).

{len(screens)} screens, {spent:.0f} s of commands, {processor:.0f} s of a processor: the machine had other work. \
pip took another {sum(walk.pip.values()):.0f} s. \
{_cut(screens)}

{_sizes(sizes)}
"""
    page = "\n\n".join([head.rstrip(), *walk.parts]) + "\n"
    for secret in (str(walk.home), str(ROOT), str(Path.home()) + "/", "://"):
        require(secret not in page, f"{secret!r} is not on the page")
    return page


def _cut(screens: Sequence[Screen]) -> str:
    cut = {screen.command.splitlines()[0]: screen.cut for screen in screens if screen.cut}
    if not cut:
        return "No line was longer than the terminal."
    return f"Lines longer than the terminal: {', '.join(f'{count} of `{name}`' for name, count in cut.items())}."


def _sizes(sizes: dict[str, Size]) -> str:
    names = {"now": "the first", "second": "a second model beside it"}
    rows = {
        "files": lambda size: f"{size.files}",
        "lines": lambda size: f"{size.lines:,}",
        "of these in the modeling file": lambda size: f"{size.modeling}",
        "changed there": lambda size: f"{size.changed}" if size.changed else "–",
        "MB": lambda size: f"{size.megabytes:.2f}",
        "seconds, without verification": lambda size: f"{size.seconds:.1f}" if size.seconds else "–",
    }
    lines = [
        f"| a package of Llama in git | {' | '.join(names[name] for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    lines += [f"| {what} | {' | '.join(value(sizes[name]) for name in names)} |" for what, value in rows.items()]
    return "\n".join(lines)


def _machine(walk: Walk) -> str:
    versions = walk.step("python -m pip list --format=freeze", shown=False).text
    found = dict(line.split("==") for line in versions.splitlines() if "==" in line)
    named = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton") if name in found)
    return f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, {named}, without a GPU"


if __name__ == "__main__":
    main()
