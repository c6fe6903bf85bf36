"""Packing keeps what a checkpoint, an optimiser, an adapter and a hook see."""

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.linear import joined_storage, packing
from hf_rewrite_runtime.linear.packed_gemv import packed_step
from hf_rewrite_runtime.linear.packing import packed_linear


class Attention(nn.Module):
    def __init__(self, biases=(False, False, False), dtype=torch.float32):
        super().__init__()
        sizes = (48, 16, 16)
        for name, size, bias in zip("qkv", sizes, biases, strict=True):
            setattr(self, name, nn.Linear(32, size, bias=bias, dtype=dtype))

    def forward(self, x):
        return torch.cat(packed_linear(x, self.q, self.k, self.v), -1)

    def original(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


@pytest.fixture(autouse=True)
def _fresh_counts():
    backend.reset_fallbacks()


def packed(module):
    """Whether the weights lie one behind the other, each with a storage of its own."""
    weights = [getattr(module, name).weight for name in "qkv"]
    own = all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    return joined_storage.joined(weights) is not None and own


def run(module, x):
    with torch.no_grad():
        return module(x), module.original(x)


def check(module, x, equal=torch.testing.assert_close, **tolerances):
    """Compare packed outputs with those of the projections."""
    ours, original = run(module, x)
    assert equal(ours, original, **tolerances) in (None, True)


@pytest.fixture
def module():
    return Attention()


@pytest.fixture
def x():
    return torch.randn(3, 32)


@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3, (True, False, True), (False, True, False)])
@pytest.mark.parametrize("shape", [(2, 5, 32), (1, 32), (0, 32), (32,)])
def test_equals_the_projections_in_fp64(biases, shape):
    module = Attention(biases, torch.float64)
    ours, original = run(module, torch.randn(shape, dtype=torch.float64))
    assert packed(module)
    torch.testing.assert_close(ours, original, rtol=1e-12, atol=1e-12)


def test_state_dict_is_the_originals_and_shares_no_growth():
    module = Attention((True, True, True))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run(module, torch.randn(3, 32))
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in after.values()}
    assert sum(storages.values()) == sum(t.numel() * t.element_size() for t in before.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.k.weight.data.mul_(2),
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: setattr(m.k, "weight", nn.Parameter(torch.randn(16, 32))),
        lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
        lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True),
        lambda m: setattr(m.q.weight, "data", torch.randn(48, 32)),
    ],
)
def test_packs_again_after_the_weights_were_written_or_replaced(change, module, x):
    parameters = [*map(id, module.parameters())]  # not themselves: who holds one keeps its memory
    run(module, x)
    assert [*map(id, module.parameters())] == parameters
    change(module)
    check(module, x)
    assert packed(module)


def test_copies_and_pickles_are_independent(module, x):
    run(module, x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            other.q.weight.zero_()
        check(other, x)
    assert module.q.weight.abs().sum() > 0


def test_gradients_are_the_originals_and_counted(x):
    module, twin = Attention((True,) * 3), Attention((True,) * 3)
    twin.load_state_dict(module.state_dict())
    run(module, x)
    module(x).square().sum().backward()
    twin.original(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert backend.fallbacks() == {("packed_linear", "gradient"): 1}
    assert backend.last_reasons(module) == {"q": "packed_linear: gradient"}


def test_safetensors_saves_packed_weights_as_separate_tensors(tmp_path):
    from safetensors.torch import load_file, save_file

    module = Attention((True,) * 3)
    run(module, torch.randn(3, 32))
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in loaded.items())


def test_threads_that_make_the_first_call_together_agree(x):
    modules = [Attention() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = [list(pool.map(lambda module: run(module, x), [module] * 8)) for module in modules]
    assert all(torch.equal(ours, results[i][0][0]) for i in range(8) for ours, _ in results[i])
    assert all(packed(module) for module in modules)


class Adapter(nn.Module):
    """Stands for an adapter library's layer around a projection."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.weight = base.weight
        self.bias = base.bias

    def forward(self, x):
        return self.base(x) + 1


def add_hook(module):
    module.k.register_forward_hook(lambda *_: None)


def wrap_forward(module):
    forward = module.k.forward
    module.k.forward = lambda x: forward(x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_hook, "observed"),
        (wrap_forward, "observed"),
        (lambda m: setattr(m, "k", Adapter(m.k)), "not_linear"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.k), "not_linear"),
        (lambda m: m.k.to(torch.float64) and m, "different_weights"),
        (lambda m: setattr(m.k.weight, "data", torch.randn(99, 32)[7:23]), "shared_storage"),
        (lambda m: m.share_memory(), "shared_storage"),
    ],
)
def test_calls_the_modules_where_packing_is_not_safe(change, reason, module, x):
    change(module)
    if reason == "different_weights":
        with pytest.raises(RuntimeError, match="dtype"):
            run(module, x)
    else:
        check(module, x, torch.equal)
    assert backend.fallbacks() == {("packed_linear", reason): 1}
    assert not packed(module)


def test_autocast_takes_the_modules(module, x):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert module(x).dtype == torch.bfloat16
    assert backend.fallbacks() == {("packed_linear", "autocast"): 1}


def test_a_hook_that_is_removed_lets_packing_return(module, x):
    seen = []
    handle = module.k.register_forward_hook(lambda *_: seen.append(1))
    run(module, x)
    assert len(seen) == 2
    handle.remove()
    run(module, x)
    assert packed(module)


def test_under_inference_mode_the_weights_can_still_be_trained(module, x):
    with torch.inference_mode():
        module(x)
    assert packed(module)
    module(x).sum().backward()
    assert module.q.weight.grad is not None


@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3, (True, False, True)])
@pytest.mark.parametrize("packed_before", [False, True])
@pytest.mark.parametrize("named", ["auto", "triton"])
def test_compiles_without_a_graph_break(biases, packed_before, named):
    """A compiler is given the modules, unless a backend was named: then it sees one operator, which packs."""
    torch.compiler.reset()
    module = Attention(biases, torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64)
    if packed_before:
        run(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), backend.use_backend(named):
        torch.testing.assert_close(compiled(x), module.original(x), rtol=1e-12, atol=1e-12)
    assert packed(module) == (packed_before or named == "triton")


def test_compiled_model_sees_weights_that_were_replaced_afterwards(module, x):
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        module.k.weight.data = torch.randn(16, 32)
        torch.testing.assert_close(compiled(x), module.original(x))


def test_outputs_are_views_that_reshape_like_the_originals(module):
    with torch.no_grad():
        q, k, v = packed_linear(torch.randn(2, 5, 32), module.q, module.k, module.v)
    assert q.view(2, 5, -1, 16).transpose(1, 2).shape == (2, 3, 5, 16)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


class Shared(nn.Module):
    """Two layers with one weight for their queries, as a model with tied layers has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.second.q.weight = self.first.q.weight


def test_a_weight_that_another_group_has_packed_stays_there(x):
    model = Shared()
    for layer in (model.first, model.second, model.first, model.second):
        ours, original = run(layer, x)
        assert torch.equal(ours, original) or torch.allclose(ours, original, atol=1e-6)
    assert packed(model.first)
    assert not packed(model.second)
    assert backend.fallbacks() == {("packed_linear", "shared_weight"): 2}


def test_layers_that_share_a_weight_do_not_move_it_while_the_other_computes(monkeypatch, x):
    """One layer is held between packing and its product; the other runs meanwhile."""
    model = Shared()
    wanted = [layer.original(x).detach() for layer in (model.first, model.second)]
    inside, done = threading.Event(), threading.Event()
    multiplied = packing.multiplied

    def held(input, weight, bias):
        if not inside.is_set():
            inside.set()
            assert done.wait(10)
        return F.linear(input, weight, bias)

    def holding(input, projections, multiply, operator):
        return multiplied(input, projections, held, operator)

    monkeypatch.setattr(packing, "multiplied", holding)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, model.first, x)
        assert inside.wait(10)
        second, _ = run(model.second, x)
        done.set()
    torch.testing.assert_close(first.result()[0], wanted[0])
    torch.testing.assert_close(second, wanted[1])


def test_layers_that_share_a_weight_agree_under_threads(x):
    for _ in range(20):
        model = Shared()
        layers = [model.first, model.second] * 2
        wanted = [layer.original(x).detach() for layer in layers]
        start = threading.Barrier(4)

        def forward(layer, start=start):
            start.wait()
            with torch.no_grad():
                return [layer(x) for _ in range(5)]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(forward, layers))
        for outputs, expected in zip(results, wanted, strict=True):
            for output in outputs:
                torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("twice", ["one module", "one weight", "one memory"])
def test_one_weight_twice_among_the_projections_takes_the_modules(twice, module, x):
    if twice == "one module":
        module.v = module.k
    elif twice == "one weight":
        module.v.weight = module.k.weight
    else:
        module.v.weight = nn.Parameter(module.k.weight.data)
    for _ in range(2):
        check(module, x, torch.equal)
    assert backend.fallbacks() == {("packed_linear", "shared_weight"): 2}
    assert module.v.weight.data_ptr() == module.k.weight.data_ptr()


def test_a_group_whose_weight_was_replaced_frees_the_others(x):
    model = Shared()
    run(model.first, x)
    model.first.k.weight = nn.Parameter(torch.randn(16, 32))
    check(model.second, x)
    assert packed(model.second)


def test_a_part_of_a_group_joins_the_whole(module, x):
    with torch.no_grad():
        for projections in ((module.k, module.v), (module.q, module.k, module.v), (module.k, module.v)):
            for ours, projection in zip(packed_linear(x, *projections), projections, strict=True):
                torch.testing.assert_close(ours, projection(x))
    assert packed(module)
    assert backend.fallbacks() == {}


@pytest.mark.parametrize("wrong", [None, [1.0], 2])
def test_what_is_no_tensor_fails_as_in_the_modules(wrong, module):
    with pytest.raises(TypeError) as original:
        module.q(wrong)
    with pytest.raises(TypeError) as ours:
        module(wrong)
    assert str(ours.value) == str(original.value)
    assert backend.fallbacks() == {("packed_linear", "not_a_tensor"): 1}


def test_a_trace_holds_the_original_calls(x):
    module = Attention((True, False, True))
    with torch.no_grad():
        traced = torch.jit.trace(module, (x,))
        longer = torch.randn(5, 32)
        torch.testing.assert_close(traced(longer), module.original(longer))
    assert set(backend.fallbacks()) == {("packed_linear", "traced")}


MODES = {
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "of a profiler": lambda: FlopCounterMode(display=False),
    "forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_no_weight_moves_while_another_takes_part_in_the_call(mode, x):
    module = Attention((True,) * 3)
    with torch.no_grad(), mode():
        module(x)
    assert backend.fallbacks() == {("packed_linear", "watched"): 1}
    assert not packed(module)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    check(module, x)
    assert packed(module)


def test_a_class_of_tensors_takes_the_modules(module):
    class Own(torch.Tensor):
        pass

    with torch.no_grad():
        assert type(module(torch.randn(3, 32).as_subclass(Own))) is Own
    assert backend.fallbacks() == {("packed_linear", "watched"): 1}


def test_memory_that_is_no_weights_any_more_is_not_multiplied(module, x):
    """Somebody keeps the old weight, so the packed memory lives on beside the new one."""
    run(module, x)
    old = module.k.weight.data
    module.k.weight = nn.Parameter(torch.randn(16, 32))
    check(module, x, torch.equal)
    assert not packed(module)
    module.v.weight.data.mul_(2)
    del old
    for _ in range(2):
        check(module, x)
        assert packed(module)


@pytest.mark.parametrize(
    "hold",
    [
        lambda m: m.state_dict(),
        lambda m: m.k.weight.data,
        lambda m: m.k.weight.detach().view(-1)[3:5],
        lambda m: m.k.weight.detach().numpy(),
        lambda m: torch.utils.dlpack.from_dlpack(m.k.weight.detach()),
        lambda m: nn.Parameter(m.k.weight.data),
    ],
    ids=["state dict", "data", "a slice", "an array", "another library", "another parameter"],
)
def test_a_weight_whose_memory_is_held_stays_until_it_is_let_go(hold, module, x):
    held = hold(module)
    address = module.k.weight.data_ptr()
    for _ in range(2):
        check(module, x, torch.equal)
    assert module.k.weight.data_ptr() == address
    assert backend.fallbacks() == {("packed_linear", "shared_storage"): 2}
    del held
    run(module, x)
    assert packed(module)


def test_aliases_taken_after_packing_stay_aliases(module, x):
    run(module, x)
    held = module.state_dict()
    for _ in range(2):
        held["k.weight"].mul_(2)
        check(module, x)
    assert packed(module)
    with torch.no_grad():
        packed_linear(x, module.k, module.q)  # another order would move what is held
    assert backend.fallbacks() == {("packed_linear", "shared_weight"): 1}
    assert held["k.weight"].data_ptr() == module.k.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_has_parts_with_storages_of_their_own(dtype):
    tensors = [torch.randn(rows, 4).to(dtype) for rows in (1, 3, 2)]
    values = [tensor.clone() for tensor in tensors]
    whole = joined_storage.join(tensors)
    assert joined_storage.joined(tensors) is whole
    assert whole.shape == (6, 4)
    for tensor, value in zip(tensors, values, strict=True):
        assert tensor.stride() == (4, 1)
        assert torch.equal(tensor.view(torch.uint8), value.view(torch.uint8))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_torch_that_does_not_count_users_moves_no_weight(monkeypatch, module):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    run(module, torch.randn(3, 32))
    assert backend.fallbacks() == {("packed_linear", "shared_storage"): 1}


def test_a_weight_that_lies_column_by_column_stays_as_it_is():
    module = Attention(dtype=torch.float64)
    module.q.weight.data = module.q.weight.data.t().contiguous().t()
    x = torch.randn(2, 32, dtype=torch.float64)
    check(module, x, rtol=1e-12, atol=1e-12)
    assert not packed(module)
    assert module.q.weight.stride() == (1, 48)
    assert backend.fallbacks()["packed_linear", "strided"] == 1


def test_a_step_calls_projections_without_a_weight_of_their_own():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, input):
            return 2 * self.base(input)

    first, second = nn.Linear(4, 3), nn.Linear(4, 2)
    x = torch.randn(1, 4)
    with torch.no_grad():
        one, other = packed_step(x, Adapted(first), second)
        assert torch.equal(one, 2 * first(x))
        assert torch.equal(other, second(x))


@pytest.mark.parametrize("bias", [False, True])
def test_weights_made_in_inference_mode_can_still_be_called_one_by_one(bias: bool) -> None:
    with torch.inference_mode():
        projections = [torch.nn.Linear(8, out, bias=bias) for out in (4, 6)]
    x = torch.ones(2, 8)
    with torch.no_grad():
        wanted = [projection(x) for projection in projections]
        for got in (packed_linear(x, *projections), [projection(x) for projection in projections]):
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b)
    assert joined_storage.joined([projection.weight for projection in projections]) is not None
    assert all(parameter.is_inference() for projection in projections for parameter in projection.parameters())


@pytest.mark.parametrize("shape", [(32,), (1, 32), (1, 1, 32), (2, 32), (1, 5, 32), (0, 32)])
def test_dense_results_lie_as_tensors_of_their_own(module, shape):
    x = torch.randn(shape)
    with torch.no_grad():
        parts = packing.packed_linear_dense(x, module.q, module.k, module.v)
        wholes = [module.q(x), module.k(x), module.v(x)]
    for part, whole in zip(parts, wholes, strict=True):
        torch.testing.assert_close(part, whole)
        assert part.stride() == whole.stride()
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0
    one_row = x[..., 0].numel() == 1
    assert packed(module) == one_row
    assert (len({part.untyped_storage().data_ptr() for part in parts}) == 1) == (one_row or not x.numel())


def test_dense_results_of_odd_sizes_are_products_of_their_own(module):
    module.k = nn.Linear(32, 15)
    x = torch.randn(1, 1, 32)
    with torch.no_grad():
        parts = packing.packed_linear_dense(x, module.q, module.k, module.v)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 3
    assert not packed(module)


@packing.casts_weight(bias=True)
class CastLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@packing.casts_weight(bias=False)
class CastWithoutBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize(
    ("kind", "biases", "dtype", "together"),
    [
        (CastLinear, (True, False, True), torch.float32, True),
        (CastLinear, (True, False, True), torch.float64, False),
        (CastWithoutBias, (False, False, False), torch.float32, True),
        (CastWithoutBias, (False, True, False), torch.float32, False),
    ],
)
def test_a_class_that_casts_its_weight_is_packed_where_nothing_is_cast(module, kind, biases, dtype, together):
    for name, size, bias in zip("qkv", (48, 16, 16), biases, strict=True):
        setattr(module, name, kind(32, size, bias=bias))
    check(module, torch.randn(2, 3, 32, dtype=dtype))
    assert packed(module) == together


def test_a_class_whose_forward_was_replaced_is_called(module, monkeypatch):
    for name, size in zip("qkv", (48, 16, 16), strict=True):
        setattr(module, name, CastLinear(32, size))
    monkeypatch.setattr(CastLinear, "forward", lambda self, x: F.linear(x, self.weight) * 2)
    check(module, torch.randn(2, 3, 32))
    assert not packed(module)


def test_a_thread_that_launches_nothing_moves_nothing():
    """Beside it another computes with these weights."""
    weights = [torch.randn(rows, 8) for rows in (4, 2)]
    places = [weight.data_ptr() for weight in weights]
    launch.collect(lambda key, planned: None)
    try:
        assert packing.as_one(weights).shape == (6, 8)
    finally:
        launch.collect(None)
    assert [weight.data_ptr() for weight in weights] == places
    assert torch.equal(packing.as_one(weights), torch.cat(weights))
    assert [weight.data_ptr() for weight in weights] != places
    launch.collect(lambda key, planned: None)
    try:
        assert packing.as_one(weights).data_ptr() == weights[0].data_ptr()
    finally:
        launch.collect(None)
