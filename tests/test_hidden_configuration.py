"""Importing a file of the runtime changes nothing in another one: policies are passed, not set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rewrite import operators

WATCH = '''
import copy, importlib, importlib.abc, sys

def kept(value):
    """What tells a value later: containers by their contents."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [id(item) for item in value]
    if type(value) is dict:
        return type(value), [(key, id(item)) for key, item in value.items()]
    return id(value)

def state():
    return {(n, a): kept(v) for n in finished for a, v in list(vars(sys.modules[n]).items())
            if not a.startswith("__") and f"{n}.{a}" not in sys.modules}

finished, known, changes = [], {}, []

class Watch(importlib.abc.MetaPathFinder):
    """Wraps the loader of every file: when its code has run, the files that were done before are as they were."""

    def find_spec(self, name, path, target=None):
        if not name.startswith(PREFIX):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if hasattr(spec.loader, "exec_module"):
                    run = spec.loader.exec_module
                    def watched(module, run=run):
                        run(module)
                        now = state()
                        changes.extend(f"{module.__name__} changes {'.'.join(key)}"
                                       for key, value in known.items() if now.get(key) != value)
                        finished.append(module.__name__)
                        known.update(state())
                    spec.loader.exec_module = watched
                return spec
        return None

sys.meta_path.insert(0, Watch())
importlib.import_module(FILE)
print("\\n".join(sorted(set(changes))))
'''
FILES = [f"hf_rewrite_runtime.{file.replace('/', '.')}" for file in operators.files() if not file.endswith("__init__")]


def changes(module: str, prefix: str = "hf_rewrite_runtime.", path: Path | None = None) -> list[str]:
    code = f"import sys; sys.path[:0] = {[str(path)] if path else []}\nPREFIX, FILE = {prefix!r}, {module!r}\n{WATCH}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.slow
@pytest.mark.parametrize("module", FILES)
def test_importing_a_file_changes_no_other(module: str) -> None:
    assert changes(module) == []


def test_a_change_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    files = {
        "__init__": "",
        "policy": "TOLERANCE = 0.1\nREPORTERS = []\nLIMITS = {'a': 1}\n",
        "sets": "from . import policy\npolicy.TOLERANCE = 0.5\n",
        "appends": "from .policy import REPORTERS\nREPORTERS.append(1)\n",
        "calls": "from . import sets, policy\npolicy.LIMITS['a'] = 2\n",
        "plain": "from .policy import TOLERANCE\nOWN = TOLERANCE\n",
    }
    for name, text in files.items():
        (tmp_path / "planted" / f"{name}.py").write_text(text)

    def found(name: str) -> list[str]:
        return changes(f"planted.{name}", "planted.", tmp_path)

    assert found("plain") == []
    assert found("sets") == ["planted.sets changes planted.policy.TOLERANCE"]
    assert found("appends") == ["planted.appends changes planted.policy.REPORTERS"]
    assert found("calls") == [
        "planted.calls changes planted.policy.LIMITS", "planted.sets changes planted.policy.TOLERANCE",
    ]  # fmt: skip
