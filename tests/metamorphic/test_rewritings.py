# ruff: noqa: E501 – a case in a line reads better than one in five
"""Every rewriting on small functions: what it makes of them, what it leaves alone, and that the result is the same."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .rewriting import respell
from .rewritings import all_rewritings

ROOT = Path(__file__).parents[2]
TINY = ROOT / "fixtures" / "models" / "modeling_tiny_llama.py"
HEADER = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
T = "x: torch.Tensor, y: torch.Tensor"
"""Parameters of the functions below: x is [2, 3, 4, 4] and y is [4]."""

CHANGED = {
    "arguments_by_keyword": [
        ("def g(a, b=1):\n    return a + b\ndef f(x, y):\n    return g(x, y)", "return g(a=x, b=y)"),
        (f"def f({T}):\n    return torch.cat((x, x), -1).mean(-1, keepdim=True)", "cat((x, x), dim=-1).mean(dim=-1,"),
    ],
    "arguments_by_position": [
        ("def g(a, b=1):\n    return a + b\ndef f(x, y):\n    return g(b=y, a=x)", "return g(x, y)"),
        (f"def f({T}):\n    return F.softmax(x, dim=-1)", "F.softmax(x, -1)"),
    ],
    "cast_as_method": [(f"def f({T}):\n    return x.to(torch.float32) + x.to(dtype=torch.float32)", "x.float() + x.float()")],
    "cast_as_to": [(f"def f({T}):\n    return x.float().to(y.dtype)", "x.to(dtype=torch.float32).to(dtype=y.dtype)")],
    "contiguous_view_as_reshape": [
        (f"def f({T}):\n    return x.transpose(1, 2).contiguous().view(2, 48)", "x.transpose(1, 2).reshape(2, 48)")
    ],
    "early_return": [
        (f"def f({T}):\n    if x.dim() == 1:\n        return x\n    else:\n        x = x * y\n        return x + 1",
         "return x\n    x = x * y\n    return x + 1"),
    ],
    "else_after_return": [
        (f"def f({T}):\n    if x.dim() == 1:\n        return x\n    x = x * y\n    return x + 1",
         "return x\n    else:\n        x = x * y\n        return x + 1"),
    ],
    "flip_comparisons": [
        (f"def f({T}):\n    return x if x.shape[0] < 1 else (y if 4 == y.shape[0] else x)", "1 > x.shape[0]"),
    ],
    "full_names": [(f"def f({T}):\n    return nn.functional.silu(x)", "torch.nn.functional.silu(x)")],
    "function_as_method": [(f"def f({T}):\n    return torch.rsqrt(torch.pow(x, 2))", "x.pow(2).rsqrt()")],
    "functional_spelling": [
        (f"def f({T}):\n    return F.silu(x) + nn.functional.gelu(x)",
         "torch.nn.functional.silu(x) + torch.nn.functional.gelu(x)"),
    ],
    "inline_temporaries": [
        (f"def f({T}):\n    a = x * y\n    b = torch.tanh(a)\n    return b", "return torch.tanh((x * y))"),
    ],
    "introduce_temporaries": [
        (f"def f({T}):\n    return torch.tanh(torch.exp(x) * torch.cos(y))",
         "_1 = torch.exp(x)\n    intermediate_2 = torch.cos(y)\n    return torch.tanh(intermediate_1 * intermediate_2)"),
        (f"def f({T}):\n    a = (\n        torch.exp(x)\n        .sin() + 1\n    )\n    return a",
         ".sin())\n"),
    ],
    "join_assignments": [(f"def f({T}):\n    a = x.sin()\n    b = y.cos()\n    return a + b", "a, b = x.sin(), y.cos()")],
    "matmul_as_operator": [(f"def f({T}):\n    return torch.matmul(x, y) + x.matmul(y)", "(x @ y) + (x @ y)")],
    "method_as_function": [(f"def f({T}):\n    return x.pow(2).mean(-1, keepdim=True)",
                            "torch.mean(torch.pow(x, 2), -1, keepdim=True)")],
    "none_as_unsqueeze": [(f"def f({T}):\n    return x[:, :, None] + y[..., None]", "x.unsqueeze(2) + y.unsqueeze(-1)")],
    "operator_as_function": [(f"def f({T}):\n    return x + x @ y[:, None] * 2 - x / 3",
                              "torch.sub(torch.add(x, torch.mul(torch.matmul(x, y[:, None]), 2)), torch.div(x, 3))")],
    "operator_as_method": [(f"def f({T}):\n    return (x + y) * 2", "(x.add(y)).mul(2)")],
    "power_as_operator": [(f"def f({T}):\n    return x.pow(2) + torch.pow(y, 3)", "(x ** 2) + (y ** 3)")],
    "power_as_square": [(f"def f({T}):\n    return x.pow(2) + y**2", "torch.square(x) + torch.square(y)")],
    "rename_attributes": [
        ("class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.proj = nn.Identity()\n"
         "    def forward(self, x):\n        return self.proj(x)\ndef f(x, y):\n    return M()(x)",
         "return self.proj_kept(x)"),
    ],
    "rename_imports": [
        ("from transformers.activations import ACT2FN\ndef f(x, y):\n    return ACT2FN['silu'](x)",
         "ACT2FN_imported['silu']"),
    ],
    "rename_locals": [
        (f"def f({T}):\n    total = sum([part.sum() for part in x])\n    return total * y",
         "total_here = sum([part_here.sum() for part_here in x])"),
    ],
    "rename_parameters": [
        ("def g(a, *, b):\n    return a - b\ndef f(x, y):\n    return g(x, b=y)", "return g(x_given, b_given=y_given)"),
    ],
    "reorder_statements": [
        (f"def f({T}):\n    a = x.sin()\n    b = y.cos()\n    return a + b", "b = y.cos()\n    a = x.sin()"),
    ],
    "reshape_as_view": [(f"def f({T}):\n    return x.transpose(1, 2).reshape(2, -1)", ".contiguous().view(2, -1)")],
    "return_by_negation": [
        (f"def f({T}):\n    if y is not None:\n        x = x * y\n    return x",
         "if y is None:\n        return x\n    x = x * y\n    return x"),
    ],
    "shape_as_size": [(f"def f({T}):\n    return x.view(x.shape[0], *x.shape[1:])", "x.view(x.size(0), *x.size()[1:])")],
    "size_as_shape": [(f"def f({T}):\n    return x.view(x.size(0), *x.size()[1:])", "x.view(x.shape[0], *x.shape[1:])")],
    "softmax_as_torch": [(f"def f({T}):\n    return F.softmax(x, dim=-1)", "torch.softmax(x, dim=-1)")],
    "spell_imports": [(f"def f({T}):\n    return nn.functional.silu(x)", "import torch.nn as nn")],
    "split_chains": [
        (f"def f({T}):\n    return x.view(6, 16).transpose(0, 1)",
         "intermediate_1 = x.view(6, 16)\n    return intermediate_1.transpose(0, 1)"),
    ],
    "split_tuples": [
        (f"def f({T}):\n    a, b = x.sin(), y.cos()\n    c = d = a * b\n    return c + d",
         "a = x.sin()\n    b = y.cos()\n    c = a * b\n    d = c"),
    ],
    "swap_branches": [
        (f"def f({T}):\n    if x is None:\n        z = y\n    else:\n        z = x * y\n    return z",
         "if x is not None:\n        z = x * y\n    else:\n        z = y"),
    ],
    "swap_conditionals": [(f"def f({T}):\n    return x if y is not None else y", "return y if y is None else x")],
    "swap_operands": [(f"def f({T}):\n    return x * y + 1e-6", "1e-6 + (y * x)")],
    "transpose_as_function": [
        (f"def f({T}):\n    return x.transpose(1, 2) + torch.transpose(x, 1, 2)",
         "torch.transpose(x, 1, 2) + x.transpose(1, 2)"),
    ],
    "transpose_as_permute": [
        (f"def f({T}):\n    return x.view(2, 3, 4, 4).transpose(1, 2)", "x.view(2, 3, 4, 4).permute(0, 2, 1, 3)"),
    ],
    "transpose_as_swapaxes": [(f"def f({T}):\n    return x.transpose(1, 2)", "x.swapaxes(1, 2)")],
    "unsqueeze_as_none": [(f"def f({T}):\n    return x.unsqueeze(1) + y.unsqueeze(-1)", "x[:, None] + y[..., None]")],
    "view_as_reshape": [(f"def f({T}):\n    return x.view(2, -1)", "x.reshape(2, -1)")],
}  # fmt: skip
"""By rewriting: functions `f`, and what stands in them afterwards."""

KEPT = {
    "arguments_by_keyword": ["def f(g, x):\n    return g(x)", "@decorated\ndef g(a):\n    return a\ndef f(x):\n    return g(x)"],
    "contiguous_view_as_reshape": [f"def f({T}):\n    x = x.contiguous().view(2, 48)\n    x[0] = 0\n    return x"],
    "else_after_return": [f"def f({T}):\n    if x is None:\n        x = y\n    return x"],
    "early_return": [f"def f({T}):\n    if x is None:\n        x = y\n    else:\n        x = x * y\n    return x"],
    "flip_comparisons": [f"def f({T}):\n    return x is None or 0 < x.shape[0] < 3 or F.dropout(x) == F.dropout(y)"],
    "function_as_method": ["def f(values):\n    return torch.sum(values)"],
    "inline_temporaries": [
        f"def f({T}):\n    a = x.exp()\n    b = y.sin() * a\n    return b + b",
        f"def f({T}):\n    a = x.exp()\n    return y.sin() * a",
        f"def f({T}):\n    a = x.exp()\n    return y if y is None else a",
    ],
    "introduce_temporaries": [f"def f({T}):\n    return x if y is None else torch.exp(x).view(-1).sum()",
                              "def f(x):\n    return [g(h(i)) for i in x]"],
    "join_assignments": [f"def f({T}):\n    a = x.exp()\n    b = a.sin()\n    return b"],
    "method_as_function": ["def f(text):\n    return text.split('a')"],
    "none_as_unsqueeze": [f"def f({T}):\n    return x[0, :, None]", "def f(values):\n    return values[:, None]"],
    "operator_as_function": ["def f(n, m):\n    return n + m * 2"],
    "operator_as_method": ["def f(n, m):\n    return n + m * 2"],
    "power_as_operator": ["def f(n):\n    return pow(n, 2)"],
    "power_as_square": [f"def f({T}):\n    return x.pow(3) + 2**y.dim()"],
    "rename_attributes": [
        "class M(nn.Module):\n    def __init__(self, config):\n        self.size = config.size\n",
        "class M(nn.Module):\n    _tied = ['proj']\n    def __init__(self):\n        self.proj = nn.Identity()\n",
    ],
    "rename_locals": ["def f(x):\n    global total\n    total = x\n    return locals()"],
    "rename_parameters": [
        "def g(a):\n    return a\ndef f(x, /):\n    return x\nh = (g, f)\nk(a=1, x=2)",
        "class M(PreTrainedModel):\n    def forward(self, x):\n        return x",
    ],
    "reorder_statements": [
        f"def f({T}):\n    a = F.dropout(x)\n    b = F.dropout(y)\n    return a + b",
        f"def f({T}):\n    a = x.exp()\n    x = y.sin()\n    return a + x",
        f"def f({T}):\n    a = x.exp()\n    b = y.exp_()\n    return a + b",
    ],
    "reshape_as_view": [f"def f({T}):\n    a = x.reshape(2, -1)\n    a.zero_()\n    return x"],
    "return_by_negation": [f"def f({T}):\n    if x is None:\n        return y\n    return x"],
    "split_chains": [f"def f({T}):\n    return x.zero_().view(-1).exp_()", "def f(x):\n    return super().f(x)"],
    "split_tuples": ["def f(a, b):\n    a, b = b, a\n    return a, b", "def f(g):\n    a, b = g\n    return a, b"],
    "swap_branches": ["def f(a):\n    if a:\n        return 1\n    elif a is None:\n        return 2"],
    "swap_operands": [
        "def f(a, b):\n    return a + b",
        "def f(x):\n    return (1,) + x.shape",
        f"def f({T}):\n    return F.dropout(x) * F.dropout(y)",
    ],
    "transpose_as_permute": [f"def f({T}):\n    return x.transpose(1, 2)"],
    "unsqueeze_as_none": [f"def f({T}, dim):\n    return x.unsqueeze(dim)"],
    "view_as_reshape": [f"def f({T}):\n    return x.view(torch.int32)"],
}  # fmt: skip
"""By rewriting: what would mean something else afterwards, or may."""


def rewritings() -> list[str]:
    return list(all_rewritings())


@pytest.mark.parametrize("name", rewritings())
def test_changes_what_it_says_and_computes_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    for before, expected in CHANGED[name]:
        respelled = respell(HEADER + before + "\n", all_rewritings()[name])
        assert respelled.places > 0
        assert expected in respelled.text
        torch.manual_seed(0)
        arguments = torch.randn(2, 3, 4, 4), torch.randn(4)
        results = []
        for text in (HEADER + before, respelled.text):
            space: dict[str, object] = {"__name__": "respelled"}
            exec(compile(text, name, "exec", dont_inherit=True), space)
            results.append(space["f"](*(argument.clone() for argument in arguments)))  # type: ignore[operator]
        assert torch.equal(*results)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in KEPT.items() for text in texts])
def test_leaves_what_may_mean_something_else(name: str, text: str) -> None:
    respelled = respell(f"{HEADER}{text}\n", all_rewritings()[name])
    assert respelled.places == 0, respelled.text
    assert respelled.text == f"{HEADER}{text}\n"


@pytest.mark.parametrize("name", rewritings())
def test_a_whole_model_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, loss and gradients of a model with attention of its own, in fp64."""
    tolerances = pytest.importorskip("rewrite.verify.judging.tolerances")
    text = TINY.read_text()
    respelled = respell(text, all_rewritings()[name])
    if not respelled.places:
        pytest.skip("there is nothing in the model for this rewriting")
    assert difference(text, respelled.text, monkeypatch) <= tolerances.bound("fp64 max")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("residual + hidden_states", "torch.sub(residual, hidden_states)"), ("(-second, first)", "(first, -second)")],
)
def test_a_model_that_computes_something_else_is_caught(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerances = pytest.importorskip("rewrite.verify.judging.tolerances")
    text = TINY.read_text()
    assert right in text
    assert difference(text, text.replace(right, wrong), monkeypatch) > tolerances.bound("fp64 max")


def difference(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest difference of logits, loss and gradients, each relative to its largest value."""
    import torch

    results = []
    for version in (before, after):
        model = built(version, monkeypatch).double()
        ids = torch.arange(22).view(2, 11)
        output = model(ids, labels=ids)
        output.loss.backward()
        results.append([output.logits, output.loss, *(weight.grad for weight in model.parameters())])
    pairs = zip(*results, strict=True)
    return max(float((one - other).detach().abs().max() / one.detach().abs().max()) for one, other in pairs)


def built(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model of a text, with weights that depend on nothing but their order."""
    import torch

    module = ModuleType("respelled_tiny_llama")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, str(TINY), "exec", dont_inherit=True), module.__dict__)
    model = module.TinyLlamaForCausalLM(module.TinyLlamaConfig(attn_implementation="eager"))
    weights = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=weights) * 0.1)
    return model


def test_every_rewriting_has_cases() -> None:
    assert set(CHANGED) == set(all_rewritings())
    assert set(KEPT) <= set(all_rewritings())
