"""Who is said to generate in a decode loop, and what such a loop reaches."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from torch import nn

from hf_rewrite_runtime.core import explanation
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.loading.original_checkpoint import OriginalCheckpoint
from rewrite.codemod.decode_loops import with_loops
from rewrite.codemod.passes import rewrite_text
from rewrite.package.lock import Lock, Options, Origin, read_lock
from rewrite.sync import review
from rewrite.transform import COMMON_REASONS, Rewritten, SkippedSite, TransformReport
from rewrite.transforms import all_transforms

TRANSFORMS = {transform.name: transform for transform in all_transforms()}
FILE = """
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from hf_rewrite_runtime.generate.generation import GraphGeneration
from .generation_other import OtherGenerationMixin


class Layer:
    def forward(self, x):
        return helper(x)


class VisionLayer:
    def forward(self, x):
        return x


LAYERS = {"text": Layer}


def helper(x):
    return x


class Base(PreTrainedModel):
    _can_record_outputs = {"hidden_states": VisionLayer}

    def _init_weights(self, module):
        if isinstance(module, VisionLayer):
            module.reset()


class TextModel(Base):
    def __init__(self, config):
        self.layers = [LAYERS[kind](config) for kind in config.kinds]


class Text(Base, GraphGeneration):
    def __init__(self, config):
        self.model = TextModel(config)


class MoreText(Text):
    pass


class WithImages(Base, GenerationMixin):
    def __init__(self, config):
        self.model = TextModel(config)
        self.vision = VisionLayer()


class Elsewhere(Base, OtherGenerationMixin):
    pass


class Own(Base):
    def generate(self):
        return self


class Circle(Circle):
    pass
"""
SITES = ("Layer", "VisionLayer", "WithImages.forward: torch.arange(past, past + 1)", "helper", "TextModel.forward")
REPORTS = (
    TransformReport("decode_layers", SITES),
    TransformReport("fuse_qkv", ("VisionLayer.forward: q, k, v",)),
    TransformReport("static_cache", ("Text",), (SkippedSite("WithImages", "own_cache", "OtherCache"),)),
)


def judged(text: str = FILE, leave_out: str = "") -> Rewritten:
    names = [report.name for report in REPORTS if report.name != leave_out]
    reports = tuple(report for report in REPORTS if report.name != leave_out)
    return with_loops(Rewritten(text, reports), [TRANSFORMS[name] for name in names])


def test_every_class_that_generates_is_named() -> None:
    said = judged().decode_loops
    assert said.keys() == {"Text", "MoreText", "WithImages", "Elsewhere", "Own"}
    assert said["Text"] == said["MoreText"] == "yes"
    rule = TRANSFORMS["static_cache"]
    assert said["WithImages"] == (
        f"no: {rule.reasons['own_cache']} (OtherCache); it would take {rule.needs['own_cache']}"
    )
    assert "OtherGenerationMixin" in said["Elsewhere"]
    assert "`generate` of its own" in said["Own"]


def test_what_no_loop_reaches_is_not_applied() -> None:
    layers, qkv, cache = judged().transforms
    assert layers.unreached == ("VisionLayer", "WithImages.forward: torch.arange(past, past + 1)")
    assert qkv.unreached == cache.unreached == (), "a fused product needs no loop"
    nobody = judged(FILE.replace("GraphGeneration", "GenerationMixin"))
    assert nobody.transforms[0].unreached == SITES
    assert "yes" not in nobody.decode_loops.values()


def test_without_the_rule_no_class_has_a_loop() -> None:
    said = judged(FILE.replace("GraphGeneration", "GenerationMixin"), leave_out="static_cache").decode_loops
    assert "left out" in said["Text"]


def test_every_reason_against_a_loop_says_what_it_would_take() -> None:
    for transform in TRANSFORMS.values():
        sites = {"other_range", "host_test"}  # of code, not of classes
        assert not transform.needs or transform.reasons.keys() - sites <= transform.needs.keys()
        assert transform.needs.keys() <= transform.reasons.keys() | COMMON_REASONS.keys()


def test_of_a_whole_file() -> None:
    path = Path(__file__).parents[1] / "fixtures" / "models" / "modeling_tiny_llama.py"
    rewritten = rewrite_text(path.read_text(encoding="utf-8"), list(TRANSFORMS.values()))
    assert dict(rewritten.decode_loops) == {"TinyLlamaForCausalLM": "yes"}
    assert not any(report.unreached for report in rewritten.transforms)


PARTS = """
from transformers.generation import GenerationMixin
from transformers.models.other.modeling_other import OtherForCausalLM

from hf_rewrite_runtime.decode.eligibility import within_window
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.loading.auto import from_config


class Text(Base, GraphGeneration):
    pass


@within_window
class Windowed(Base, GraphGeneration):
    pass


@grows_in_layers(Tracks, add_small=("small", 1))
class Unpadded(Base, GraphGeneration):
    pass


class Adds(Text):
    def generate(self, sound, language=None, **kwargs):
        if language is None:
            raise ValueError("which language?")
        return super().generate(inputs_embeds=self.hear(sound), **kwargs)


class AddsInEveryWay(Base, GraphGeneration):
    def generate(self, sound=None, **kwargs):
        with self.adapters():
            if sound is None:
                out = super().generate(**kwargs)
            else:
                out = super().generate(inputs_embeds=self.hear(sound), **kwargs)
        if kwargs:
            return out.sequences
        return out


class AddsInOneWay(Base, GraphGeneration):
    def generate(self, pixels=None, **kwargs):
        if pixels is not None:
            return self.paint(pixels)
        return super().generate(**kwargs)


class AddsInALoop(Base, GraphGeneration):
    def generate(self, times, **kwargs):
        for _ in range(times):
            out = super().generate(**kwargs)
        return out


class WantsStates(Base, GraphGeneration):
    def generate(self, **kwargs):
        kwargs["output_hidden_states"] = True
        return self.speak(super().generate(**kwargs))


class WantsStatesByName(Base, GraphGeneration):
    def __init__(self, config):
        self.voice = Text(config)

    def generate(self, **kwargs):
        return self.voice.generate(super().generate(output_hidden_states=True, **kwargs))


class MayWantStates(Base, GraphGeneration):
    def generate(self, speaks=False, **kwargs):
        if speaks:
            kwargs["output_hidden_states"] = True
        return super().generate(**kwargs)


class HandsOver(Base, GenerationMixin):
    def __init__(self, config):
        self.text_model = Text(config.text)

    def generate(self, pixels, **kwargs):
        return self.text_model.generate(inputs_embeds=self.look(pixels), **kwargs)


class HandsOverTwice(Base):
    def __init__(self, config):
        self.first = Adds(config)
        self.second, self.third = Own(config), None
        self.second = Own(config)

    def generate(self, **kwargs):
        return self.second.generate(self.first.generate(**kwargs))


class ToAnotherFile(Base, GenerationMixin):
    def __init__(self, config):
        self.text = OtherForCausalLM(config)

    def generate(self, **kwargs):
        return self.text.generate(**kwargs)


class ToOneOfTwo(Base, GenerationMixin):
    def __init__(self, config):
        if config.encodes:
            text = from_config(AutoModelForSeq2SeqLM, config.text, module=__name__)
        else:
            text = AutoModelForCausalLM.from_config(config.text)
        self.text = text

    def generate(self, **kwargs):
        return self.text.generate(**kwargs)


class Own(Base):
    def generate(self):
        return self


class ToOwn(Base, GenerationMixin):
    def __init__(self, config):
        self.own = Own(config)

    def generate(self):
        return self.own.generate()


class RefusedAndAdds(Base, GenerationMixin):
    def __init__(self, config):
        self.depth = Text(config)

    def generate(self, **kwargs):
        return self.depth.generate(super().generate(**kwargs))


class NotInherited(Text):
    def generate(self, **kwargs):
        return self.draw(**kwargs)


class ToItself(Base, GenerationMixin):
    def __init__(self, config):
        self.inner = ToItself(config)

    def generate(self, **kwargs):
        return self.inner.generate(**kwargs)
"""


@pytest.mark.parametrize(("site", "stays"), [("Layer.forward: for e", True), ("VisionLayer.forward: for e", False)])
def test_no_graph_is_promised_to_a_step_that_asks_the_device(site: str, stays: bool) -> None:
    reports = (*REPORTS, TransformReport("fixed_count_loops", (), (SkippedSite(site, "other_loop"),)))
    transforms = [TRANSFORMS[report.name] for report in reports]
    said = with_loops(Rewritten(FILE, reports), transforms).decode_loops
    wanted = f"no: {site} asks the device how to go on; it would take a loop of a fixed count" if stays else "yes"
    assert said["Text"] == said["MoreText"] == wanted
    reports = (*REPORTS, TransformReport("fixed_count_loops", (), (SkippedSite(site, "per_item"),)))
    assert with_loops(Rewritten(FILE, reports), transforms).decode_loops["Text"] == "yes"


def test_a_generate_of_a_class_s_own_may_leave_the_loop_to_another() -> None:
    reports = (TransformReport("static_cache", (), (SkippedSite("RefusedAndAdds", "own_loop", "generate"),)),)
    said = with_loops(Rewritten(PARTS, reports), [TRANSFORMS["static_cache"]]).decode_loops
    assert said["Text"] == said["Adds"] == said["AddsInEveryWay"] == said["MayWantStates"] == "yes"
    assert said["Windowed"] == "yes, for texts that a sliding window of its cache holds"
    assert said["Unpadded"] == "yes, for rows without padding"
    assert said["AddsInOneWay"] == said["AddsInALoop"] == "yes, as far as its own `generate` leaves the loop to it"
    assert said["WantsStates"].startswith("no: its `generate` asks for the hidden states of every token")
    assert said["WantsStatesByName"] == "yes, that of its `voice` (Text)"
    assert said["HandsOver"] == "yes, that of its `text_model` (Text)"
    assert said["HandsOverTwice"] == "yes, that of its `first` (Adds)"
    assert said["ToAnotherFile"].startswith("no: its loop is in another file (OtherForCausalLM)")
    assert "(AutoModelForSeq2SeqLM or AutoModelForCausalLM)" in said["ToOneOfTwo"]
    assert said["Own"] == said["ToOwn"] == said["NotInherited"]
    assert "`generate` of its own" in said["Own"]
    assert said["RefusedAndAdds"].endswith("(generate); it would take a step that does what this part does")
    assert said["ToItself"].startswith("no: ")


def lock() -> Lock:
    found = judged()
    files = {"modeling_x.py": "0" * 64}
    origin = Origin("x.py", "x.py", "0" * 64, None, None, None)
    return Lock(
        "0",
        origin,
        Options(),
        {},
        found.transforms,
        {},
        files,
        decode_loops=found.decode_loops,
        modeling="modeling_x.py",
    )


def test_the_lock_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "rewrite.lock").write_text(lock().to_json(), encoding="utf-8")
    read = read_lock(tmp_path)
    assert read.intact
    assert (read.decode_loops, read.transforms) == (lock().decode_loops, lock().transforms)


def test_the_review_has_a_line_for_each_class(tmp_path: Path) -> None:
    text = review.markdown(tmp_path, lock(), "", "")
    assert "| `Text` | yes |" in text
    assert "| `decode_layers` | 5, 2 of them out of a decode loop's reach | 0 |" in text
    assert "| `WithImages` | no: " in text


def modeling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a modeling file of a package lie in a folder."""
    module = types.ModuleType("package.modeling_x")
    module.__file__ = str(folder / "modeling_x.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)


FAST = "every operator took its fast form"


def test_explain_says_it_of_a_model_and_what_it_is_wrapped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewrite.lock").write_text(lock().to_json(), encoding="utf-8")
    modeling(tmp_path, monkeypatch)
    named = {"__module__": "package.modeling_x"}
    with_images = types.new_class("WithImages", (nn.Module,), exec_body=lambda space: space.update(named))
    text = types.new_class("Text", (nn.Module,), exec_body=lambda space: space.update(named))
    said = str(explanation.explain(nn.Sequential(with_images())))
    assert "WithImages: decode loop: no: " in said
    assert FAST not in said
    said = str(explanation.Explanation("auto", decode_loops=explanation.explain(text()).decode_loops))
    assert said.splitlines()[1:] == ["Text: decode loop: yes", FAST]
    assert FAST not in str(
        explanation.Explanation("auto", decode_loops=explanation.decode_loops("package.modeling_x"))
    )
    assert explanation.explain(nn.Linear(1, 1)).decode_loops == {}


def test_explain_without_a_lock_asks_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling(tmp_path, monkeypatch)
    body = {"__module__": "package.modeling_x", "generate": lambda self: self}
    plain = types.new_class("Plain", (OriginalCheckpoint, nn.Module), exec_body=lambda space: space.update(body))
    for text in (None, "<<<<<<< ours", "[]", '{"decode_loops": []}'):
        if text is not None:
            (tmp_path / "rewrite.lock").write_text(text)
        assert FAST not in str(explanation.explain(plain()))
    looped = types.new_class("Looped", (nn.Module, GraphGeneration), exec_body=lambda space: space.update(body))
    assert explanation.explain(looped()).decode_loops == {"Looped": "yes"}
