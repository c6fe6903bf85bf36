"""What a user changes between two calls, code among it, is in the tokens and scores of the next one."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import activations, masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_rewrite_runtime.guards import code_guard, provenance
from hf_rewrite_runtime.tensor_parallel import shards
from hf_rewrite_runtime.tensor_parallel.forwards import SummedForward
from rewrite.codemod.build import build
from rewrite.measure.runtime_part import runtime_part
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import resolve
from rewrite.transforms import select

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199, "max_position_embeddings": 512,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
IDS = torch.randint(3, 190, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])


class Side(NamedTuple):
    """A package or transformers' own, with the same weights."""

    name: str
    """Of its classes, `Llama`."""
    module: types.ModuleType
    model: Any


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("changed")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("changed_")]:
        del sys.modules[name]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, place: Path) -> str:
    name: str = request.param
    package(name, place)
    return name


def package(name: str, place: Path) -> None:
    if not (place / f"changed_{name}").is_dir():
        chosen = select()
        files = assemble(build(resolve(name), chosen), chosen, Options(), place / f"changed_{name}").files
        for path, content in files.items():
            (place / f"changed_{name}" / path).parent.mkdir(parents=True, exist_ok=True)
            (place / f"changed_{name}" / path).write_bytes(content)
        importlib.invalidate_caches()


def sides(name: str) -> tuple[Side, Side]:
    """Return transformers' own and the package's, with the same weights."""
    kind, options = FAMILIES[name]
    made = []
    for home in (f"transformers.models.{name}", f"changed_{name}"):
        module = importlib.import_module(f"{home}.modeling_{name}")
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
        made.append(Side(kind, module, getattr(module, f"{kind}ForCausalLM")(config).eval()))
    theirs, ours = made
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.model._step_without_graph, ours.model.starts_plainly = True, False
    return theirs, ours


def store_of(side: Side) -> Any:
    return runtime_part(side.module.__package__, "decode/graph_cache").store_of(side.model)


def part(side: Side, name: str) -> Any:
    return runtime_part(side.module.__package__, name)


def generate(side: Side, **given: Any) -> Any:
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return side.model.generate(IDS, **{**options, **given})


def graphs_of(side: Side) -> list[Any]:
    return list(store_of(side).graphs.values())


def differ(theirs: Any, ours: Any) -> str:
    """Return how far two outputs are apart, if that is more than roundings."""
    if theirs.sequences.tolist() != ours.sequences.tolist():
        return "tokens"
    far = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(theirs.scores, ours.scores, strict=True)]
    return "" if max(far) < 1e-4 else f"scores {max(far):.1e}"


@contextlib.contextmanager
def put(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes for the length of a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in places:
            patch.setattr(owner, name, value, raising=False)
        yield


Change = Callable[[Side], AbstractContextManager[Any]]


def halved(function: Any) -> Any:
    """Return a function that calls itself by the other one's name, and does something else."""

    @functools.wraps(function)
    def half(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        if isinstance(result, tuple):
            return (result[0] * 0.5, *result[1:])
        return result * 0.5 if isinstance(result, torch.Tensor) else result

    return half


def of_class(suffix: str, name: str = "forward") -> Change:
    """Change a method of a class of the modeling file."""

    def change(side: Side) -> AbstractContextManager[None]:
        kind = getattr(side.module, f"{side.name}{suffix}")
        return put((kind, name, halved(getattr(kind, name))))

    return change


def of_file(name: str) -> Change:
    """Change a function of the modeling file."""
    return lambda side: put((side.module, name, halved(getattr(side.module, name))))


def of_library(owner: Any, name: str) -> Change:
    """Change a function of torch's or transformers' own."""
    return lambda side: put((owner, name, halved(getattr(owner, name))))


def of_table(table: Any, name: str) -> Change:
    """Change what a mapping of transformers holds."""

    @contextlib.contextmanager
    def change(side: Side) -> Iterator[None]:
        old = table.get(name, side.module.eager_attention_forward)
        table[name] = halved(old)
        try:
            yield
        finally:
            del table[name]

    return change


def subclass_of(*path: str) -> Change:
    """Make a module of every layer one of a class that derives from its own."""

    def change(side: Side) -> AbstractContextManager[None]:
        kinds: dict[type, type] = {}
        for layer in side.model.model.layers:
            module = functools.reduce(getattr, path, layer)
            old = type(module)
            module.__class__ = kinds.setdefault(old, type("Mine", (old,), {"forward": halved(old.forward)}))
        return contextlib.nullcontext()

    return change


def sets(*path: str, to: Any) -> Change:
    """Set an attribute of the model, or of what it holds."""

    def change(side: Side) -> AbstractContextManager[None]:
        setattr(functools.reduce(getattr, path[:-1], side.model), path[-1], to)
        return contextlib.nullcontext()

    return change


def _instance_prepares(side: Side) -> AbstractContextManager[None]:
    old = side.model.prepare_inputs_for_generation

    @functools.wraps(old)
    def prepare(*given: Any, **named: Any) -> Any:
        inputs = old(*given, **named)
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"] * 3
        return inputs

    side.model.prepare_inputs_for_generation = prepare
    return contextlib.nullcontext()


def _weights_in_another_place(side: Side) -> AbstractContextManager[None]:
    for layer in side.model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.data = weight.data * 0.5
    return contextlib.nullcontext()


def _a_module(side: Side) -> AbstractContextManager[None]:
    side.model.model.layers[0].input_layernorm = nn.Identity()
    return contextlib.nullcontext()


def _forward_of_an_instance(side: Side) -> AbstractContextManager[None]:
    attention = side.model.model.layers[1].self_attn
    attention.forward = halved(attention.forward)
    return contextlib.nullcontext()


def _a_hook(side: Side) -> AbstractContextManager[Any]:
    return side.model.model.layers[0].register_forward_hook(lambda module, given, output: output * 0.9)  # type: ignore[no-any-return]


def _inside_the_configuration(side: Side) -> AbstractContextManager[None]:
    for layer in side.model.model.layers:
        layer.self_attn.scaling = 0.01
    return contextlib.nullcontext()


class Halves(TorchFunctionMode):
    """Takes part in every function of torch."""

    def __torch_function__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        result = function(*given, **(named or {}))
        return result * 0.5 if function is functional.linear else result


CHANGES: dict[str, Change] = {
    "the forward of an MLP's class": of_class("MLP"),
    "the forward of an attention's class": of_class("Attention"),
    "the forward of a layer's class": of_class("DecoderLayer"),
    "the forward of a norm's class": of_class("RMSNorm"),
    "the forward of the rotary embedding's class": of_class("RotaryEmbedding"),
    "the forward of torch's class of projections": of_library(nn.Linear, "forward"),
    "the forward of an activation's class": of_library(activations.SiLUActivation, "forward"),
    "the call of every module": of_library(nn.Module, "__call__"),
    "the rotation of the modeling file": of_file("apply_rotary_pos_emb"),
    "the attention of the modeling file": of_file("eager_attention_forward"),
    "the masks of the modeling file": lambda side: put(
        (side.module, "create_causal_mask", lambda *given, **named: None),
        (side.module, "create_sliding_window_causal_mask", lambda *given, **named: None),
    ),
    "torch's product": of_library(functional, "linear"),
    "torch's attention": of_library(functional, "scaled_dot_product_attention"),
    "torch's activation": of_library(functional, "silu"),
    "the attention that is registered": of_table(ALL_ATTENTION_FUNCTIONS, "sdpa"),
    "the mask that is registered": lambda side: _mask_that_shows_all(),
    "a class of the MLPs": subclass_of("mlp"),
    "a class of the attentions": subclass_of("self_attn"),
    "a class of the projections": subclass_of("self_attn", "o_proj"),
    "a class of the norms": subclass_of("input_layernorm"),
    "a value of the configuration that was not there": sets("config", "is_causal", to=False),
    "a value of a module": _inside_the_configuration,
    "where weights lie": _weights_in_another_place,
    "a module": _a_module,
    "a forward of an instance": _forward_of_an_instance,
    "a hook": _a_hook,
    "what a step is given, by the instance": _instance_prepares,
    "what a step is given, by transformers": lambda side: put(
        (GenerationMixin, "_update_model_kwargs_for_generation", _without_mask)
    ),
    "the growing cache of transformers": lambda side: put((DynamicLayer, "update", halved(DynamicLayer.update))),
    "a mode of torch": lambda side: Halves(),
    "a default device": lambda side: torch.device("cpu"),
    "the default dtype": lambda side: _default_dtype(),
}


@contextlib.contextmanager
def _mask_that_shows_all() -> Iterator[None]:
    table = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    table["sdpa"] = lambda *given, **named: None
    try:
        yield
    finally:
        del table["sdpa"]


_UPDATE = GenerationMixin._update_model_kwargs_for_generation


def _without_mask(self: Any, outputs: Any, model_kwargs: dict[str, Any], *given: Any, **named: Any) -> Any:
    found = _UPDATE(self, outputs, model_kwargs, *given, **named)
    if found.get("position_ids") is not None:
        found["position_ids"] = found["position_ids"] + 2
    return found


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_in_the_tokens_of_the_next_call(family: str, name: str, after: bool) -> None:
    pair = sides(family)
    plain = generate(pair[0])
    if after:
        assert not differ(plain, generate(pair[1]))
    before = graphs_of(pair[1])
    found: list[list[Any]] = []
    for side in pair:
        with CHANGES[name](side):
            found.append([generate(side), generate(side, attention_mask=MASK), generate(side)])
            kept = graphs_of(side) if side is pair[1] else []
    theirs, ours = found
    assert [differ(a, b) for a, b in zip(theirs, ours, strict=True)] == ["", "", ""]
    refused = part(pair[1], "core/backend").last_reasons(pair[1].model).get("")
    if differ(plain, theirs[0]) and refused is None:
        assert not [graph for graph in kept if graph in before], "a graph was kept"
    if not any(word in name for word in ("where weights", "class of", "value of", "a module", "instance", "of_table")):
        assert not differ(*map(generate, pair))  # and what was before is there again


PLANTED: dict[str, tuple[str, str, str, Any, list[str]]] = {
    "other methods are not told apart": (
        "guards/provenance", "", "stands", lambda kind, name: True,
        ["a class of the MLPs", "a class of the attentions"],
    ),
    "other functions are not told apart": (
        "guards/provenance", "", "is_own", lambda value, holder, name: True,
        ["the attention that is registered"],
    ),
    "code is not compared": (
        "guards/code_guard", "CodeGuard", "is_current", lambda self: True,
        ["torch's attention", "the attention that is registered"],
    ),
    "attributes are not compared": (
        "guards/snapshot", "Snapshot", "is_current", lambda self: self.code.is_current(),
        ["a value of the configuration that was not there"],  # of modules, `side_effects.Kept` knows as well
    ),
    "addresses are not compared": (
        "guards/snapshot", "Snapshot", "is_mapped", lambda self: True, ["where weights lie"],
    ),
    "settings are not compared": ("core/process", "", "settings", tuple, ["the default dtype", "a default device"]),
    "methods of the instance are not looked at": (
        "decode/eligibility", "", "_overrides", lambda model, name: False, ["what a step is given, by the instance"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_guard_that_is_left_out_shows(place: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Steps are run anew on a CPU, so that a graph that was kept is a failure too."""
    package("llama", place)
    room, owner, attribute, instead, names = PLANTED[what]
    for name in names:
        pair = sides("llama")
        with monkeypatch.context() as patch:
            home = part(pair[1], room)
            target = getattr(home, owner) if owner else module_of(home, attribute, pair[1])
            for one in target if isinstance(target, list) else [target]:
                patch.setattr(one, attribute, instead)
            trust_every_step(patch, pair[1])
            assert not differ(*map(generate, pair))
            before, found = graphs_of(pair[1]), []
            for side in pair:
                with CHANGES[name](side):
                    found.append(generate(side))
            kept = [graph for graph in graphs_of(pair[1]) if graph in before]
        assert differ(*found) or kept, name


def module_of(home: Any, name: str, side: Side) -> list[types.ModuleType]:
    """Return the files of a package's runtime that know a function by its name."""
    function = getattr(home, name)
    files = [m for path, m in list(sys.modules.items()) if path.startswith("hf_rewrite_runtime.")]
    return [file for file in files if vars(file).get(name) is function]


def trust_every_step(patch: pytest.MonkeyPatch, side: Side) -> None:
    """Let no proof find out what a guard does not."""
    for file in module_of(part(side, "decode/validation"), "compared", side):
        patch.setattr(file, "compared", lambda *given: (0.0, True))


@pytest.mark.parametrize("name", [name for name in CHANGES if "a mode" not in name and "growing" not in name])
def test_a_captured_forward_would_not_be_replayed(place: Path, name: str) -> None:
    package("llama", place)
    _, ours = sides("llama")
    snapshot, settings = part(ours, "guards/snapshot").Snapshot(ours.model), part(ours, "core/process").settings
    before = settings()
    assert snapshot.is_mapped() and snapshot.is_current()  # noqa: PT018
    with CHANGES[name](ours):
        assert not (snapshot.is_mapped() and snapshot.is_current() and settings() == before)


def test_layers_take_their_second_forms_where_their_code_stands(place: Path) -> None:
    package("llama", place)
    _, ours = sides("llama")
    part(ours, "core/backend").reset_fallbacks()
    generate(ours)
    (graph,) = store_of(ours).graphs.values()
    assert graph.cache.fused
    generate(ours)
    assert [*store_of(ours).graphs.values()] == [graph]
    for name in ("the attention of the modeling file",):
        _, ours = sides("llama")
        with CHANGES[name](ours):
            for _ in range(2):
                generate(ours)
            (graph,) = store_of(ours).graphs.values()
            assert not graph.cache.fused, name
            assert "other code stands for" in str(importlib.import_module("changed_llama").explain(ours.model)), name
    assert not part(ours, "core/backend").fallbacks().get(("generate", "step_differs"))


def test_a_refusal_holds_until_the_model_is_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package("llama", place)
    _, ours = sides("llama")
    reasons = part(ours, "core/backend")
    tried: list[float] = []
    for file in module_of(part(ours, "decode/validation"), "compared", ours):
        monkeypatch.setattr(file, "compared", lambda *given: (tried.append(0.5) or 0.5, False))
    reasons.reset_fallbacks()
    for _ in range(3):
        generate(ours)
    assert reasons.fallbacks()[("generate", "step_differs")] == 3
    first = len(tried)
    ours.model.config.another = 1
    generate(ours)
    assert len(tried) == 2 * first


def test_a_model_is_let_go_whatever_it_has_on_itself(place: Path) -> None:
    package("llama", place)
    _, ours = sides("llama")
    old = ours.model.prepare_inputs_for_generation
    ours.model.prepare_inputs_for_generation = functools.partial(old)
    ours.model.helper = types.SimpleNamespace(model=ours.model)
    for _ in range(2):
        generate(ours)
    gone = weakref.ref(ours.model)
    del old
    ours = ours._replace(model=None)
    gc.collect()
    assert gone() is None


def test_methods_of_the_loop_that_it_stands_for(place: Path) -> None:
    package("llama", place)
    _, ours = sides("llama")
    reasons = part(ours, "core/backend")
    fitness = part(ours, "decode/eligibility")
    assert {"_prefill", "_has_unfinished_sequences"} <= fitness._LOOP
    for name in sorted(fitness._LOOP):
        reasons.reset_fallbacks()
        method = getattr(type(ours.model), name)
        with put((type(ours.model), name, functools.wraps(method)(lambda *g, method=method, **n: method(*g, **n)))):
            generate(ours)
        assert reasons.fallbacks()[("generate", "own_loop")] == 1, name
    calls = []
    sample = GenerationMixin._sample
    with put((GenerationMixin, "_sample", lambda *g, **n: (calls.append(1), sample(*g, **n))[1])):
        generate(ours)
    assert calls == [1]


def test_code_is_known_by_where_it_was_written() -> None:
    def other(self: Any, x: Any) -> Any:
        return x

    assert provenance.runs_as_written(nn.Linear)
    for replacement in (other, functools.wraps(nn.Linear.forward)(other), torch.no_grad()(other), nn.Bilinear.forward):
        with put((nn.Linear, "forward", replacement)):
            assert not provenance.runs_as_written(nn.Linear)
        assert provenance.runs_as_written(nn.Linear)
    with put((functional, "linear", functional.bilinear)):
        assert not provenance.runs_as_written(nn.Linear)
    assert provenance.runs_as_written(nn.Linear)


def test_a_module_of_transformers_has_functions_of_what_it_is_installed_with() -> None:
    assert provenance.is_own(save_file, "transformers.model_debugging_utils", "save_file")
    assert not provenance.is_own(save_file, "torch.nn.functional", "linear")
    assert not provenance.is_own(pytest.importorskip, "transformers.model_debugging_utils", "save_file")


def sides_of_transformers() -> nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def test_what_a_process_adds_elsewhere_is_no_change() -> None:
    kinds = {type(module) for module in sides_of_transformers().modules()}
    guard = code_guard.CodeGuard(kinds, frozenset({"sdpa"}))
    ALL_ATTENTION_FUNCTIONS["of another library"] = lambda *given: None
    try:
        assert guard.is_current()
    finally:
        del ALL_ATTENTION_FUNCTIONS["of another library"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        assert not guard.is_current()
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert guard.is_current()


class Dealt:
    """A tensor of several ranks, whose local one is another view each time."""

    def __init__(self) -> None:
        self.local = torch.ones(3)

    def to_local(self) -> torch.Tensor:
        return self.local.view_as(self.local)


def test_a_rank_has_the_same_tensors_in_each_call() -> None:
    module, dealt = nn.Linear(1, 1), Dealt()
    first = shards._local_of(module, "weight", dealt)
    assert shards._local_of(module, "weight", dealt) is first
    dealt.local = torch.zeros(3)
    assert shards._local_of(module, "weight", dealt).tolist() == [0, 0, 0]
    ranks: Any = object()
    assert SummedForward(module, ranks) == SummedForward(module, ranks)
    assert SummedForward(module, ranks) != SummedForward(nn.Linear(1, 1), ranks)
