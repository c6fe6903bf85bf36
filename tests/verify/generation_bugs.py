"""Bugs planted into the steps of everything that generates; each names the check of the loop that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass
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
    "states": "_runtime/cache",
    "layers": "_runtime/cache",
    "cache": "_runtime/cache",
    "inputs": "_runtime/decode",
    "graph": "_runtime/decode",
    "loop": "_runtime/decode",
    "fitness": "_runtime/decode",
    "sampling": "_runtime/decode",
    "latents": "_runtime/attention",
    "segments": "_runtime/attention",
}
ONE, PADDED, DRAWS, AGAIN, CONTINUED, ENDED, STREAMED, BEGUN, IMAGES = (
    "a row", "rows with padding, one ends", "draws", "calls one after another", "a cache that came back",
    "a cache of a text that ended", "tokens streamed", "a text behind an encoder that has begun",
    "images in the prompt",
)  # fmt: skip
BY_HAND = "step by step, one row without a mask"


def bug(model: str, name: str, check: str, file: str, *, old: str, new: str, **more: Any) -> LoopBug:
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

STATES = (
    bug("lfm2", "states not reset between calls", AGAIN, "cache", old="states.forget(layer)", new="pass", also=FLAG),
    bug("mamba2", "states not reset between calls", AGAIN, "cache", old="states.forget(layer)", new="pass", also=FLAG),
    bug("lfm2", "states not restored after the proof", ONE, "states", old=RESTORED, new="pass"),
    bug(
        "mamba2",
        "only the first state restored",
        ONE,
        "states",
        old=RESTORED,
        new="torch._foreach_copy_(written[:1], copies[:1])",
    ),
    bug(
        "mamba2",
        "recurrent state not continued",
        CONTINUED,
        "states",
        old="    for kind in _KINDS:\n        into =",
        new="    for kind in _KINDS[:1]:\n        into =",
    ),
    bug(
        "falcon_h1",
        "convolution not continued",
        CONTINUED,
        "states",
        old="    for kind in _KINDS:\n        into =",
        new="    for kind in _KINDS[1:]:\n        into =",
    ),
    bug(
        "mamba2",
        "states rounded as they are handed over",
        ONE,
        "states",
        old=COPIED,
        new="into[index].copy_(state.bfloat16())",
    ),
    bug(
        "lfm2",
        "a state handed over that a later call writes",
        CONTINUED,
        "states",
        old=COPIED,
        new="into[index] = state",
    ),
    bug(
        "lfm2",
        "the first row's state in all rows",
        CONTINUED,
        "states",
        old=COPIED,
        new="into[index].copy_(state[:1])",
    ),
    bug(
        "mamba2", "rows of a state exchanged", CONTINUED, "states", old=COPIED, new="into[index].copy_(state.flip(0))"
    ),
    bug(
        "lfm2",
        "convolution window off by one",
        CONTINUED,
        "states",
        old=COPIED,
        new="into[index].copy_(state.roll(1, -1))",
    ),
    bug(
        "lfm2",
        "a continued state taken for a first one",
        CONTINUED,
        "states",
        old="    target.has_previous_state = dict(source.has_previous_state)\n",
        new="",
    ),
    bug("lfm2", "states after the overshoot, a chunk", ENDED, "loop", old=ENDS_AT_ONCE, new="            pass\n"),
    bug("mamba2", "states after the overshoot, a chunk", ENDED, "loop", old=ENDS_AT_ONCE, new="            pass\n"),
    bug(
        "mamba2",
        "states after the overshoot, one step",
        ENDED,
        "loop",
        old="chunk, ahead = 1, 1",
        new="chunk, ahead = 1, 2",
    ),
    bug(
        "falcon_h1", "states after the overshoot", ENDED, "loop", old="chunk, ahead = 1, 1", new="chunk, ahead = 2, 1"
    ),
    bug(
        "mamba2",
        "states not handed back",
        CONTINUED,
        "cache",
        old=STATE_COPIES,
        new="pass",
    ),
    bug(
        "falcon_h1",
        "states not taken over",
        CONTINUED,
        "cache",
        old="states.copy(theirs, mine)\n\n    def store",
        new="pass\n\n    def store",
    ),
    bug(
        "mamba2",
        "recurrent state in 16 bits",
        ONE,
        "layers",
        old=STATE_INIT,
        new="super().lazy_initialization(*args, **{n: v.bfloat16() if hasattr(v, 'bfloat16') else v"
        " for n, v in kwargs.items()})",
    ),
    bug(
        "lfm2",
        "convolution in 16 bits",
        ONE,
        "layers",
        old=STATE_INIT,
        new="super().lazy_initialization(*args, **{n: v.bfloat16() if hasattr(v, 'bfloat16') else v"
        " for n, v in kwargs.items()})",
    ),
    bug(
        "lfm2",
        "a wider convolution window",
        ONE,
        "layers",
        old=STATE_INIT,
        new="super().lazy_initialization(*args, **kwargs | {'conv_kernel_size': 4})",
    ),
    bug(
        "falcon_h1",
        "keys behind their place",
        ONE,
        "layers",
        old="key_states, value_states, self.cache.slots)",
        new="key_states, value_states, self.cache.position - 1)",
    ),
    bug(
        "lfm2",
        "a step that leaves its state behind",
        ONE,
        "",
        old="conv_state.copy_(hidden_states_new[:, :, -state_len:])",
        new="pass",
    ),
    bug(
        "lfm2",
        "a step with a window off by one",
        ONE,
        "",
        old="conv_state.copy_(hidden_states_new[:, :, -state_len:])",
        new="conv_state.copy_(hidden_states_new[:, :, -state_len - 1 : -1])",
    ),
    bug(
        "mamba2",
        "a step that leaves its state behind",
        ONE,
        "",
        old="state.copy_(ssm_states.to(state.dtype))",
        new="pass",
    ),
    bug(
        "mamba2",
        "decay in 16 bits",
        ONE,
        "",
        old="dA = torch.exp(dt.float() * A.float())",
        new="dA = torch.exp(dt.bfloat16() * A.bfloat16())",
    ),
)
