"""The runtime of a package: the definitions that it uses, one file a room, with nothing missing and nothing twice."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rewrite.package.closure import Closure, closure
from rewrite.package.features import FEATURES, FORMS, MARKS, forms_of, left_out, needed_by
from rewrite.package.parts import NotFollowed, Own
from rewrite.package.targets import TARGETS

from rewrite.operators import offers
from rewrite.package import bundle, parts, runtime_files
from rewrite.sync.edits import problems_of


def undefined(taken: Closure) -> dict[str, list[str]]:
    """Return what functions read and nothing defines, by room."""
    texts = {room: bundle._room(room, taken) for room in taken.rooms}
    return {room: said for room, text in texts.items() if (said := problems_of(text, (), None))}


def some_uses() -> list[str]:
    """Return one name that every room offers."""
    return sorted({offer.room: offer.use for offer in offers()}.values())


@pytest.mark.parametrize("target", TARGETS)
def test_the_whole_runtime_becomes_one_file_a_room(target: str) -> None:
    """A name that would mean something else in its room is `NotFollowed`."""
    marks = (mark for marks in MARKS.values() for mark in marks)
    taken = closure(parts.final_names(), left_out(target, [*FORMS, *marks], ()))
    assert undefined(taken) == {}
    assert ("aiter" in runtime_files.closure_of(["norms.rms_norm"], target).rooms) == (target == "rocm")


@pytest.mark.parametrize("use", some_uses())
def test_nothing_is_missing_from_a_part_of_it(use: str) -> None:
    assert undefined(runtime_files.closure_of([use], "cuda")) == {}


@pytest.mark.parametrize("without", [*((name,) for name in FEATURES), tuple(FEATURES)])
@pytest.mark.parametrize("use", some_uses())
def test_nothing_is_missing_from_a_part_that_leaves_features_out(use: str, without: tuple[str, ...]) -> None:
    assert undefined(runtime_files.closure_of([use], "cuda", without)) == {}


def of_llama(forms: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> tuple[set[str], set[str]]:
    """Return the rooms, and the names, of what decodes with an RMSNorm."""
    uses = ("decode.GraphGeneration", "norms.add_norm", "products.gated_linear", "attention.qkv_step", *forms)
    taken = runtime_files.closure_of(uses, "cuda", without)
    return set(taken.rooms), {own.name for own in taken.definitions}


def test_what_no_module_can_be_is_not_there() -> None:
    kernels = {"layer_norm_kernel", "add_layer_norm", "IndexedLayer", "StateLayer"}
    assert not of_llama()[1] & kernels
    assert of_llama(tuple(FORMS))[1] >= kernels
    assert of_llama(("norms.add_layer_norm",))[1] & kernels == {"layer_norm_kernel", "add_layer_norm"}


@pytest.mark.parametrize("marks", [(), *((mark,) for mark in MARKS["CARRIED"])])
def test_what_no_class_is_marked_for_is_not_there(marks: tuple[str, ...]) -> None:
    names = of_llama(marks)[1]
    carried = {"CarriedStates", "put_back", "_places"}
    assert names & carried == (carried if marks else set())
    assert {"NoStates", "carried_by", "restoring"} <= names


def test_what_is_left_out_leaves_nothing_behind() -> None:
    rooms, names = of_llama()
    assert "parallel" in rooms
    assert {"BlockLinear", "block_linear_kernel", "RANKS", "FORMATS"} <= names
    rooms, names = of_llama(without=("ranks",))
    assert "parallel" not in rooms
    assert names & {"BlockLinear", "Ranks"} == {"BlockLinear"}
    rooms, names = of_llama(without=("formats",))
    assert "parallel" in rooms
    assert not names & {"BlockLinear", "block_linear_kernel"}
    drafts = {"DraftedLoop", "Assistant", "Window", "Alignment", "look_up_kernel", "move_rows_kernel", "lookup_of"}
    assert drafts <= names
    assert not of_llama(without=("speculation",))[1] & drafts
    more = {"StepInputs", "Written", "AttentionBackendUnavailable", "flat_files", "packed_run"}
    assert more <= of_llama(("forward.CapturedForward", "attention.native_gqa"))[1]
    without = ("inputs", "eager", "attention", "upload", "ragged")
    names = of_llama(("forward.CapturedForward", "attention.native_gqa"), without)[1]
    assert not names & more
    operators = ("attention.rotary", "norms.add_rms_norm")
    learns = {"rms_norm_backward_kernel", "_AddRmsNorm", "_Rotary", "_GatedActivation", "learned_projections", "again"}
    assert learns <= of_llama(operators)[1]
    assert not of_llama(operators, without=("training",))[1] & {*learns, "learns", "_slope", "remember"}
    assert {"transposed_linear_kernel", "turn"} <= of_llama(("products.transposed",))[1]
    assert not of_llama()[1] & {"transposed_linear_kernel", "turn"}
    assert {"CHAINS", "Chain", "launch_chain"} <= of_llama(("products.Chain",))[1]
    _, names = of_llama(("products.Chain",), without=("chains",))
    assert not names & {"CHAINS", "Chain", "Node", "launch_chain", "kernel_of"}


def test_prompts_are_read_by_steps_that_are_whole() -> None:
    assert "READS" not in left_out("cuda", ["attention.qkv_step"], ())
    assert "READS" in left_out("cuda", ["attention.qkv_step", "attention.attend_step"], ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class TinyRMSNorm:\n    'As LayerNorm.'\n    def f(self): return self.input_layernorm", []),
        ("from torch import nn\nnorm = nn.LayerNorm(8)", ["norms.add_layer_norm"]),
        ("from torch.nn import LayerNorm as Norm", ["norms.add_layer_norm"]),
        ("import torch.nn.functional as F\ndef f(x): return F.layer_norm(x, (8,))", ["norms.add_layer_norm"]),
        ("from torch import nn\nnorm = nn.RMSNorm(8, eps=1e-6)", ["norms.torch_rms_norm"]),
        ("class TinyIndexer: ...", ["cache.IndexedLayer"]),
        ("def f(cache): cache.update_conv_state(1)", ["cache.StateLayer"]),
        ("import torch\ndef f(): return torch.rand([])", ["forward.Draws"]),
        ("from transformers.generation import AlternatingCodebooksLogitsProcessor", ["decode.Codebooks"]),
        ("class A:\n    def f(self): return self.config.is_encoder_decoder", ["decode.Encoded"]),
        ("from transformers.pytorch_utils import Conv1D", ["products.transposed"]),
        ("import torch\ndef f(x, w, b): return torch.addmm(b, x, w)", ["products.transposed"]),
        ("from transformers import AutoModel\ninner = AutoModel.from_config", [*FORMS]),
        ("from transformers.models.llama.modeling_llama import LlamaMLP", [*FORMS]),
        ("from transformers.models.llama.configuration_llama import LlamaConfig", []),
        ("from .neighbour import Norm", [*FORMS]),
        ("from . import neighbour", [*FORMS]),
        ("from .runtime.norms import rms_norm\nfrom .configuration_tiny import TinyConfig", []),
    ],
)
def test_forms_are_told_by_what_a_file_names(text: str, found: list[str]) -> None:
    assert forms_of(text) == found


@pytest.mark.parametrize("line", [
    "self.calls = 1", "self.calls += 1", "self.a, b = x, x", "del self.memory", "layer.memory = x", "x[0] = 1",
    "self.states['a'] = x", "self.states['a'].mul_(x)", "self.tokens.append(x)", "x.mul_(2)", "self.weight.data",
    "y = self.memory\n        y += x", "y = []\n        y = x\n        y.append(1)", "setattr(self, 'a', x)",
    "torch.add(x, x, out=self.memory)", "F.relu(x, inplace=True)", "vars(self)", "for self.a in x: pass",
    "with x as self.a: pass", "self.__dict__", "global SEEN\n        SEEN = x", "SEEN.append(x)",
    "(self.a or self.b)(x)", "def inner(): self.a = x", "lambda: self.tokens.append(x)", "import mamba_ssm",
    "from fla import layers", "self.set_rows(x)", "self.memory.copy_(x)", "self.a[0].b = x",
    "self.register_buffer('a', x)",
])  # fmt: skip
def test_code_that_may_change_a_module_brings_what_looks_for_that(line: str) -> None:
    text = f"import torch\nclass Part:\n    def forward(self, x):\n        {line}\n"
    assert "decode.Before" in forms_of(text)


@pytest.mark.parametrize("line", [
    "return self.a + x", "cache.update(x, x, 0)", "past_key_values.update(x, x, self.layer_idx)",
    "y = []\n        for z in x: y.append(z)", "y = {}\n        y['a'] = x", "y = x.to(x.dtype).transpose(1, 2)",
    "return torch.nn.functional.relu(x)", "import math",
])  # fmt: skip
def test_code_that_changes_no_module_does_not(line: str) -> None:
    inits = "    def __init__(self):\n        self.a = 1\n        self.register_buffer('b', None)\n"
    text = f"import torch\nclass Part:\n{inits}    def forward(self, x):\n        {line}\n"
    assert forms_of(text) == []
    assert {"Before", "Kept"} <= of_llama(("decode.Before",))[1]
    assert not of_llama()[1] & {"Before", "Kept"}


LOOP = "from .runtime.decode import GraphGeneration\n"
LAYER = "class Layer:\n    def forward(self, x, cache):\n        if {}:\n            return self.decode(x, cache)\n"
MODEL = "class Model:\n    def forward(self, x, cache):\n        mask = {}create_causal_mask(x)\n"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LAYER.format("decodes(cache)") + MODEL.format("None if needs_no_mask(cache) else "), False),
        (LAYER.format("decodes(cache) and self.asks") + MODEL.format("None if decodes(cache) else "), True),
        (LAYER.format("decodes(cache)") + MODEL.format(""), True),
        (MODEL.format("None if decodes(cache) else "), True),
        ("from .runtime.moe import router\n" + LAYER.format("decodes(cache)"), True),
        ("from .runtime.attention import attend_step\n" + LAYER.format("decodes(cache)"), True),
    ],
)
def test_where_all_of_a_step_is_kernels_nothing_makes_more_of_them(text: str, calls: bool) -> None:
    assert ("products.Chain" in forms_of(LOOP + text)) is calls
    assert ("decode.StepConstants" in forms_of(LOOP + text)) is calls
    assert "products.Chain" not in forms_of(text)


def test_an_activation_with_parameters_of_its_own_is_computed_of_them_alone() -> None:
    text = LOOP + LAYER.format("decodes(cache)")
    assert forms_of(text) == []
    assert forms_of(f'{text}\nACT = ACT2CLS["xielu"]\n') == ["decode.StepConstants"]
    assert "StepConstants" in of_llama(("decode.StepConstants",))[1]
    assert "StepConstants" not in of_llama()[1]


def test_every_switch_of_the_runtime_is_decided() -> None:
    decided = {"ROCM"} | {name for name, *_ in (*FEATURES.values(), *FORMS.values())} | {*MARKS}
    assert set(parts.SWITCHES) == decided
    assert {name for part in parts.file(parts.SWITCHES_FILE).parts for name in part.names} == decided


def test_a_definition_that_is_missing_is_noticed() -> None:
    taken = runtime_files.closure_of(["norms.rms_norm"], "cuda")
    without = frozenset(part for part in taken.parts if part.names != ("result_dtype",))
    assert any("result_dtype" in line for line in undefined(dataclasses.replace(taken, parts=without))["norms"])


def test_every_file_of_a_room_has_names_of_its_own() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for own, name in parts.final_names().items():
        places.setdefault((own.file.split("/")[0], name), []).append(own.file)
    assert {place: files for place, files in places.items() if len(files) > 1} == {}


def test_what_is_read_through_a_file_has_its_name() -> None:
    names = parts.final_names()
    assert names[Own("core/rows", "order")] == "rows_order"
    assert names[Own("core/deferring", "sum")] == "deferring_sum"
    assert names[Own("norms/layer_norm", "_forward")] == "_layer_norm_forward"
    assert names[Own("norms/rms_norm", "rms_norm")] == "rms_norm"


def reader(monkeypatch: pytest.MonkeyPatch, text: str) -> parts.File:
    """Return the parts of a file of the room `norms` with this text."""
    parts._parsed.cache_clear()
    parts._bindings.cache_clear()
    monkeypatch.setattr(parts, "own_text", lambda name: text)
    try:
        return parts._Reader("norms/other").read()
    finally:
        parts._parsed.cache_clear()
        parts._bindings.cache_clear()


def test_what_a_function_hides_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "def g(): ...\ndef h(): ...\n"
        "def f(g, x):\n    h = [g for y in x]\n    return g, h, lambda h: h\n"
        "def k():\n    return g, [h for g in ()]\n"
    )
    found = reader(monkeypatch, text)
    assert [[use.written for use in part.uses] for part in found.parts] == [[], [], [], ["g", "h"]]


def test_a_branch_that_is_left_out_hands_over_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "def f(x):",
        "    if ROCM and g(x):",
        "        return 1",
        "    elif x:",
        "        return 2",
        "    elif ROCM:",
        "        return h(x)",
        "    if ROCM:",
        "        return 3",
        "    else:",
        "        if x:",
        "            return 4",
    ]
    found = reader(monkeypatch, "def g(x): ...\ndef h(x): ...\n" + "\n".join(lines) + "\n")
    part = found.parts[2]
    assert [use.written for use in part.uses if use.switch != "ROCM"] == []
    monkeypatch.setattr(parts, "file", lambda name: found)
    monkeypatch.setattr(parts, "final_names", lambda: {Own(part.file, name): name for name in "fgh"})
    assert bundle._text(part, frozenset()) == lines
    assert bundle._text(part, frozenset({"ROCM"})) == [
        lines[0],
        "    if x:",
        lines[4],
        "    if x:",
        "        return 4",
    ]
    with pytest.raises(NotFollowed, match="else behind elif ROCM"):
        reader(monkeypatch, "def f(x):\n    if x: ...\n    elif ROCM: ...\n    else: ...\n")


def test_what_only_a_variant_of_a_kernel_has_goes_with_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["def kernel(x, CENTRED):", "    if CENTRED:", "        x = g(x)", "    else:", "        x = h(x)"]
    found = reader(monkeypatch, "def g(x): ...\ndef h(x): ...\n" + "\n".join(lines) + "\n")
    part = found.parts[2]
    monkeypatch.setattr(parts, "file", lambda name: found)
    monkeypatch.setattr(parts, "final_names", lambda: {Own(part.file, name): name for name in ("g", "h", "kernel")})
    assert [use.written for use in parts.uses(part, frozenset({"LAYER_NORM"}))] == ["h"]
    assert bundle._text(part, frozenset({"LAYER_NORM"})) == [lines[0], "    x = h(x)"]
    assert bundle._text(part, frozenset()) == lines


def test_no_variant_of_a_kernel_is_launched_that_is_not_there() -> None:
    """`CENTRED` and `SHIFT` are of a `LayerNormPrologue`, which nothing makes where no module can be a LayerNorm."""
    uses = ("decode.GraphGeneration", "attention.qkv_step", "products.gated_linear")
    for forms, makes in ((), False), (("norms.add_layer_norm",), True):
        made = runtime_files.files(runtime_files.closure_of([*uses, *forms], "cuda", ()))
        text = "\n".join(data.decode() for data in made.values()).replace("class LayerNormPrologue(", "")
        assert (makes, makes) == ("LayerNormPrologue(" in text, "if CENTRED:" in text)


@pytest.mark.parametrize("use", [offer.use for offer in offers() if offer.room == "moe"])
def test_what_loads_layers_as_they_are_published_comes_with_them(use: str) -> None:
    taken = runtime_files.closure_of(["package.NativeCheckpoint", use], "cuda", ())
    names = {own.name for own in taken.definitions}
    assert ("MxExperts" in names) == ("_published" in names)
    assert {"MxExperts", "BlockLinear"}.isdisjoint(of_llama(without=("formats",))[1])


def test_methods_go_with_what_calls_them() -> None:
    made = runtime_files.files(runtime_files.closure_of(["decode.GraphGeneration"], "cuda", ()))
    products, decode = made["runtime/products.py"].decode(), made["runtime/decode.py"].decode()
    assert not [name for name in ("_layer_norm", "_turned", "take_out", "is_read") if f"def {name}(" in products]
    assert "def _once_more(" not in decode
    with_all = runtime_files.files(runtime_files.closure_of(["decode.GraphGeneration", *FORMS], "cuda", ()))
    assert "        def _turned(" in with_all["runtime/products.py"].decode()
    assert "        def _once_more(" in with_all["runtime/decode.py"].decode()


@pytest.mark.parametrize("opening", ["def kernel(  # type: ignore[no-untyped-def]", "from .core import ("])
def test_parameters_and_imported_names_stand_several_in_a_line(opening: str) -> None:
    names = [f"some_pointer_{number}" for number in range(9)]
    last = "I: tl.constexpr,  # noqa: E741" if opening.startswith("def") else "some_constant,"
    closing, body = ("):", "    return 1\n") if opening.startswith("def") else (")", "")
    given = "".join(f"    {name},\n" for name in names) + f"    {last}\n"
    filled = bundle._with_filled_lines(f"{opening}\n{given}{closing}\n{body}")
    assert filled == (
        f"{opening}\n    {', '.join(names[:7])},\n    {', '.join(names[7:])}, {last}\n{closing}  # fmt: skip\n{body}"
    )
    assert bundle._with_filled_lines(filled) == filled


def test_formatters_and_sorters_of_imports_leave_a_room_as_it_is(tmp_path: Path) -> None:
    made = runtime_files.files(runtime_files.closure_of(["attention.qkv_step"], "cuda", ()))
    for path, text in made.items():
        (tmp_path / Path(path).name).write_bytes(text)
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--isolated", "--no-cache", "--line-length", "119"]
    subprocess.run([*ruff, "format", *settings, "--check", "."], cwd=tmp_path, check=True)
    subprocess.run([*ruff, "check", *settings, "--select", "I", "."], cwd=tmp_path, check=True)


def test_one_parameter_of_several_lines_keeps_the_list_as_it_is() -> None:
    text = "def function(\n    first: int,\n    second: dict[\n        str, int\n    ],\n) -> None: ...\n"
    assert bundle._with_filled_lines(text) == text
    one_line = "def function(\n    first: int, second: int\n) -> None: ...\n"
    assert bundle._with_filled_lines(one_line) == one_line
    commented = "call(\n    first,  # why\n    second,\n)\n"
    assert bundle._with_filled_lines(commented) == commented
    assert (
        bundle._with_filled_lines("x = call(\n    first,\n    second,\n)\n")
        == "x = call(\n    first, second,\n)  # fmt: skip\n"
    )


def test_what_cannot_be_followed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ("rows", "rows.order = 1"):
        with pytest.raises(NotFollowed, match="rows is a file"):
            reader(monkeypatch, f"from ..core import rows\ndef f():\n    {body}\n")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime of a package that decodes, with nothing but an `__init__.py` above it."""
    folder = tmp_path_factory.mktemp("bundle") / "bundled"
    taken = runtime_files.closure_of(["decode.GraphGeneration", "norms.rms_norm", "attention.rotary"], "cuda")
    for name, data in {"__init__.py": b"", **runtime_files.files(taken)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_aiter_without_its_files_is_one_clear_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(package.parent)
    runtime = importlib.import_module("bundled.runtime")
    with pytest.raises(RuntimeError, match="--target rocm"):
        runtime.set_backend("aiter")


def test_kernels_run_from_one_file_a_room(package: Path) -> None:
    pytest.importorskip("triton")
    np = pytest.importorskip("numpy")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter needs numpy before 2.4, as [dev] has it")
    code = (
        "import torch\n"
        "from bundled.runtime.norms import rms_norm, rms_norm_reference\n"
        "x, weight = torch.randn(3, 40), torch.randn(40)\n"
        "from bundled.runtime import explain\n"
        "torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6, 0.0, False))\n"
        "assert explain().fallbacks == {}, explain().fallbacks\n"
        "print(explain())\n"
    )
    given = os.environ | {"TRITON_INTERPRET": "1", "REWRITE_BACKEND": "triton", "PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every operator took its fast form" in done.stdout


SDPA = "class Model:\n    _supports_sdpa = True\n"
SOFTMAX = "def {}(q, k, v):\n    return F.softmax(q @ k, -1) @ v\n"


STEP = "class Model(GraphGeneration):\n    {}\n"
PLAIN = STEP.format("def forward(self, input_ids, attention_mask=None, past_key_values=None, **kwargs): ...")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("class Model: ...", False),
        (PLAIN, False),
        (STEP.format("def forward(self, input_ids, pixel_values=None): ..."), True),
        (STEP.format("def forward(self, input_ids, *, decoder_input_ids=None): ..."), True),
        (STEP.format("def forward(self, input_ids, *more): ..."), True),
        (STEP.format("config: int"), True),  # who knows what is inherited
        (f"{PLAIN}    def prepare_inputs_for_generation(self): ...\n", True),
    ],
)
def test_what_a_step_may_be_given_is_told_by_the_file(text: str, needed: bool) -> None:
    assert ("inputs" in needed_by(text)) == needed


@pytest.mark.parametrize(("name", "needed"), [("TinyForMaskedLM", True), ("TinyForCausalLM", False)])
def test_batches_without_padding_come_where_models_are_called_with_texts(name: str, needed: bool) -> None:
    assert ("ragged" in needed_by(f"class {name}: ...")) == needed


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (SDPA, False),
        ("class Model: ...", True),  # transformers takes its attention then, which is the file's
        (f"{SDPA}class Other:\n    _supports_sdpa = False\n", True),
        (f"{SDPA}{SOFTMAX.format('eager')}chosen = get_interface(eager)\n", False),
        (f"{SDPA}{SOFTMAX.format('attend')}def forward(q, k, v):\n    return attend(q, k, v)\n", True),
        (f"{SDPA}class Attention:\n    {SOFTMAX.format('forward').replace(chr(10), chr(10) + '    ')}", True),
        (f"{SDPA}import torch\nclass Router:\n    act = torch.nn.Softmax(-1)\n", True),
        (f"{SDPA}from transformers import AutoModel\ninner = AutoModel.from_config\n", True),
    ],
)
def test_attention_that_is_written_out_is_told_by_the_file(text: str, needed: bool) -> None:
    assert ("eager" in needed_by(text)) == needed
