"""Products in 8 bits by aiter: as its release wants them, where they are named, or not at all."""

from __future__ import annotations

from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import DTYPES, QUIET, reasons
from torch import Tensor, nn

from hf_rewrite_runtime.aiter import aiter_calls, aiter_fp8
from hf_rewrite_runtime.aiter import blockscale as aiter_blockscale
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device.e4m3 import Quantized, quantize
from hf_rewrite_runtime.fp8 import fp8_add_rms_norm as fp8_norm
from hf_rewrite_runtime.fp8.product import fp8_product
from hf_rewrite_runtime.linear.block_linear import BlockLinear

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine", "named")]

SIZE, COLUMNS = 192, 256


@pytest.fixture
def named(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(aiter_calls.NAMED, "gemm_a8w8,gemm_a8w8_blockscale,add_rmsnorm_quant")


def rows(*shape: int, dtype: torch.dtype = torch.float8_e4m3fnuz) -> Quantized:
    """Rows whose scales differ."""
    x = torch.randn(*shape) * 2.0 ** (torch.arange(shape[-2]) % 5 - 2.0)[:, None]
    return quantize(x.bfloat16(), dtype)


def multiplied(x: Quantized, weight: Quantized, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with backend.use_backend("aiter"):
        got = fp8_product(x, weight, bias, torch.bfloat16)
    with backend.use_backend("reference"):
        return got, fp8_product(x, weight, bias, torch.bfloat16)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_rows_and_weight_in_8_bits(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    weight, bias = rows(SIZE, COLUMNS), torch.randn(SIZE).bfloat16()
    for x, beside in ((rows(3, 5, COLUMNS), None), (rows(3, 5, COLUMNS), bias), (rows(7, COLUMNS), bias)):
        got, wanted = multiplied(x, weight, beside)
        assert got.shape == wanted.shape
        assert got.dtype == torch.bfloat16
        assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert fake_aiter.calls["gemm_a8w8_bpreshuffle"] == 2 + 3, "two proofs, three calls"
    assert fake_aiter.calls["shuffle_weight"] == 2 + 1, "two proofs, one weight"
    assert reasons("gemm_a8w8") == {}
    assert aiter_fp8.nbytes() >= SIZE * COLUMNS
    assert "weights in its order too" in aiter_fp8.describe_process()[0]


def test_a_copy_in_8_bits_follows_its_weight(install: fake_aiter.Install) -> None:
    """In the same memory, where graphs read it, and before they do."""
    install()
    x, weight, other = rows(5, COLUMNS), rows(SIZE, COLUMNS), rows(SIZE, COLUMNS)
    multiplied(x, weight)
    before = aiter_fp8._copies[weight.values].shuffled.data_ptr()
    for renew in (False, True):
        weight.values.copy_(other.values if renew else weight.values.flip(0))
        if renew:
            with backend.use_backend("aiter"):
                aiter_fp8.renew(weight.values)
            count = fake_aiter.calls["shuffle_weight"]
        got, wanted = multiplied(x, weight)
        assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert fake_aiter.calls["shuffle_weight"] == count
    assert aiter_fp8._copies[weight.values].shuffled.data_ptr() == before


@pytest.mark.parametrize("fault", ["scales swapped", "unshuffled", "one scale", "raises"])
def test_8_bits_that_aiter_gets_wrong(install: fake_aiter.Install, fault: str) -> None:
    def body(release: Any, x_scale: Tensor, w_scale: Tensor, WQ: Tensor, **others: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("This GEMM is not supported!")
        if fault == "unshuffled":
            WQ = WQ.view(torch.uint8).roll(16, 1).view(WQ.dtype)
            WQ.is_shuffled = True  # type: ignore[attr-defined]
        if fault == "scales swapped":
            x_scale, w_scale = w_scale[: len(x_scale)].contiguous(), x_scale[torch.arange(len(w_scale)) % len(x_scale)]
        if fault == "one scale":
            w_scale = w_scale[:1].expand_as(w_scale).contiguous()
        body = fake_aiter.BODIES["gemm_a8w8_bpreshuffle"]
        found: Tensor = body(release, x_scale=x_scale, w_scale=w_scale, WQ=WQ, **others)
        return found

    install(gemm_a8w8_bpreshuffle=body)
    x, weight = rows(5, COLUMNS), rows(SIZE, COLUMNS)
    for _ in range(2):
        assert torch.equal(*multiplied(x, weight))
    assert reasons("gemm_a8w8") == {"raised" if fault == "raises" else "differs": 2}


def test_gates_of_8_bits(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    fn = torch.float8_e4m3fn
    cases = {
        "dtype": (rows(5, COLUMNS, dtype=fn), rows(SIZE, COLUMNS, dtype=fn)),
        "layout": (rows(5, COLUMNS), rows(SIZE - 8, COLUMNS)), "empty": (rows(0, COLUMNS), rows(SIZE, COLUMNS)),
    }  # fmt: skip
    for given in cases.values():
        assert torch.equal(*multiplied(*given))
    assert reasons("gemm_a8w8") == dict.fromkeys(cases, 1)
    machine.delenv(aiter_calls.NAMED)
    assert torch.equal(*multiplied(rows(5, COLUMNS), rows(SIZE, COLUMNS)))
    machine.setenv(aiter_calls.NAMED, "rms_norm")
    with backend.use_backend("aiter"), pytest.raises(ValueError, match="REWRITE_AITER_ON names 'rms_norm'"):
        fp8_product(rows(5, COLUMNS), rows(SIZE, COLUMNS), None, torch.bfloat16)
    assert not fake_aiter.calls


class Scaled(nn.Module):
    """A block-scaled weight, with every code that is a number: negative zeros too."""

    def __init__(self, size: int = 256, columns: int = COLUMNS):
        super().__init__()
        codes = torch.randint(0, 256, (size, columns), dtype=torch.uint8)
        codes = torch.where(codes & 0x7F == 0x7F, 0x80, codes)
        self.weight = nn.Parameter(codes.view(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(size // 128, columns // 128) / 64, requires_grad=False)

    def by_aiter(self, x: Tensor, bias: Tensor | None = None, block: int = 128) -> Tensor | None:
        with backend.use_backend("aiter"):
            found: Tensor | None = aiter_blockscale.product(x, self.weight, self.scale, (block, block), bias)
            return found

    def wide(self) -> Tensor:
        return self.weight.float() * self.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def rounded(x: Tensor) -> Tensor:
    """What a checkpoint's own kernels make of an input: 8 bits, a scale for 128 columns."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 240
    return ((groups / scale).to(torch.float8_e4m3fnuz).float() * scale).flatten(-2)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_blocks(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    layer, bias = Scaled(), torch.randn(256)
    for dtype in DTYPES:
        x = torch.randn(2, 9, COLUMNS, dtype=dtype)
        for beside in (None, bias, bias):
            got = layer.by_aiter(x, beside)
            wanted = rounded(x) @ layer.wide().t() + (0 if beside is None else beside.to(dtype))
            assert got is not None
            assert got.dtype == dtype
            assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert fake_aiter.calls["gemm_a8w8_blockscale"] == 2 * (1 + 3)
    assert fake_aiter.calls["per_group_quant_hip"] == 2 * (1 + 1), "one for each proof, and one an input"
    assert reasons("gemm_a8w8_blockscale") == {}
    assert "block-scaled weights in e4m3fnuz too" in aiter_blockscale.describe_process()[0]


def test_a_copy_of_blocks_follows_its_weight(install: fake_aiter.Install) -> None:
    install()
    layer, x = Scaled(), torch.randn(40, COLUMNS).bfloat16()
    layer.by_aiter(x)
    before = aiter_blockscale._weights[layer.weight].values.data_ptr()
    layer.weight.copy_(Scaled().weight)
    layer.scale.mul_(3)
    got, wanted = layer.by_aiter(x), rounded(x) @ layer.wide().t()
    assert got is not None
    assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert aiter_blockscale._weights[layer.weight].values.data_ptr() == before
    x.mul_(-2)
    assert torch.equal(layer.by_aiter(x), -2 * got), "an input that is written to is rounded anew"


@pytest.mark.parametrize("fault", ["scales transposed", "bits of e4m3fn", "coarse", "columns for rows"])
def test_blocks_that_aiter_gets_wrong(install: fake_aiter.Install, machine: pytest.MonkeyPatch, fault: str) -> None:
    def body(release: Any, x_scale: Tensor, w_scale: Tensor, **others: Any) -> Tensor:
        if fault == "scales transposed":
            w_scale = w_scale.t().contiguous()
        if fault == "columns for rows":
            x_scale = x_scale.t().contiguous().view(x_scale.shape)
        found: Tensor = fake_aiter.BODIES["gemm_a8w8_blockscale"](release, x_scale=x_scale, w_scale=w_scale, **others)
        return found

    def coarse(release: Any, **given: Any) -> Any:
        values, scale = fake_aiter.BODIES["per_group_quant_hip"](release, **given)
        return (values.float() / 16).round().mul(16).clamp(-240, 240).to(values.dtype), scale

    install(gemm_a8w8_blockscale=body, **({"per_group_quant_hip": coarse} if fault == "coarse" else {}))
    if fault == "bits of e4m3fn":
        machine.setattr(aiter_blockscale, "as_fnuz", lambda values: values.view(torch.float8_e4m3fnuz))
    assert Scaled().by_aiter(torch.randn(40, COLUMNS).bfloat16()) is None
    assert reasons("gemm_a8w8_blockscale") == {"differs": 1}


def test_gates_of_blocks(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    layer, x = Scaled(), torch.randn(40, COLUMNS).bfloat16()
    assert layer.by_aiter(x.float()) is None
    assert layer.by_aiter(x[:0]) is None
    assert layer.by_aiter(x, block=64) is None
    assert layer.by_aiter(x[:, :128]) is None
    assert reasons("gemm_a8w8_blockscale") == {"dtype": 1, "empty": 1, "layout": 2}
    machine.delenv(aiter_calls.NAMED)
    assert layer.by_aiter(x) is None
    assert not fake_aiter.calls


class FP8Linear(nn.Linear):
    """What transformers puts in the place of a quantised layer: `BlockLinear.adopt` knows it by its name."""

    block_size = (128, 128)

    def __init__(self, scaled: Scaled):
        super().__init__(COLUMNS, 256)
        self.weight, self.weight_scale_inv = scaled.weight, scaled.scale


def test_layers_of_published_checkpoints(install: fake_aiter.Install) -> None:
    """Many rows go to aiter, and those of a step do not."""
    install()
    scaled = Scaled()
    layer = nn.Sequential(FP8Linear(scaled)).requires_grad_(False)
    BlockLinear.adopt(layer)
    many, few = torch.randn(2, 20, COLUMNS).bfloat16(), torch.randn(2, 1, COLUMNS).bfloat16()
    with backend.use_backend("aiter"):
        got, step = layer(many), layer(few)
    with backend.use_backend("reference"):
        wanted, step_wanted = layer(many), layer(few)
    assert torch.equal(step, step_wanted)
    by_definition = rounded(many) @ scaled.wide().t() + layer[0].bias
    assert (got - by_definition).abs().max() <= 0.01 * by_definition.abs().max()
    assert not torch.equal(got, wanted), "the input was rounded"
    assert (got - wanted).abs().max() <= 0.1 * wanted.abs().max()
    assert fake_aiter.calls["gemm_a8w8_blockscale"] == 2


def normed(x: Tensor, residual: Tensor, weight: Tensor, *form: Any) -> list[tuple[Tensor, ...]]:
    given = (x, residual, weight, 1e-6, *(form or (0.0, False)))
    with backend.use_backend("aiter"):
        got = fp8_norm._op(*given)
    with backend.use_backend("reference"):
        return [got, fp8_norm._op(*given)]


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_norms_and_rows_in_8_bits(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for dtype in DTYPES:
        x, residual = (
            torch.randn(2, 3, 20, 64, dtype=dtype)[..., ::1],
            torch.randn(2, 3, 20, 96, dtype=dtype)[..., :64],
        )
        weight = torch.rand(64).to(dtype) + 0.5
        for _ in range(2):
            got, wanted = normed(x, residual[..., :64], weight)
        assert torch.equal(got[1], wanted[1])
        assert (got[0] != wanted[0]).double().mean() <= 0.01
        assert (got[2].float() * got[3][..., None] - got[0].float()).abs().max() <= 0.04 * got[0].abs().max()
        assert got[2].dtype == torch.float8_e4m3fnuz
        assert [each.shape for each in got] == [each.shape for each in wanted]
    assert fake_aiter.calls["rmsnorm2d_fwd_with_add_smoothquant"] == 2 * (1 + 2)
    assert reasons("add_rmsnorm_quant") == {}


@pytest.mark.parametrize("fault", ["mode 0", "scale of the sum", "a scale for all", "smooth"])
def test_norms_in_8_bits_that_aiter_gets_wrong(install: fake_aiter.Install, fault: str) -> None:
    def body(release: Any, **given: Any) -> None:
        if fault == "smooth":
            given["xscale"] = given["xscale"] * torch.linspace(0.5, 1, given["xscale"].shape[0])
        fake_aiter.BODIES["rmsnorm2d_fwd_with_add_smoothquant"](release, **given)
        x = given["residual_out"].float()
        if fault == "mode 0":
            scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + given["epsilon"])
            given["out_before_quant"].copy_(scaled * given["weight"].float())
        if fault == "scale of the sum":
            given["yscale"].copy_(x.abs().amax(-1, keepdim=True) / 240)
        if fault == "a scale for all":
            given["yscale"].fill_(given["yscale"].max().item())

    install(rmsnorm2d_fwd_with_add_smoothquant=body)
    x, residual, weight = torch.randn(40, 64).bfloat16(), torch.randn(40, 64).bfloat16(), torch.rand(64).bfloat16()
    got, wanted = normed(x, residual, weight)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))
    assert reasons("add_rmsnorm_quant") == {"differs": 1}


def test_gates_of_norms_in_8_bits(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    x, weight = torch.randn(40, 64).bfloat16(), torch.rand(64).bfloat16()
    cases: dict[str, list[tuple[Any, ...]]] = {
        "no_equal_mode": [(x, x, weight, 1.0, True), (x, x, weight, 0.0, True)],
        "dtype": [(x.float(), x.float(), weight.float()), (x, x, weight.float()), (x, x.half(), weight)],
        "weight": [(x, x, weight[:1])], "empty": [(x[:0], x[:0], weight)],
        "hidden_size": [(x[:, :60], x[:, :60], weight[:60])], "layout": [(x, x[:1], weight)],
    }  # fmt: skip
    for given in (given for many in cases.values() for given in many if given[2].numel() > 1):
        normed(*given)
    assert reasons("add_rmsnorm_quant") == {name: len(many) for name, many in cases.items() if name != "weight"}
    machine.delenv(aiter_calls.NAMED)
    normed(x, x, weight)
    assert not fake_aiter.calls
