"""Mixtures of experts by aiter: as its release wants them, for shapes that are tuned, or not at all."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import DTYPES, QUIET, reasons
from torch import Tensor, nn

from hf_rewrite_runtime.aiter import aiter_calls, aiter_experts
from hf_rewrite_runtime.core import aiter_probe, backend
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.linear import preshuffle
from hf_rewrite_runtime.moe import experts as experts_file
from hf_rewrite_runtime.moe import router as router_file
from hf_rewrite_runtime.moe.form import ExpertsForm, Gating
from hf_rewrite_runtime.moe.selection import RoutingRule

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine")]

EXPERTS, TOP_K, SIZE, INNER = 4, 2, 128, 256
COLUMNS = "cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_type,use_g1u1,doweight_stage1"
FORM = ExpertsForm(nn.SiLU())


@pytest.fixture
def table(tmp_path: Path, machine: pytest.MonkeyPatch) -> Path:
    """Every power of two of tokens, in two files, beside rows that are about something else."""
    row = f"304,{{}},{SIZE},{INNER},{EXPERTS},{TOP_K},ActivationType.{{}},{{}},QuantType.{{}},1,0"
    rows = [row.format(2**power, "Silu", dtype, "No") for power in range(12) for dtype in DTYPES]
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    paths[0].write_text("\n".join((COLUMNS, *rows[:8], row.format(4096, "Gelu", DTYPES[0], "No"))))
    paths[1].write_text("\n".join((COLUMNS, *rows[8:], row.format(4096, "Silu", DTYPES[0], "per_Token"))))
    machine.setenv(aiter_experts.TABLE, ":".join(map(str, paths)))
    machine.setattr(launch, "processors", lambda device: 304)
    return paths[0]


class Mixture(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = SIZE):
        super().__init__()
        weights = torch.randn(EXPERTS, 2 * INNER, size) / 16, torch.randn(EXPERTS, size, INNER) / 16
        self.gate_up_proj, self.down_proj = (nn.Parameter(w.to(dtype), requires_grad=False) for w in weights)
        self.act_fn = nn.SiLU()

    def forward(self, *arguments: Any) -> Tensor:
        raise AssertionError("the modules' own way")


def given(tokens: int, dtype: torch.dtype = torch.bfloat16, size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    return torch.randn(tokens, size, dtype=dtype), index, torch.rand(tokens, TOP_K, dtype=dtype)


PLAIN = Gating()


def computed(
    layer: Mixture, x: Tensor, index: Tensor, weights: Tensor, how: Gating = PLAIN, backend_name: str = "aiter",
    residual: Tensor | None = None, biases: tuple[Tensor, ...] = (),
) -> Tensor:  # fmt: skip
    """What the operator gives, for any number of tokens."""
    with backend.use_backend(backend_name):
        both = layer.gate_up_proj, layer.down_proj
        output: Tensor = experts_file._op(x, index, weights, *both, residual, *how, *biases)
        return output


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_experts(install: fake_aiter.Install, table: Path, tag: str) -> None:
    install(tag)
    for dtype, tokens in itertools.product(DTYPES, (1, 5)):
        layer, (x, index, weights) = Mixture(dtype), given(tokens, dtype)
        residual, how = torch.randn_like(x), Gating(scaling=0.5)
        for _ in range(2):
            got = computed(layer, x, index, weights, how, residual=residual)
        wanted = computed(layer, x, index, weights, how, residual=residual, backend_name="reference")
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert fake_aiter.calls["fused_moe"] == 4 * 3, "one proof, two calls"
    assert fake_aiter.calls["shuffle_weight"] == 4 * 2, "one copy a weight"
    assert reasons("fused_moe") == {}


def test_many_tokens(install: fake_aiter.Install, table: Path) -> None:
    install()
    layer, (x, index, weights) = Mixture(), given(experts_file.MAX_TOKENS + 1)
    with backend.use_backend("aiter"):
        got = experts_file.fused_experts(x[None], layer, index, weights, residual=x[None])
    wanted = computed(layer, x, index, weights, residual=x, backend_name="reference")
    assert got.shape == x[None].shape
    assert (got[0] - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_a_copy_follows_its_weight(install: fake_aiter.Install, table: Path) -> None:
    install()
    layer, (x, index, weights) = Mixture(), given(2)
    computed(layer, x, index, weights)
    layer.down_proj.mul_(2.0)
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.flip(0), requires_grad=False)
    wanted = computed(layer, x, index, weights, backend_name="reference")
    assert (computed(layer, x, index, weights) - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert reasons("fused_moe") == {}


def test_shapes_that_no_table_has(install: fake_aiter.Install, table: Path, machine: pytest.MonkeyPatch) -> None:
    """A fault on the GPU could not be caught, so nothing is tried."""
    install()
    layer, narrow = Mixture(), Mixture(size=64)
    for case in ((layer, *given(2049)), (layer, given(2)[0], *(part[:, :1] for part in given(2)[1:]))):
        with backend.use_backend("aiter"):
            assert aiter_experts.fused_experts(*case[1:], (layer.gate_up_proj, layer.down_proj), no_copies) is None
    machine.setenv(aiter_experts.TABLE, str(table))  # half of it: 16 tokens are not there, by which old ones look 4 up
    assert len(aiter_experts.tuned(str(table))) == 8
    computed(layer, *given(4))
    machine.setenv(aiter_experts.TABLE, str(table.with_name("missing.csv")))
    computed(layer, *given(4))
    machine.delenv(aiter_experts.TABLE)
    computed(layer, *given(4))
    assert reasons("fused_moe") == {"untuned_experts": 5}
    computed(narrow, *given(4, size=64))
    assert reasons("fused_moe")["layout"] == 1
    assert not fake_aiter.calls


@pytest.mark.parametrize(
    ("column", "value", "runs"),
    [
        ("gfx", "gfx942", True), ("gfx", "", True), ("gfx", "gfx950", False),
        ("cu_num", "80", False), ("cu_num", "256", False), ("_tag", "flydsl_fallback", False), ("_tag", "", True),
    ],
)  # fmt: skip
def test_rows_of_another_card(
    install: fake_aiter.Install, table: Path, machine: pytest.MonkeyPatch, column: str, value: str, runs: bool
) -> None:
    """aiter would not find them, and take a form that nobody tuned."""
    install()
    with table.open(newline="") as file:
        rows = [{**row, column: value} for row in csv.DictReader(file)]
    with (path := table.with_name("other.csv")).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    machine.setenv(aiter_experts.TABLE, f"{path}:{table.with_name('b.csv')}")
    computed(Mixture(), *given(1))
    assert reasons("fused_moe") == ({} if runs else {"untuned_experts": 1})


def no_copies(weight: Tensor) -> None:
    raise AssertionError("a copy takes the experts' memory once more")


def test_gates_of_experts(install: fake_aiter.Install, table: Path) -> None:
    install()
    layer, (x, index, weights) = Mixture(), given(2)
    for how in (Gating("gelu"), Gating(limit=7.0), Gating("swish", 1.7), Gating(shift=1.0)):
        got = computed(layer, x, index, weights, how)
        assert torch.equal(got, computed(layer, x, index, weights, how, backend_name="reference"))
    biases = torch.zeros(EXPERTS, 2 * INNER).bfloat16(), torch.zeros(EXPERTS, SIZE).bfloat16()
    computed(layer, x, index, weights, biases=biases)
    assert reasons("fused_moe") == {"form": 5}
    computed(Mixture(torch.float32), x.float(), index, weights.float())
    computed(layer, x[:0], index[:0], weights[:0])
    strided = nn.Parameter(layer.down_proj.mT.contiguous().mT, requires_grad=False)
    layer.down_proj = strided
    computed(layer, x, index, weights)
    assert reasons("fused_moe") == {"form": 5, "dtype": 1, "empty": 1, "layout": 1}
    with backend.use_backend("aiter"):
        plain = Mixture().gate_up_proj.data, Mixture().down_proj.data  # as of a rank: nothing that a copy is kept by
        assert aiter_experts.fused_experts(x, index, weights, plain, preshuffle_of) is None
    assert reasons("fused_moe")["no_copy"] == 1
    assert not fake_aiter.calls
    with backend.use_backend("auto"):
        assert aiter_experts.fused_experts(x, index, weights, plain, no_copies) is None, "only by name"


def preshuffle_of(weight: Tensor) -> Tensor | None:
    return preshuffle.copy_of(weight, no_copies)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["order", "missing", "raises"])
def test_experts_that_aiter_gets_wrong(install: fake_aiter.Install, table: Path, fault: str) -> None:
    def unordered(release: Any, x: Tensor, layout: Any, **others: Any) -> Tensor:
        copy = x.clone()
        copy.is_shuffled = True  # type: ignore[attr-defined]
        return copy

    def raises(release: Any, **others: Any) -> Tensor:
        raise RuntimeError("no such variant")

    bodies = {"order": {"shuffle_weight": unordered}, "raises": {"fused_moe": raises}, "missing": {}}[fault]
    release = install(**bodies)
    if fault == "missing":
        release.functions = lambda module: {}  # type: ignore[method-assign]
    layer, (x, index, weights) = Mixture(), given(2)
    for _ in range(2):
        got = computed(layer, x, index, weights)
    assert torch.equal(got, computed(layer, x, index, weights, backend_name="reference"))
    assert reasons("fused_moe") == {{"order": "differs", "raises": "raised", "missing": "missing"}[fault]: 2}


def routed(logits: Tensor, tokens: int, **options: Any) -> tuple[Tensor, Tensor]:
    """What the router gives whose weight makes these logits."""
    rule = RoutingRule(logits, options.pop("top_k", 3), **options)
    _, weights, index = router_file._op(torch.eye(logits.shape[1])[:tokens], None, 0.0, 0.0, False, False, *rule)
    return weights, index


RULES: list[dict[str, Any]] = [
    {}, {"normalize": False}, {"scaling": 2.5}, {"weights_in_fp32": True}, {"top_k": 1}, {"logits_in_fp32": True},
]  # fmt: skip


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_selection(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for experts, options in itertools.product((8, 60), RULES):
        logits = torch.randn(experts, 16)
        with backend.use_backend("aiter"):
            got = routed(logits, 5, **options)
        with backend.use_backend("reference"):
            wanted = routed(logits, 5, **options)
        assert torch.equal(got[1], wanted[1])
        assert got[1].dtype == torch.int64
        torch.testing.assert_close(got[0], wanted[0])
    assert fake_aiter.calls["topk_softmax"] == 2 * (len(RULES) + 3), "one proof for each of three variants"
    assert reasons("topk_softmax") == {}


BIASED: list[dict[str, Any]] = [
    {"num_group": 4, "topk_group": 2}, {"num_group": 1}, {"num_group": 8, "topk_group": 4, "eps": 1e-20, "top_k": 6},
    {"num_group": 2, "normalize": False, "scaling": 2.5, "weights_in_fp32": True},
]  # fmt: skip


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_biased_selection(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for options, sign in itertools.product(BIASED, (1.0, -1.0)):
        rule = {"scores": "sigmoid", "correction_bias": sign * torch.rand(32), **options}
        logits = torch.randn(32, 16)
        with backend.use_backend("aiter"):
            weights, index = routed(logits, 5, **rule)
        with backend.use_backend("reference"):
            wanted, chosen = routed(logits, 5, **rule)
        assert torch.equal(index.flip(-1), chosen)
        torch.testing.assert_close(weights.flip(-1), wanted)
    assert fake_aiter.calls["biased_grouped_topk"] == 3 * len(BIASED), "one proof, two calls"
    assert reasons("biased_grouped_topk") == {}


def test_gates_of_biased_selection(install: fake_aiter.Install) -> None:
    install()
    logits, bias = torch.randn(32, 16), torch.rand(33)
    grouped = {"scores": "sigmoid", "correction_bias": bias[:32], "num_group": 4, "topk_group": 2}
    odd: dict[str, list[dict[str, Any]]] = {
        "rule": [{"left_out": 0.0}, {"group_best": 1}, {"eps": 1e-3}, {"least_sum": 1e-3}],
        "dtype": [{"correction_bias": bias[:32].double()}],
        "layout": [{"correction_bias": bias[1:]}],
        "groups": [{"num_group": 16, "topk_group": 8}],
    }
    for changes in itertools.chain(*odd.values()):
        with backend.use_backend("aiter"):
            got = routed(logits, 5, **grouped | changes)
        with backend.use_backend("reference"):
            assert all(map(torch.equal, got, routed(logits, 5, **grouped | changes)))
    assert reasons("biased_grouped_topk") == {reason: len(changes) for reason, changes in odd.items()}
    assert not fake_aiter.calls


def test_a_biased_selection_that_aiter_gets_wrong(install: fake_aiter.Install) -> None:
    def unbiased(release: Any, correction_bias: Tensor, **others: Any) -> None:
        fake_aiter.BODIES["biased_grouped_topk"](release, correction_bias=torch.zeros(32), **others)

    install(biased_grouped_topk=unbiased)
    rule = {"scores": "sigmoid", "correction_bias": torch.rand(32)}
    logits = torch.randn(32, 16)
    with backend.use_backend("aiter"):
        got = routed(logits, 5, **rule)
    with backend.use_backend("reference"):
        assert all(map(torch.equal, got, routed(logits, 5, **rule)))
    assert reasons("biased_grouped_topk") == {"differs": 1}


@pytest.mark.parametrize("fault", ["order", "range", "twice", "sum", "raises"])
def test_a_selection_that_aiter_gets_wrong(install: fake_aiter.Install, fault: str) -> None:
    def body(release: Any, topk_weights: Tensor, topk_indices: Tensor, **others: Any) -> None:
        given = others | {"need_renorm": False} if fault == "sum" else others
        fake_aiter.BODIES["topk_softmax"](release, topk_weights=topk_weights, topk_indices=topk_indices, **given)
        if fault == "raises":
            raise RuntimeError
        changed = {"order": topk_indices.flip(-1), "range": topk_indices + 8, "twice": topk_indices[:, :1]}.get(fault)
        if changed is not None:
            topk_indices.copy_(changed)

    install(topk_softmax=body)
    logits = torch.randn(8, 16)
    for _ in range(2):
        with backend.use_backend("aiter"):
            got = routed(logits, 5)
        with backend.use_backend("reference"):
            assert all(map(torch.equal, got, routed(logits, 5)))
    assert reasons("topk_softmax") == {"raised" if fault == "raises" else "differs": 2}


def test_gates_of_selection(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    logits = torch.randn(8, 16)
    odd: list[dict[str, Any]] = [
        {"scores": "sigmoid"}, {"eps": 1e-20}, {"least_sum": 1e-3}, {"num_group": 2, "topk_group": 1},
    ]  # fmt: skip
    with backend.use_backend("aiter"):
        for options in odd:
            routed(logits, 5, **options)
        assert reasons("topk_softmax") == {"rule": 4}
        routed(logits, 0)
        routed(torch.randn(1025, 16), 2)
        machine.setenv(aiter_calls.SWITCH, "topk_softmax")
        routed(logits, 5)
    machine.delenv(aiter_calls.SWITCH)
    with backend.use_backend("auto"):
        routed(logits, 5)
    machine.setattr(aiter_probe, "chip", lambda device=None: "gfx1100")
    with backend.use_backend("aiter"):
        routed(logits, 5)
    assert reasons("topk_softmax") == {"rule": 4, "empty": 1, "layout": 1, "chip": 1}
    assert not fake_aiter.calls
