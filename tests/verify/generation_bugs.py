"""Bugs planted into the steps of everything that generates; each names the check of the loop that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.verify import Options
from rewrite.verify.generation.talk import talk_checks
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.verdict import Check
from rewrite.verify.models import sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.subjects import paired
from rewrite.verify.models.workbench import Workbench
from rewrite.verify.runner import settled

from .bugs import Bug
from .copies import planted, upstream


@dataclass(frozen=True)
class LoopBug(Bug):
    """A bug in the loop of `model_class`; `check` is the end of the name of the check that catches it.

    With `refuses` the package itself finds out, before it generates, and takes the original's loop: the check, which
    runs without the bug, is then not run. `also` are more replacements, `(file, old, new)`: where the code is safe
    twice.
    """

    model_class: str = ""
    check: str = ""
    refuses: bool = False
    also: tuple[tuple[str, str, str], ...] = ()


CLASSES = {
    "lfm2": "Lfm2ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
FILES = {
    "states": "runtime/cache/states.py",
    "layers": "runtime/cache/layers.py",
    "cache": "runtime/cache/preallocated.py",
    "inputs": "runtime/decode/step_inputs.py",
    "graph": "runtime/decode/graph.py",
    "loop": "runtime/decode/generation.py",
    "fitness": "runtime/decode/fitness.py",
    "sampling": "runtime/decode/sampling.py",
}
ONE, PADDED, DRAWS, AGAIN, CONTINUED, ENDED, STREAMED, BEGUN, IMAGES = (
    "a row", "rows with padding, one ends", "draws", "calls one after another", "a cache that came back",
    "a cache of a text that ended", "tokens streamed", "a text behind an encoder that has begun",
    "images in the prompt",
)  # fmt: skip


def bug(model: str, name: str, check: str, file: str, *, old: str, new: str, **more: Any) -> LoopBug:
    more |= {"file": FILES.get(file), "model_class": CLASSES[model], "check": check}
    return LoopBug(model, name, old, new, "generation", **more)


def plant(bug: LoopBug, package: Path) -> None:
    """Put a bug into a package, in place."""
    for name, old, new in ((bug.file or f"modeling_{bug.model}.py", bug.old, bug.new), *bug.also):
        file = package / name
        file.write_text(planted(file.read_text("utf-8"), old, new), "utf-8")


def result_of(bug: LoopBug, package: Path) -> Check:
    """Run the check that a bug names on a package."""
    original = sides.load(sides.locate(upstream(bug.model)))
    subject = next(s for s in paired(original, sides.load(sides.locate(package))) if s.name == bug.model_class)
    with settled(Options()):
        bench = Workbench(subject, small_variants(subject.original, subject.causal, {})[:1], Options())
        return next(run_check(check) for check in talk_checks(bench) if check.name.endswith(f", {bug.check}"))


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
LOADED = "_write(mine, theirs.keys, theirs.values, length - theirs.keys.shape[2])"
OWN_CROSS = "own.layers[-1].keys, own.layers[-1].values = layer.keys.clone(), layer.values.clone()"
TAKEN = "[*_tensors(self.fixed), *self._seen()], [*_tensors(other.fixed), *other._seen()]"
GIVEN = "given = {self.tokens: tokens} | ({self.mask: mask} if self.mask else {})"
STATE_INIT = "super().lazy_initialization(*args, **kwargs)"
FORWARD = "outputs = self.model(**self._arguments(self._attention_mask), return_dict=True)"
ADVANCED = "            self.watched.advance()\n"
CROSS_STORED = "            given.cross_attention_cache.layers = _own(self._cross).layers\n"

STATES = (
    bug("lfm2", "states not reset between calls", AGAIN, "cache", old="states.forget(layer)", new="pass", also=FLAG),
    bug("mamba2", "states not reset between calls", AGAIN, "cache", old="states.forget(layer)", new="pass", also=FLAG),
    bug("lfm2", "states not restored after the proof", ONE, "states", old=RESTORED, new="pass", refuses=True),
    bug(
        "mamba2",
        "only the first state restored",
        ONE,
        "states",
        old=RESTORED,
        new="torch._foreach_copy_(written[:1], copies[:1])",
        refuses=True,
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
        old=f"            {STATE_COPIES}",
        new="            pass",
    ),
    bug(
        "falcon_h1",
        "states not taken over",
        CONTINUED,
        "cache",
        old="            states.copy(theirs, mine)\n\n    def store",
        new="            pass\n\n    def store",
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
        old="self.keys.index_copy_(2, self.cache.position, key",
        new="self.keys.index_copy_(2, self.cache.position - 1, key",
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

KEYS = (
    bug(
        "lfm2",
        "a token short",
        ONE,
        "loop",
        old="graph.cache.store(self.dynamic, length)",
        new="graph.cache.store(self.dynamic, length - 1)",
    ),
    bug(
        "t5",
        "a token too many",
        ONE,
        "loop",
        old="graph.cache.store(self.dynamic, length)",
        new="graph.cache.store(self.dynamic, length + 1)",
    ),
    bug(
        "llava",
        "keys for values when continued",
        CONTINUED,
        "cache",
        old=LOADED,
        new="_write(mine, theirs.values, theirs.keys, length - theirs.keys.shape[2])",
    ),
    bug("bart", "not continued", CONTINUED, "loop", old="graph.cache.load(self.dynamic)", new="pass"),
    bug(
        "lfm2",
        "continued one token early",
        CONTINUED,
        "cache",
        old="            mine.length = length\n        for",
        new="            mine.length = max(length - 1, 0)\n        for",
    ),
    bug(
        "bart",
        "no cache comes back",
        CONTINUED,
        "fitness",
        old="    if call.config.return_dict_in_generate:\n        return True\n",
        new="    if call.config.return_dict_in_generate:\n        return False\n",
    ),
    bug(
        "lfm2",
        "mask without the padding",
        PADDED,
        "graph",
        old="self._attention_mask[:, : attention_mask.shape[1]] = attention_mask",
        new="pass",
    ),
    bug(
        "lfm2",
        "position of the first token wrong",
        ONE,
        "loop",
        old="return given[:, -1:] + 1",
        new="return given[:, -1:]",
    ),
    bug(
        "lfm2",
        "slot of the call before",
        AGAIN,
        "graph",
        old="self.state.position.fill_(self.cache.length)",
        new="pass",
    ),
    bug(
        "bart",
        "as from a model without an encoder",
        ONE,
        "loop",
        old="encodes = self.model.config.is_encoder_decoder",
        new="encodes = False",
    ),
    bug(
        "t5",
        "random numbers drawn beyond the end",
        ENDED,
        "loop",
        old="random.restore(marks[reader.count - 1])",
        new="random.restore(marks[-1])",
    ),
    bug(
        "qwen2_5_vl",
        "scores are logits",
        DRAWS,
        "loop",
        old="self.kept_scores.append(scores.clone())",
        new="self.kept_scores.append((logits if self.kept_scores else scores).clone())",
    ),
)

INPUTS = (
    bug("qwen2_5_vl", "position not advanced", ONE, "inputs", old="tensor.add_(1)", new="tensor.add_(0)"),
    bug("qwen2_5_vl", "position advanced twice", ONE, "inputs", old="tensor.add_(1)", new="tensor.add_(2)"),
    bug(
        "qwen2_5_vl",
        "position advanced before the forward",
        ONE,
        "graph",
        old=FORWARD,
        new=f"self.watched is None or self.watched.advance()\n            {FORWARD}",
    ),
    bug("qwen2_5_vl", "one kind of position advanced", ONE, "inputs", old="tensor.add_(1)", new="tensor[-1:].add_(1)"),
    bug(
        "qwen2_5_vl",
        "only the first row advanced",
        PADDED,
        "inputs",
        old="tensor.add_(1)",
        new="tensor[..., :1, :].add_(1)",
    ),
    bug(
        "qwen2_5_vl",
        "position not put back after the proof",
        ONE,
        "inputs",
        old="                tensor.copy_(before)",
        new="                pass",
    ),
    bug("qwen2_5_vl", "positions of the call before", AGAIN, "inputs", old="tensor.copy_(contents)", new="pass"),
    bug("qwen2_5_vl", "positions of the image before", IMAGES, "inputs", old="tensor.copy_(contents)", new="pass"),
    bug(
        "qwen2_5_vl",
        "positions as if the image were text",
        IMAGES,
        "inputs",
        old="        own.copy_(first)\n",
        new="        own.copy_(first)\n            own.copy_(own[:1].expand_as(own))\n",
    ),
    bug(
        "qwen2_5_vl",
        "offset of the positions lost",
        IMAGES,
        "",
        old="position_ids = text_positions[None, ...] + self.model.rope_deltas",
        new="position_ids = text_positions[None, ...].expand(4, -1, -1)",
    ),
    bug("bart", "cross-attention of the call before", AGAIN, "inputs", old="tensor.copy_(contents)", new="pass"),
    bug(
        "t5",
        "cross-attention of the call before",
        AGAIN,
        "inputs",
        old=TAKEN,
        new="[*_tensors(self.fixed)], [*_tensors(other.fixed)]",
    ),
    bug(
        "bart",
        "encoder's output of the call before",
        AGAIN,
        "inputs",
        old=TAKEN,
        new="self._seen()[1:], other._seen()[1:]",
    ),
    bug("t5", "encoder's mask of the call before", AGAIN, "inputs", old=TAKEN, new="self._seen(), other._seen()"),
    bug(
        "bart",
        "key without the encoder's length",
        AGAIN,
        "inputs",
        old="return self.tokens, self.mask, _shape(self.fixed), tuple(_shape(tensor) for tensor in self._seen())",
        new="return self.tokens, self.mask",
    ),
    bug(
        "bart",
        "cross keys and values swapped",
        ONE,
        "inputs",
        old=OWN_CROSS,
        new="own.layers[-1].keys, own.layers[-1].values = layer.values.clone(), layer.keys.clone()",
    ),
    bug(
        "t5",
        "cross-attention of another layer",
        ONE,
        "inputs",
        old="for layer in cross.layers:\n            own",
        new="for layer in reversed(cross.layers):\n            own",
    ),
    bug(
        "bart",
        "encoder's mask dropped",
        PADDED,
        "inputs",
        old="return {**self.fixed, **given, self.cache: held}",
        new="return {**self.fixed, **given, self.cache: held, 'attention_mask': None}",
    ),
    bug(
        "t5",
        "encoder's mask dropped",
        PADDED,
        "inputs",
        old="return {**self.fixed, **given, self.cache: held}",
        new="return {**self.fixed, **given, self.cache: held, 'attention_mask': None}",
    ),
    bug(
        "llava",
        "text's mask dropped",
        PADDED,
        "inputs",
        old=GIVEN,
        new="given = {self.tokens: tokens} | ({self.mask: torch.ones_like(mask)} if self.mask else {})",
    ),
    bug("bart", "cross-attention not handed back", CONTINUED, "inputs", old=CROSS_STORED, new=""),
    bug(
        "t5",
        "cross-attention handed back as if to be made anew",
        CONTINUED,
        "inputs",
        old="            given.is_updated = dict.fromkeys(range(len(self._cross.layers)), True)\n",
        new="",
    ),
    bug(
        "bart",
        "cross-attention of the first row",
        AGAIN,
        "inputs",
        old=OWN_CROSS,
        new="own.layers[-1].keys = layer.keys[:1].repeat(len(layer.keys), 1, 1, 1)\n"
        "            own.layers[-1].values = layer.values.clone()",
    ),
    bug(
        "bart",
        "slot of the call before",
        BEGUN,
        "graph",
        old="self.state.position.fill_(self.cache.length)",
        new="pass",
    ),
    bug(
        "llava",
        "end forgotten by the row that ended",
        PADDED,
        "sampling",
        old="state.finished.logical_or_((tokens[:, None] == sampling.eos).any(dim=-1))",
        new="pass",
    ),
    bug(
        "t5",
        "streamer not told of the end",
        STREAMED,
        "loop",
        old="            call.streamer.end()",
        new="            pass",
    ),
)
