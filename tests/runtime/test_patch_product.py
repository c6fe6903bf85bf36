"""Patch embeddings as products: what a convolution gives, wherever that is what is computed."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.core import backend, output_layout
from hf_rewrite_runtime.linear import patch_product as operator
from hf_rewrite_runtime.linear.patch_product import multiplied, patch_product

KINDS = {
    "sound": (nn.Conv1d, (5,), (20,)),
    "image": (nn.Conv2d, (2, 4), (6, 12)),
    "one patch": (nn.Conv2d, (4, 4), (4, 4)),
    "film": (nn.Conv3d, (2, 3, 4), (2, 6, 4)),
    "pieces of a film": (nn.Conv3d, (2, 3, 4), (2, 3, 4)),
    "rows": (nn.Conv2d, (1, 4), (3, 8)),
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Let products run wherever they may, and keep the sizes of their inputs."""
    seen = list[torch.Size]()

    def counted(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(input.shape)
        return multiplied(input, weight, bias)

    monkeypatch.setattr(operator, "_pays", lambda *_: True)
    monkeypatch.setattr(operator, "multiplied", counted)
    backend.reset_fallbacks()
    return seen


def layer(kind: str, dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[nn.Module, Tensor]:
    cls, kernel, sizes = KINDS[kind]
    torch.manual_seed(0)
    module = cls(3, 7, kernel, stride=kernel, bias=bias).to(dtype).requires_grad_(False)  # type: ignore[arg-type]
    return module, torch.randn(2, 3, *sizes, dtype=dtype)


def reason() -> str:
    return next(reason for name, reason in backend.fallbacks() if name == "patch_product")


@pytest.mark.parametrize("free", [False, True], ids=["torch's layout", "free layout"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_convolution(kind: str, bias: bool, free: bool, products: list[torch.Size]) -> None:
    module, x = layer(kind, bias=bias)
    expected = module(x)
    with output_layout.free(free):
        found = patch_product(x, module)
    assert products == [x.shape]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert free or found.stride() == expected.stride()
    assert not free or found.flatten(2).transpose(1, 2).is_contiguous(), "what reads rows of patches would copy them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_is_as_exact(kind: str, dtype: torch.dtype, products: list[torch.Size]) -> None:
    module, x = layer(kind, dtype)
    exact = module.double()(x.double())
    assert_as_exact_as(module.to(dtype)(x), patch_product(x, module), exact, torch.finfo(dtype).eps)


def test_the_weight_is_read_where_it_is(products: list[torch.Size]) -> None:
    module, x = layer("image")
    before, keys = patch_product(x, module), [*module.state_dict()]
    module.weight.mul_(2)
    module.bias.mul_(2)
    torch.testing.assert_close(patch_product(x, module), 2 * before)
    assert [*module.state_dict()] == keys


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"padding": (1, 1)}, "not_patches"),
        ({"dilation": (2, 1)}, "not_patches"),
        ({"stride": (2, 2)}, "not_patches"),
        ({"padding": "same", "stride": (1, 1)}, "not_patches"),
    ],
)
def test_settings_changed_later(change: dict[str, object], why: str, products: list[torch.Size]) -> None:
    module, x = layer("image")
    patch_product(x, module)
    for name, value in change.items():
        setattr(module, name, value)
    module._reversed_padding_repeated_twice = [0, 0, 1, 1]  # type: ignore[assignment]
    assert torch.equal(patch_product(x, module), module(x))
    assert len(products) == 1
    assert reason() == why


def test_inputs_that_patches_do_not_cover(products: list[torch.Size]) -> None:
    module, x = layer("image")
    for other in (x[..., :11], x[0], x[:0], x.to(memory_format=torch.channels_last), x[:, :, ::2]):
        found, expected = patch_product(other, module), module(other)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    assert not products
    with pytest.raises(RuntimeError, match="channels"):
        patch_product(x[:, :2], module)


def test_groups_and_points(products: list[torch.Size]) -> None:
    for module in (nn.Conv2d(3, 6, 2, 2, groups=3), nn.Conv2d(3, 6, 1, 1), nn.ConvTranspose2d(3, 6, 2, 2)):
        module.requires_grad_(False)
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(patch_product(x, module), module(x))
    assert not products


def test_what_watches_is_called(products: list[torch.Size]) -> None:
    module, x = layer("image")
    handle = module.register_forward_hook(lambda *_: torch.zeros(1))
    assert patch_product(x, module).tolist() == [0.0]
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert patch_product(x.float(), module.float()).dtype == torch.bfloat16
    module.requires_grad_(True)
    assert patch_product(x.float(), module).requires_grad
    with backend.use_backend("reference"), torch.no_grad():
        patch_product(x.float(), module)
    assert not products
    assert {reason for _, reason in backend.fallbacks()} == {"observed", "autocast", "gradient", "reference"}


def test_a_compiler_sees_the_module(products: list[torch.Size]) -> None:
    module, x = layer("image", torch.float32)
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: patch_product(x, module), backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert any("conv2d" in str(node.target) for node in graphs[0].graph.nodes)
    assert not products


def test_where_it_pays() -> None:
    """On a CPU where nothing is copied for it, or in 16 bits."""
    whole, pieces = torch.empty(2, 3, 4, 4), torch.empty(2, 3, 8, 8)
    weight = torch.empty(5, 3, 4, 4)
    assert operator._pays(whole, weight)
    assert not operator._pays(pieces, weight)
    assert operator._pays(pieces.bfloat16(), weight.bfloat16())


class OnCard:
    """An input that says that it is on a card."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, dtype: torch.dtype, *shape: int):
        self.dtype, self.shape = dtype, torch.Size(shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


@pytest.mark.parametrize(
    ("kernel", "sizes", "pays"),
    [
        ((96, 2, 2), (56, 56), False),
        ((3, 4, 4), (224, 224), False),
        ((3, 4, 4), (4, 4), True),
        ((3, 14, 14), (224, 224), True),
        ((3, 16, 16), (224, 224), True),
        ((3, 2, 14, 14), (2, 14, 14), True),
    ],
    ids=["ConvNeXt", "Swin", "one patch", "CLIP", "ViT", "Qwen2-VL"],
)
def test_where_it_pays_on_a_gpu(
    kernel: tuple[int, ...], sizes: tuple[int, ...], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small kernels only in a captured forward, which needs no copy; none in fp32."""
    monkeypatch.setattr(backend, "uses_triton", lambda _: True)
    monkeypatch.setattr(backend, "named_none", lambda: True)
    weight = torch.empty(7, *kernel)
    x: object = OnCard(torch.bfloat16, 8, kernel[0], *sizes)
    assert operator._pays(x, weight) is pays  # type: ignore[arg-type]
    with output_layout.free():
        assert operator._pays(x, weight)  # type: ignore[arg-type]
        assert not operator._pays(OnCard(torch.float32, 8, kernel[0], *sizes), weight)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")
    for dtype in (torch.bfloat16, torch.float16):
        module, x = layer(kind, dtype)
        module, x = module.cuda(), x.cuda()
        backend.reset_fallbacks()
        with output_layout.free():  # kernels are small
            found, exact = patch_product(x, module), module.double()(x.double())
        assert not backend.fallbacks()
        assert_as_exact_as(module.to(dtype)(x), found, exact, torch.finfo(dtype).eps)
    module, x = layer(kind, torch.float32)
    patch_product(x.cuda(), module.cuda())
    assert reason() == "slower"
