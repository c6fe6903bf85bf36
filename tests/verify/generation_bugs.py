"""Bugs planted into the steps of everything that generates; each names the check of the loop that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rewrite.verify import Options
from rewrite.verify.generation.loop_checks import loop_checks
from rewrite.verify.generation.loop_scenarios import talk_checks
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.verdict import Check
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import paired
from rewrite.verify.runner import settled

from .bugs import Bug
from .copies import plant as plant_into
from .copies import upstream


@dataclass(frozen=True)
class LoopBug(Bug):
    """A bug in the loop of `model_class`; `check` is the end of the name of the check that catches it.

    `also` are more replacements, `(file, old, new)`: where the code is safe twice.
    """

    model_class: str = ""
    check: str = ""
    also: tuple[tuple[str, str, str], ...] = ()


CLASSES = {
    "lfm2": "Lfm2ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "minicpm3": "MiniCPM3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "xlstm": "xLSTMForCausalLM",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
}
FILES = {
    "states": "_runtime",
    "layers": "_runtime",
    "cache": "_runtime",
    "inputs": "_runtime",
    "graph": "_runtime",
    "loop": "_runtime",
    "fitness": "_runtime",
    "sampling": "_runtime",
    "latents": "_runtime/attention/latent_attention.py",
    "segments": "_runtime",
}
ONE, PADDED, DRAWS, AGAIN, CONTINUED, ENDED, STREAMED, HOST, BEAMS, BEGUN, IMAGES = (
    "a row", "rows with padding, one ends", "draws", "calls one after another", "a cache that came back",
    "a cache of a text that ended", "tokens streamed", "tokens that the host chooses", "beams",
    "a text behind an encoder that has begun", "images in the prompt",
)  # fmt: skip
BY_HAND = "step by step, one row without a mask"


def bug(model: str, name: str, check: str, file: str, old: str, new: str, **more: Any) -> LoopBug:
    more |= {"file": FILES.get(file, file or None), "model_class": CLASSES[model], "check": check}
    return LoopBug(model, name, old, new, "generation", **more)


def plant(bug: LoopBug, package: Path) -> None:
    """Put a bug into a package, in place."""
    for name, old, new in ((bug.file or f"modeling_{bug.model}.py", bug.old, bug.new), *bug.also):
        plant_into(package, name, old, new)


def result_of(bug: LoopBug, package: Path) -> Check:
    """Run the check that a bug names on a package."""
    original = loaded_sides.load(loaded_sides.locate(upstream(bug.model)))
    subject = next(
        s for s in paired(original, loaded_sides.load(loaded_sides.locate(package))) if s.name == bug.model_class
    )
    with settled(Options()):
        variants = small_variants(subject.original, subject.causal, {})[:1]
        bench = Workbench(subject, variants, Options())
        checks = (*talk_checks(bench), *loop_checks(bench, variants))
        return next(run_check(check) for check in checks if check.name.endswith(f", {bug.check}"))


FLAG = (
    (
        FILES["states"],
        "target.has_previous_state = dict(source.has_previous_state)",
        "target.has_previous_state |= {i: True for i, had in source.has_previous_state.items() if had}",
    ),
)
RESTORED = "torch._foreach_copy_(written, copies)"
COPIED = "into[index].copy_(state)"
ENDS_AT_ONCE = "            chunk, ahead = 1, 1  # states cannot go back to the end\n"
STATE_COPIES = "states.copy(mine, theirs)"
STATE_INIT = "super().lazy_initialization(*args, **kwargs)"

lfm2, mamba2, falcon_h1 = (partial(bug, model) for model in ("lfm2", "mamba2", "falcon_h1"))

STATES = (
    lfm2("states not reset between calls", AGAIN, "cache", "states.forget(layer)", "pass", also=FLAG),
    mamba2("states not reset between calls", AGAIN, "cache", "states.forget(layer)", "pass", also=FLAG),
    lfm2("states not restored after the proof", ONE, "states", RESTORED, "pass"),
    mamba2("only the first state restored", ONE, "states", RESTORED, "torch._foreach_copy_(written[:1], copies[:1])"),
    mamba2(
        "recurrent state not continued",
        CONTINUED,
        "states",
        "    for kind in _KINDS:\n        into =",
        "    for kind in _KINDS[:1]:\n        into =",
    ),
    falcon_h1(
        "convolution not continued",
        CONTINUED,
        "states",
        "    for kind in _KINDS:\n        into =",
        "    for kind in _KINDS[1:]:\n        into =",
    ),
    mamba2("states rounded as they are handed over", ONE, "states", COPIED, "into[index].copy_(state.bfloat16())"),
    lfm2("a state handed over that a later call writes", CONTINUED, "states", COPIED, "into[index] = state"),
    lfm2("the first row's state in all rows", CONTINUED, "states", COPIED, "into[index].copy_(state[:1])"),
    mamba2("rows of a state exchanged", CONTINUED, "states", COPIED, "into[index].copy_(state.flip(0))"),
    lfm2("convolution window off by one", CONTINUED, "states", COPIED, "into[index].copy_(state.roll(1, -1))"),
    lfm2(
        "a continued state taken for a first one",
        CONTINUED,
        "states",
        "    target.has_previous_state = dict(source.has_previous_state)\n",
        "",
    ),
    lfm2("states after the overshoot, a chunk", ENDED, "loop", ENDS_AT_ONCE, "            pass\n"),
    mamba2("states after the overshoot, a chunk", ENDED, "loop", ENDS_AT_ONCE, "            pass\n"),
    mamba2("states after the overshoot, one step", ENDED, "loop", "chunk, ahead = 1, 1", "chunk, ahead = 1, 2"),
    falcon_h1("states after the overshoot", ENDED, "loop", "chunk, ahead = 1, 1", "chunk, ahead = 2, 1"),
    lfm2("rows of states that beams do not choose", BEAMS, "layers", "choose_rows(state, beam_idx)", "pass"),
    falcon_h1(
        "rows of keys that beams do not choose",
        BEAMS,
        "layers",
        "for buffer in (self.keys, self.values):\n            if buffer is not None:\n                choose_rows",
        "for buffer in (self.keys, self.values):\n            if buffer is None:\n                choose_rows",
    ),
    lfm2("a token that is chosen and not read", HOST, "loop", "graph.state.input_ids.copy_(tokens[:, None])", "pass"),
    mamba2("states not handed back", CONTINUED, "cache", STATE_COPIES, "pass"),
    falcon_h1(
        "states not taken over",
        CONTINUED,
        "cache",
        "states.copy(theirs, mine)\n\n    def store",
        "pass\n\n    def store",
    ),
    mamba2(
        "recurrent state in 16 bits",
        ONE,
        "layers",
        STATE_INIT,
        "super().lazy_initialization(*args, **{n: v.bfloat16() if hasattr(v, 'bfloat16') else v"
        " for n, v in kwargs.items()})",
    ),
    lfm2(
        "convolution in 16 bits",
        ONE,
        "layers",
        STATE_INIT,
        "super().lazy_initialization(*args, **{n: v.bfloat16() if hasattr(v, 'bfloat16') else v"
        " for n, v in kwargs.items()})",
    ),
    lfm2(
        "a wider convolution window",
        ONE,
        "layers",
        STATE_INIT,
        "super().lazy_initialization(*args, **kwargs | {'conv_kernel_size': 4})",
    ),
    falcon_h1(
        "keys behind their place",
        ONE,
        "layers",
        "key_states, value_states, self.cache.slots)",
        "key_states, value_states, self.cache.position - 1)",
    ),
    lfm2(
        "a step that leaves its state behind",
        ONE,
        "",
        "conv_state.copy_(hidden_states_new[:, :, -state_len:])",
        "pass",
    ),
    lfm2(
        "a step with a window off by one",
        ONE,
        "",
        "conv_state.copy_(hidden_states_new[:, :, -state_len:])",
        "conv_state.copy_(hidden_states_new[:, :, -state_len - 1 : -1])",
    ),
    mamba2("a step that leaves its state behind", ONE, "", "state.copy_(ssm_states.to(state.dtype))", "pass"),
    mamba2(
        "decay in 16 bits",
        ONE,
        "",
        "dA = torch.exp(dt.float() * A.float())",
        "dA = torch.exp(dt.bfloat16() * A.bfloat16())",
    ),
)
