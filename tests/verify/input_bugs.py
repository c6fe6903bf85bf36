"""Bugs planted into what a step is given and what a call keeps; each names the check that has to catch it."""

from __future__ import annotations

from functools import partial

from .generation_bugs import AGAIN, BEGUN, CONTINUED, DRAWS, ENDED, IMAGES, ONE, PADDED, STREAMED, bug

INPUT = "_runtime/decode/recorded_inputs.py"
OWN_CROSS = "own.layers[-1].keys, own.layers[-1].values = layer.keys.clone(), layer.values.clone()"
TAKEN = "[*_tensors(self.fixed), *self._seen()], [*_tensors(other.fixed), *other._seen()]"
GIVEN = "given = {self.tokens: tokens} | ({self.mask: mask} if self.mask else {})"
FORWARD = "outputs = self.model(**self._step_arguments(), return_dict=True)"
CROSS_STORED = "            given.cross_attention_cache.layers = _own(self._cross).layers\n"

lfm2, t5, llava, bart, qwen2_5_vl, paligemma = (
    partial(bug, model) for model in ("lfm2", "t5", "llava", "bart", "qwen2_5_vl", "paligemma")
)

KEYS = (
    lfm2(
        "a token short",
        ONE,
        "loop",
        "graph.cache.store(self._dynamic, start + count - 1,",
        "graph.cache.store(self._dynamic, start + count - 2,",
    ),
    t5(
        "a token too many",
        ONE,
        "loop",
        "graph.cache.store(self._dynamic, start + count - 1,",
        "graph.cache.store(self._dynamic, start + count,",
    ),
    llava(
        "keys for values when continued",
        CONTINUED,
        "_runtime/cache/layers.py",
        "= other.values[:, :, : length - start]",
        "= other.keys[:, :, : length - start]",
    ),
    bart("not continued", CONTINUED, "loop", "graph.cache.load(self._dynamic)", "pass"),
    lfm2(
        "continued one token early",
        CONTINUED,
        "_runtime/cache/layers.py",
        "self.rewind(length)",
        "self.rewind(max(length - 1, 0))",
    ),
    bart(
        "no cache comes back",
        CONTINUED,
        "fitness",
        "    if call.config.return_dict_in_generate:\n        return True\n",
        "    if call.config.return_dict_in_generate:\n        return False\n",
    ),
    lfm2(
        "mask without the padding",
        PADDED,
        "graph",
        "self.attention_mask[:, : attention_mask.shape[1]] = attention_mask",
        "pass",
    ),
    lfm2("position of the first token wrong", ONE, "loop", "return given[:, -1:] + 1", "return given[:, -1:]"),
    lfm2("slot of the call before", AGAIN, "graph", "self.state.position.fill_(self.cache.length)", "pass"),
    bart(
        "as from a model without an encoder",
        ONE,
        "loop",
        "encodes = self._model.config.is_encoder_decoder",
        "encodes = False",
    ),
    t5(
        "random numbers drawn beyond the end",
        ENDED,
        "loop",
        "self._random.restore(self._marks[self.reader.count - 1])",
        "self._random.restore(self._marks[-1])",
    ),
    qwen2_5_vl(
        "scores are logits",
        DRAWS,
        "loop",
        "self._scores.append(scores.clone())",
        "self._scores.append((logits if self._scores else scores).clone())",
    ),
)

INPUTS = (
    paligemma(
        "a cleared cache taken for a written one",
        IMAGES,
        "cache",
        "return self.stepping or self.length > 0",
        "return bool(self.buffers)",
    ),
    qwen2_5_vl("position not advanced", ONE, "inputs", "tensor.add_(1)", "tensor.add_(0)"),
    qwen2_5_vl("position advanced twice", ONE, "inputs", "tensor.add_(1)", "tensor.add_(2)"),
    qwen2_5_vl(
        "position advanced before the forward",
        ONE,
        "graph",
        FORWARD,
        f"self.watched is None or self.watched.advance()\n            {FORWARD}",
    ),
    qwen2_5_vl("one kind of position advanced", ONE, "inputs", "tensor.add_(1)", "tensor[-1:].add_(1)"),
    qwen2_5_vl("only the first row advanced", PADDED, "inputs", "tensor.add_(1)", "tensor[..., :1, :].add_(1)"),
    qwen2_5_vl("position not put back after the proof", ONE, INPUT, "tensor.copy_(before)", "pass"),
    qwen2_5_vl("positions of the call before", AGAIN, INPUT, "tensor.copy_(contents)", "pass"),
    qwen2_5_vl("positions of the image before", IMAGES, INPUT, "tensor.copy_(contents)", "pass"),
    qwen2_5_vl(
        "positions as if the image were text",
        IMAGES,
        "inputs",
        "        own.copy_(first)\n",
        "        own.copy_(first)\n            own.copy_(own[:1].expand_as(own))\n",
    ),
    qwen2_5_vl(
        "offset of the positions lost",
        IMAGES,
        "",
        "position_ids = text_positions[None, ...] + self.model.rope_deltas",
        "position_ids = text_positions[None, ...].expand(4, -1, -1)",
    ),
    qwen2_5_vl(
        "segments in another order",
        IMAGES,
        "segments",
        "for first in sorted(parts)",
        "for first in sorted(parts, reverse=True)",
    ),
    qwen2_5_vl(
        "images that see each other",
        IMAGES,
        "segments",
        "itertools.groupby(lengths)",
        "itertools.groupby([sum(lengths)])",
    ),
    bart("cross-attention of the call before", AGAIN, INPUT, "tensor.copy_(contents)", "pass"),
    t5(
        "cross-attention of the call before",
        AGAIN,
        "inputs",
        TAKEN,
        "[*_tensors(self.fixed)], [*_tensors(other.fixed)]",
    ),
    bart("encoder's output of the call before", AGAIN, "inputs", TAKEN, "self._seen()[1:], other._seen()[1:]"),
    t5("encoder's mask of the call before", AGAIN, "inputs", TAKEN, "self._seen(), other._seen()"),
    bart(
        "key without the encoder's length",
        AGAIN,
        "inputs",
        "_shape(self.fixed), advanced, tuple(_shape(tensor) for tensor in self._seen())",
        "advanced",
    ),
    bart(
        "cross keys and values swapped",
        ONE,
        "inputs",
        OWN_CROSS,
        "own.layers[-1].keys, own.layers[-1].values = layer.values.clone(), layer.keys.clone()",
    ),
    t5(
        "cross-attention of another layer",
        ONE,
        "inputs",
        "for layer in cross.layers:\n            own",
        "for layer in reversed(cross.layers):\n            own",
    ),
    bart(
        "encoder's mask dropped",
        PADDED,
        "inputs",
        "return {**self.fixed, **given} | (",
        "return {**self.fixed, **given, 'attention_mask': None} | (",
    ),
    t5(
        "encoder's mask dropped",
        PADDED,
        "inputs",
        "return {**self.fixed, **given} | (",
        "return {**self.fixed, **given, 'attention_mask': None} | (",
    ),
    llava(
        "text's mask dropped",
        PADDED,
        "inputs",
        GIVEN,
        "given = {self.tokens: tokens} | ({self.mask: torch.ones_like(mask)} if self.mask else {})",
    ),
    bart("cross-attention not handed back", CONTINUED, "inputs", CROSS_STORED, ""),
    t5(
        "cross-attention handed back as if to be made anew",
        CONTINUED,
        "inputs",
        "            given.is_updated = dict.fromkeys(range(len(self._cross.layers)), True)\n",
        "",
    ),
    bart(
        "cross-attention of the first row",
        AGAIN,
        "inputs",
        OWN_CROSS,
        "own.layers[-1].keys = layer.keys[:1].repeat(len(layer.keys), 1, 1, 1)\n"
        "            own.layers[-1].values = layer.values.clone()",
    ),
    bart("slot of the call before", BEGUN, "graph", "self.state.position.fill_(self.cache.length)", "pass"),
    llava(
        "end forgotten by the row that ended",
        PADDED,
        "sampling",
        "state.finished.logical_or_((tokens[:, None] == sampling.eos).any(dim=-1))",
        "pass",
    ),
    t5("streamer not told of the end", STREAMED, "loop", "            call.streamer.end()", "            pass"),
)
