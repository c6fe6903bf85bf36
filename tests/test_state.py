"""A model whose weights are packed, in the hands of what saves, loads, moves, wraps and transforms models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewrite.measure.runtime_part import runtime_part

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Tensor, nn = torch.Tensor, torch.nn

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.3, "use_cache": False,
}  # fmt: skip
IDS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def package(rewritten: Callable[[str], Any]) -> Any:
    """The package of Llama."""
    return rewritten("llama")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")
    return str(request.param)


@pytest.fixture(params=["long", "short"])
def length(request: pytest.FixtureRequest, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose slower part is the host too, as on a GPU: they ask once, and then only where a weight lies."""
    if request.param == "short":
        part = runtime_part("state_llama", "linear/packing")
        monkeypatch.setattr(part, "is_launch_bound", lambda tensor: not torch.is_grad_enabled())


class Pair:
    """Our model and the original with the same weights."""

    def __init__(self, package: Any, device: str, packed: bool = True, **config: Any):
        torch.manual_seed(0)
        self.config = transformers.LlamaConfig(**{**SIZES, **config})
        self.backend = runtime_part("state_llama", "core/backend")
        self.memory = runtime_part("state_llama", "linear/joined_storage")
        dtype = torch.float64 if device == "cuda" else torch.float32  # of which no kernel takes part
        self.theirs = transformers.LlamaForCausalLM(self.config).to(device, dtype).eval()
        self.ours = package.LlamaForCausalLM(self.config).to(device, dtype).eval()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.ids = IDS.to(device)
        self.backend.reset_fallbacks()
        if packed:
            self.check()
            assert self.packed() == len(self.groups())

    def groups(self, model: Any = None) -> list[list[Tensor]]:
        """The weights that packing puts together."""
        layers = (self.ours if model is None else model).model.layers
        names = [("self_attn", "q_proj", "k_proj", "v_proj"), ("mlp", "gate_proj", "up_proj")]
        return [
            [getattr(getattr(layer, part), name).weight for name in projections]
            for layer in layers for part, *projections in names
        ]  # fmt: skip

    def packed(self, model: Any = None) -> int:
        return sum(self.memory.joined(group) is not None for group in self.groups(model))

    def check(self, ours: Any = None) -> None:
        """Compare logits, in the dtype that the models have."""
        ours = self.ours if ours is None else ours
        with torch.no_grad():
            torch.testing.assert_close(ours(self.ids).logits, self.theirs(self.ids).logits)

    def same_state(self, state: dict[str, Tensor]) -> None:
        expected = self.theirs.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[name].to(value.device)) for name, value in state.items())


@pytest.fixture
def pair(package: Any, device: str) -> Pair:
    return Pair(package, device)


def test_every_weight_has_a_storage_of_its_own(pair: Pair) -> None:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in pair.ours.parameters()}
    assert len(storages) == len(list(pair.ours.parameters()))
    assert sum(storages.values()) == sum(x.nbytes for x in pair.theirs.parameters())
    assert all(x.stride() == y.stride() for x, y in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True))


@pytest.mark.usefixtures("length")
def test_the_memory_goes_with_the_model(package: Any, device: str) -> None:
    gc.collect()
    groups = runtime_part("state_llama", "linear/joined_storage")._groups
    before = len(groups)
    pair = Pair(package, device)
    assert len(groups) == before + 10
    for parameter in pair.ours.parameters():
        parameter.data = parameter.data.clone()
    assert len(groups) == before, "moved weights leave the packed memory behind"
    pair.check()
    assert len(groups) == before + 10
    del pair
    gc.collect()
    assert len(groups) == before


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_one_weight_is_saved_at_its_size(pair: Pair, kind: str) -> None:
    weight = pair.ours.model.layers[1].self_attn.k_proj.weight
    buffer = io.BytesIO()
    if kind == "torch":
        torch.save(weight, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
    else:
        pickle.dump(weight, buffer)
        loaded = pickle.loads(buffer.getvalue())
    assert len(buffer.getvalue()) < weight.nbytes + 2000
    assert torch.equal(loaded, weight)
    assert type(loaded) is nn.Parameter
    assert not vars(loaded)


def test_safetensors(pair: Pair, tmp_path: Path) -> None:
    from safetensors.torch import load_file, load_model, save_file, save_model

    save_model(pair.ours, str(tmp_path / "model.safetensors"))
    pair.same_state(load_file(tmp_path / "model.safetensors"))
    save_file(pair.ours.state_dict(), tmp_path / "state.safetensors")
    pair.same_state(load_file(tmp_path / "state.safetensors"))
    load_model(pair.ours, str(tmp_path / "model.safetensors"))
    pair.check()


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_writes_the_originals_bytes(package: Any, device: str, tmp_path: Path, tied: bool) -> None:
    pair = Pair(package, device, tie_word_embeddings=tied)
    pair.ours.save_pretrained(tmp_path / "ours")
    pair.theirs.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tmp_path / side / "model.safetensors" for side in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    loaded = package.LlamaForCausalLM.from_pretrained(tmp_path / "ours").to(device)
    pair.check(loaded)
    assert pair.packed(loaded) == len(pair.groups())


def test_distributed_checkpoint(pair: Pair, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(pair.ours.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    state = {name: torch.zeros_like(value) for name, value in pair.ours.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    pair.same_state(state)
    written = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp"))
    assert written < 2 * sum(x.nbytes for x in state.values()) + 2000 * len(state)
    for parameter in pair.ours.parameters():
        parameter.data.zero_()
    dcp.load(pair.ours.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    pair.check()
    assert pair.packed() == len(pair.groups())


def test_accelerate(pair: Pair, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from safetensors.torch import load_file

    accelerator = accelerate.Accelerator(cpu=pair.ids.device.type == "cpu")
    model = accelerator.prepare(pair.ours)
    accelerator.save_model(model, str(tmp_path / "model"))
    pair.same_state(load_file(tmp_path / "model" / "model.safetensors"))
    accelerator.save_state(str(tmp_path / "state"))
    pair.same_state(load_file(tmp_path / "state" / "model.safetensors"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    pair.check()
    assert pair.packed() == len(pair.groups())
    accelerator.free_memory()


@pytest.mark.usefixtures("length")
def test_offloaded_weights_take_the_modules(pair: Pair) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.cpu_offload(pair.ours, execution_device=pair.ids.device)
    pair.backend.reset_fallbacks()
    pair.check()
    assert pair.backend.fallbacks()["packed_linear", "observed"] == len(pair.groups())
    accelerate.hooks.remove_hook_from_submodules(pair.ours)
    pair.ours.to(pair.ids.device)
    pair.backend.reset_fallbacks()
    pair.check()
    assert not [reason for reason in pair.backend.fallbacks() if "observed" in reason[1]]
    assert pair.packed() == len(pair.groups())


def trained(model: Any, folder: Path, resume: bool, steps: int) -> Any:
    """Train a few steps from a checkpoint, or to one."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[],
        use_cpu=on_cpu, disable_tqdm=True, logging_steps=100, learning_rate=0.01, seed=3,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in (torch.arange(48).view(8, 6) % 64)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.evaluate()  # packs
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_trainer_saves_and_resumes(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    fresh = copy.deepcopy(pair.ours)
    for model, side in ((pair.ours, "ours"), (pair.theirs, "theirs")):
        trained(model, tmp_path / side, False, 2)
    for model, side in ((fresh, "ours"), (pair.theirs, "theirs")):
        trained(model, tmp_path / side, True, 4)
    for ours, theirs in zip(fresh.parameters(), pair.theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    pair.theirs.load_state_dict(fresh.state_dict())
    pair.check(fresh.eval())


def test_peft(pair: Pair, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
    adapted = []
    for model in (pair.theirs, pair.ours):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(model, config).eval())
    theirs, ours = adapted
    with torch.no_grad():
        torch.testing.assert_close(ours(pair.ids).logits, theirs(pair.ids).logits)
    ours.save_pretrained(tmp_path / "adapter")
    merged = ours.merge_and_unload()
    pair.theirs = theirs.merge_and_unload()
    pair.check(merged)
    assert pair.packed(merged) == len(pair.groups())
    pair.same_state(merged.state_dict())
    assert sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors")) < 20_000


def change(tensors: Any) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn_like(value) / 4 for name, value in tensors.items()}


MOVES: dict[str, Callable[[Any], Any]] = {
    "half and back": lambda m: m.half().float(),
    "double": lambda m: m.double(),
    "load_state_dict": lambda m: m.load_state_dict(change(m.state_dict())),
    "load_state_dict, assigned": lambda m: m.load_state_dict(change(m.state_dict()), assign=True),
    "in place": lambda m: [p.data.mul_(0.9) for p in m.parameters()],
    "one weight": lambda m: setattr(
        m.model.layers[0].mlp.up_proj, "weight", nn.Parameter(change({"w": m.model.layers[0].mlp.up_proj.weight})["w"])
    ),
    "the data of one": lambda m: setattr(
        m.model.layers[1].self_attn.q_proj.weight,
        "data",
        change({"w": m.model.layers[1].self_attn.q_proj.weight})["w"],
    ),
}


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swapped"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_packs_again_wherever_weights_went(package: Any, move: Callable[[Any], Any], swap: bool) -> None:
    pair = Pair(package, "cpu")
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        move(pair.ours)
        move(pair.theirs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    pair.check()
    assert pair.packed() == len(pair.groups())
    pair.check()


def test_copies_share_nothing(pair: Pair) -> None:
    twin = copy.deepcopy(pair.ours)
    pickled = pickle.loads(pickle.dumps(pair.ours))
    with torch.no_grad():
        for parameter in pair.ours.parameters():
            parameter.zero_()
    pair.check(twin)
    pair.check(pickled)
    assert pair.packed(twin) == pair.packed(pickled) == len(pair.groups())


def test_shared_memory_stays_shared(package: Any) -> None:
    pair = Pair(package, "cpu")
    pair.ours.share_memory()
    assert all(parameter.is_shared() for parameter in pair.ours.parameters())
    pair.check()
    assert all(parameter.is_shared() for parameter in pair.ours.parameters())
    assert pair.backend.fallbacks()["packed_linear", "shared_storage"] == len(pair.groups())


@pytest.mark.usefixtures("length")
def test_who_holds_the_memory_keeps_it_until_it_lets_go(
    package: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(package, device, packed=False)
    average = {name: value for name, value in pair.ours.state_dict().items() if "k_proj" in name or "up_proj" in name}
    # A graph of the forward keeps the products that it was captured with.
    monkeypatch.setattr(runtime_part("state_llama", "forward/forward_settings"), "_chosen", "never")
    pair.check()
    assert pair.packed() == 0
    assert pair.backend.fallbacks()["packed_linear", "shared_storage"] == len(pair.groups())
    for value in average.values():
        value.mul_(0.5)
    pair.theirs.load_state_dict(average, strict=False)
    pair.check()
    average.clear()
    del value
    pair.check()
    assert pair.packed() == len(pair.groups())


def logits(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda embeddings: model(inputs_embeds=embeddings).logits


def fake(model: Any, embeddings: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert logits(model)(mode.from_tensor(embeddings)).shape == (2, 6, 64)


def proxies(model: Any, embeddings: Tensor) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        make_fx(logits(model), tracing_mode="symbolic", _allow_non_fake_inputs=True)(embeddings)


def forward_mode(model: Any, embeddings: Tensor) -> Tensor:
    with torch.no_grad():
        tangent: Tensor = torch.func.jvp(logits(model), (embeddings,), (embeddings.flip(0),))[1]
    return tangent


def duals(model: Any, embeddings: Tensor) -> Tensor:
    from torch.autograd import forward_ad

    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(logits(model)(forward_ad.make_dual(embeddings, embeddings.flip(0)))).tangent


def reverse_mode(model: Any, embeddings: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.grad(lambda x: logits(model)(x).square().sum())(embeddings)


def weights_as_arguments(model: Any, embeddings: Tensor) -> Tensor:
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def function(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (), {"inputs_embeds": embeddings}).logits
        return output

    with torch.no_grad():
        tangent: Tensor = torch.func.jvp(function, (parameters,), (parameters,))[1]
    return tangent


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "transform",
    [fake, proxies, forward_mode, duals, reverse_mode, weights_as_arguments],
    ids=lambda transform: transform.__name__,
)
def test_transforms_leave_the_model_whole(
    package: Any, device: str, warm: bool, transform: Callable[[Any, Tensor], Tensor | None]
) -> None:
    pair = Pair(package, device, warm, num_hidden_layers=1, attn_implementation="eager")
    for model in (pair.ours, pair.theirs):
        model.double()
    pair.check() if warm else None
    embeddings = pair.ours.model.embed_tokens(pair.ids).detach()
    before = [*pair.ours.parameters()]
    pair.backend.reset_fallbacks()
    found = transform(pair.ours, embeddings)
    if found is not None:
        torch.testing.assert_close(found, transform(pair.theirs, embeddings))
        assert found.any()
    refused = {reason for _, reason in pair.backend.fallbacks()}
    assert refused & {"watched", "not_a_plain_parameter", "gradient_wanted"}  # the last by norms
    assert all(one is other for one, other in zip(before, pair.ours.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in pair.ours.parameters())
    pair.same_state(pair.ours.state_dict())
    pair.check()
    assert pair.packed() == len(pair.groups())


@pytest.mark.parametrize("tied", [("k_proj", "v_proj"), ("q_proj", "k_proj"), ("q_proj", "k_proj", "v_proj")])
@pytest.mark.parametrize("before", [True, False], ids=["before packing", "after packing"])
@pytest.mark.parametrize("how", ["parameter", "memory", "part"])
def test_tied_weights_inside_a_group(package: Any, tied: tuple[str, ...], before: bool, how: str) -> None:
    pair = Pair(package, "cpu", not before, num_key_value_heads=4)
    for model in (pair.ours, pair.theirs):
        attention = model.model.layers[0].self_attn
        weight = getattr(attention, tied[0]).weight
        for name in tied[1:]:
            module = getattr(attention, name)
            if how == "parameter":
                module.weight = weight
            elif how == "memory":
                module.weight = nn.Parameter(weight.data)
            else:
                module.weight.data = weight.data[:].view(-1)[: module.weight.numel()].view_as(module.weight)
    for _ in range(2):
        pair.check()
    assert pair.packed() == len(pair.groups()) - 1
    assert ("packed_linear", "shared_weight") in pair.backend.fallbacks()
    for model in (pair.ours, pair.theirs):
        model(pair.ids, labels=pair.ids).loss.backward()
    for (name, ours), theirs in zip(pair.ours.named_parameters(), pair.theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    pair.same_state(pair.ours.state_dict())
    with torch.no_grad():
        for model in (pair.ours, pair.theirs):
            getattr(model.model.layers[0].self_attn, tied[0]).weight.mul_(1.5)
    pair.check()
    assert len({getattr(pair.ours.model.layers[0].self_attn, name).weight.data_ptr() for name in tied}) == 1
