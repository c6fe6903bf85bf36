"""The worked example of CONTRIBUTING: an operator is one file, a transform one file and a folder of cases.

`fixtures/newcomer` is laid over a copy of the repository, `OFFER` stands in its `rewrite/offers.py`, and nothing else
is changed there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEWCOMER = ROOT / "fixtures" / "newcomer"
OPERATOR = "runtime/attention/norm_rotary.py"
TRANSFORM = "transforms/fuse_norm_rotary.py"
CASES = "fixtures/transforms/fuse_norm_rotary"
COPIED = (".links", "rewrite", "runtime", "transforms", "docs", "fixtures", "README.md", "pyproject.toml")
TESTS = ("conftest.py", "emulator/__init__.py", "emulator/emulation_options.py", "test_golden.py", "tolerances.py")
BEFORE = '    Offer("qkv_step", "rope/qkv_step"'
OFFER = '''    Offer(
        "norm_rotary",
        "attention/norm_rotary",
        shapes="[B, H, S, D], [B, Hk, S, D] -> the same",
        computes="""
def norm_rotary(q, k, q_norm, k_norm, cos, sin):
    return rotary(q_norm(q), k_norm(k), cos, sin)
""",
        step="qkv_step",
    ),
'''

AS_EXACT_AS_ITS_REFERENCE = """
import sys
sys.path.insert(0, "tests")
import torch
from tolerances import assert_as_exact_as
from hf_rewrite_runtime.attention import norm_rotary
from hf_rewrite_runtime.core import backend

def inputs(dtype):
    torch.manual_seed(0)
    packed = torch.randn(2, 5, 6, 24)
    q, k = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:].transpose(1, 2)
    weights, angles = torch.rand(2, 24) + 0.5, torch.randn(1, 5, 24)
    given = [t.to(torch.float16).to(dtype) for t in (q, k, *weights, angles.cos(), angles.sin())]
    return (*given[:4], 1e-3, 1e-2, *given[4:])

def exactly(heads, weight, eps, cos, sin):
    normed = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    first, second = normed.chunk(2, -1)
    return normed * cos + torch.cat((-second, first), -1) * sin

for dtype in (torch.float32, torch.float16):
    q, k, q_weight, k_weight, q_eps, k_eps, cos, sin = inputs(torch.float64)
    exact = exactly(q, q_weight, q_eps, cos, sin), exactly(k, k_weight, k_eps, cos, sin)
    plain = norm_rotary.reference(*inputs(dtype))
    launched = []
    launch = norm_rotary.norm_rotary_kernel.launch
    norm_rotary.norm_rotary_kernel.launch = lambda *given: launched.append(launch(*given))
    with backend.use_backend("triton"):
        got = norm_rotary._op(*inputs(dtype))
    assert len(launched) == 1
    for kernel, reference, wanted in zip(got, plain, exact):
        assert_as_exact_as(reference, kernel, wanted, torch.finfo(dtype).eps)
    norm_rotary.norm_rotary_kernel.launch = launch
print("as exact")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the newcomer's files."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "tests" / "emulator").mkdir(parents=True)
    for name in TESTS:
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    shutil.copytree(NEWCOMER, folder, dirs_exist_ok=True)
    offers = folder / "rewrite" / "offers.py"
    text = offers.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    offers.write_text(text.replace(BEFORE, OFFER + BEFORE), encoding="utf-8")
    return folder


def run(copy: Path, *arguments: str, **environment: str) -> str:
    """Run Python in the copy, and return what it prints."""
    variables = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join((str(copy), str(copy / ".links"))), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        | environment
    )
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_an_operator_is_one_file_and_a_transform_one_file_and_its_cases() -> None:
    files = {path.relative_to(NEWCOMER).as_posix() for path in NEWCOMER.rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path}
    assert {path for path in files if not path.startswith(f"{CASES}/")} == {OPERATOR, TRANSFORM}
    assert not [path for path in files if (ROOT / path).exists()], "the repository has it already"


def test_contributing_shows_these_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "rewrite/offers.py" in text
    assert [path for path in (OPERATOR, TRANSFORM, CASES) if f"fixtures/newcomer/{path}" not in text] == []


def test_the_transform_is_listed(copy: Path) -> None:
    assert "fuse_norm_rotary" in run(copy, "-m", "rewrite.cli", "explain")


def test_the_documentation_has_both(copy: Path) -> None:
    run(copy, "-m", "rewrite.docs")
    assert "| `attention.norm_rotary(q, k, q_norm, k_norm, cos, sin)` |" in (copy / "docs/operators.md").read_text()
    assert "## fuse_norm_rotary" in (copy / "docs/transforms.md").read_text()


@pytest.mark.slow
def test_the_cases_of_the_transform_pass(copy: Path) -> None:
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_golden.py", "-k", "fuse_norm_rotary")
    assert "7 passed" in run(copy, *arguments)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_is_compiled_ahead_of_time(copy: Path) -> None:
    said = run(copy, "-m", "rewrite.kernels", "norm_rotary", "--target", "sm_90", "--jobs", "1")
    assert "Qwen3 30B-A3B, prompt" in said
    assert "no findings" in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_is_as_exact_as_its_reference(copy: Path) -> None:
    assert "as exact" in run(copy, "-c", AS_EXACT_AS_ITS_REFERENCE, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_a_package_imports_the_operator(copy: Path) -> None:
    # decode_layers would take norm and rotation into its own operator
    run(copy, "-m", "rewrite.cli", "qwen3", "--out", "package", "--no-verify", "--skip", "decode_layers")
    text = (copy / "package" / "modeling_qwen3.py").read_text()
    assert "from hf_rewrite_runtime.attention.norm_rotary import norm_rotary" in text
    assert " = norm_rotary(" in text
    code = (
        "import torch, transformers, package\n"
        "sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,"
        " num_key_value_heads=2, head_dim=8, vocab_size=64)\n"
        "config = transformers.Qwen3Config(**sizes)\n"
        "torch.manual_seed(0)\n"
        "original = transformers.Qwen3ForCausalLM(config).eval()\n"
        "mine = package.Qwen3ForCausalLM(config).eval()\n"
        "mine.load_state_dict(original.state_dict())\n"
        "ids = torch.randint(0, 64, (2, 7))\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(mine(ids).logits, original(ids).logits)\n"
    )
    run(copy, "-c", code)
