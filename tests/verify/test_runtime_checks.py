"""What a package's runtime could do wrong without another number: each check of it finds the bug that it is for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from rewrite.verify import Options
from rewrite.verify.calls.registered import registered_checks
from rewrite.verify.calls.single_forward import low_precision_forward
from rewrite.verify.generation.loop_checks import loop_checks
from rewrite.verify.judging.compare import Mismatch
from rewrite.verify.judging.verdict import Figure
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.state.declarations import defaults_alike, signatures_alike
from rewrite.verify.state.runtime import nothing_kept, step_aside

from .copies import generated, plant, planted, source_of, upstream, write_package

Run = Callable[[Workbench], Mapping[str, Figure]]


def workbench(model: str, folder: Path) -> Workbench:
    modules = (loaded_sides.load(loaded_sides.locate(side)) for side in (upstream(model), folder))
    subject, options = find_subjects(*modules).main, Options()
    return Workbench(subject, small_variants(subject.original, subject.causal, options.config), options)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "kept_llama", "llama")


def aside(bench: Workbench) -> Mapping[str, Figure]:
    return step_aside(bench, bench.variants[:1])


def own_function(bench: Workbench) -> Mapping[str, Figure]:
    (check,) = registered_checks(bench, bench.base)
    return check.run()


def of_the_loop(name: str) -> Run:
    def run(bench: Workbench) -> Mapping[str, Figure]:
        return next(check for check in loop_checks(bench, bench.variants[:1]) if check.name.endswith(name)).run()

    return run


POSITION = "self.position = torch.zeros(1, dtype=torch.int64"
BUGS = {
    "an operator says that gradients are wanted": (
        "_runtime", "if type(tensors[0]) is Proxy:", "if True:", aside, "steps aside without a cause",
    ),
    "what was packed is never forgotten": (
        "_runtime", "del _groups[address]", "pass", nothing_kept, "_groups from",
    ),
    "an error in a callback is swallowed": (
        "_runtime", "del _groups[address]", "del _groups[None]", nothing_kept, "is swallowed",
    ),
    "attention weights are dropped out in evaluation": (
        "modeling_llama.py", "0.0 if not self.training else self.attention_dropout", "self.attention_dropout",
        own_function, "dropout",
    ),
    "the loop refuses the step that it could take": (
        "_runtime", POSITION, POSITION.replace("int64", "int32"),
        of_the_loop("runs as the package says"), "the original's step runs in a decode loop",
    ),
    "a prompt without a mask cannot be read": (
        "_runtime", "unpadded = attention_mask is None or", "unpadded = attention_mask is None and",
        of_the_loop("one row without a mask"), "has no attribute",
    ),
}  # fmt: skip


def test_a_package_that_is_right_passes(package: Path) -> None:
    bench = workbench("llama", package)
    for run in dict.fromkeys(run for *_, run, _ in BUGS.values()):
        run(bench)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, package: Path, tmp_path: Path) -> None:
    file, old, new, run, said = BUGS[name]
    folder = tmp_path / "broken_llama"
    shutil.copytree(package, folder)
    plant(folder, file, old, new)
    with pytest.raises((Mismatch, AttributeError), match=said):
        run(workbench("llama", folder))


def test_a_bug_of_low_precision_is_seen_in_a_model_with_an_encoder(tmp_path: Path) -> None:
    old = "return self.weight * hidden_states"
    text = planted(
        source_of("t5"), old, "return (self.weight + 0.01 * (self.weight.dtype.itemsize < 8)) * hidden_states"
    )
    bench = workbench("t5", write_package(tmp_path / "broken_t5", "t5", text))
    with pytest.raises(Mismatch, match="largest error"):
        low_precision_forward(bench, "float32")


def test_another_default_of_a_function_is_seen() -> None:
    def module(code: str) -> ModuleType:
        made = ModuleType("made")
        exec(code, made.__dict__)
        return made

    plain = "def scaled(x, by=2): return x * by\nclass A:\n    @staticmethod\n    def of(x, more=1): return x"
    assert defaults_alike(module(plain), module(plain.replace("by=2", "by=2, beside=3"))) == {"functions": 2}
    for old, new, name in (("by=2", "by=3", "scaled"), ("more=1", "more=None", "A.of")):
        with pytest.raises(Mismatch, match=name):
            defaults_alike(module(plain), module(plain.replace(old, new)))


@pytest.mark.parametrize(
    ("new", "alike"),
    [
        ("self, x, mask=None, mine=False, **kwargs", True),
        ("self, x, mask=None, *, mine=False, **kwargs", True),
        ("self, x, mine=False, mask=None, **kwargs", False),  # a second positional argument is the mask
        ("self, x, mask=None, *, mine, **kwargs", False),  # the original's calls do not give it
        ("self, x, mask=False, **kwargs", False),
        ("self, x, **kwargs", False),
        ("self, x, mask=None", False),
    ],
)
def test_an_argument_of_an_edit_is_no_other_signature(new: str, alike: bool) -> None:
    def module(parameters: str) -> ModuleType:
        made = ModuleType("made")
        made.__dict__["__name__"] = "made"
        exec(f"from torch import nn\nclass A(nn.Module):\n    def forward({parameters}): return x", made.__dict__)
        return made

    original = module("self, x, mask=None, **kwargs")
    if alike:
        assert signatures_alike(original, module(new)) == {"signatures": 2}
    else:
        with pytest.raises(Mismatch, match=r"A\.forward takes"):
            signatures_alike(original, module(new))
    starred = module("self, x, *rest, **kwargs")
    with pytest.raises(Mismatch, match="mine"):  # a second positional argument belongs to the rest
        signatures_alike(starred, module("self, x, mine=False, *rest, **kwargs"))
    assert signatures_alike(starred, module("self, x, *rest, mine=False, **kwargs")) == {"signatures": 2}
