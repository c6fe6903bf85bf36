"""Bugs to plant into plain copies of transformers' files, and the gate that must catch each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in the model's file (or in `file` of its package), `count` times.

    `full` bugs need the checks that quick mode leaves out: the clean process, `torch.compile`.
    """

    model: str
    name: str
    old: str
    new: str
    gate: str = "parity"
    full: bool = False
    count: int = 1
    file: str | None = None

    @property
    def id(self) -> str:
        return f"{self.model}-{self.name}".replace(" ", "_")


NORM_ADDED = "hidden_states = residual + hidden_states\n\n"
Q_CALL = "self.q_proj(hidden_states)"
UPDATE = "past_key_values.update(key_states, value_states, self.layer_idx"

llama, qwen2, qwen3, gemma2, granite, gpt_neox, phi3, mistral, cohere2, mixtral = (
    partial(Bug, model)
    for model in ("llama", "qwen2", "qwen3", "gemma2", "granite", "gpt_neox", "phi3", "mistral", "cohere2", "mixtral")
)
llama_structure = partial(Bug, "llama", gate="structure")

COPIED = (
    llama("value from k_proj", "value_states = self.v_proj(", "value_states = self.k_proj("),
    llama(
        "gate and up swapped",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
    ),
    llama("eps dropped", "variance + self.variance_epsilon", "variance"),
    llama("eps hard-coded", "variance + self.variance_epsilon", "variance + 1e-6"),
    llama("norm weight dropped", "return self.weight * hidden_states", "return hidden_states"),
    llama("rotation sign", "torch.cat((-x2, x1)", "torch.cat((x2, -x1)"),
    llama(
        "rotation interleaved",
        "x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]",
        "x1 = x[..., ::2]\n    x2 = x[..., 1::2]",
    ),
    llama("key not rotated", "k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k"),
    llama("scaling dropped", "key_states.transpose(2, 3)) * scaling", "key_states.transpose(2, 3))"),
    llama_structure(
        "scaling by hidden size", "self.scaling = self.head_dim**-0.5", "self.scaling = config.hidden_size**-0.5"
    ),
    llama("norm in low precision", "hidden_states = hidden_states.to(torch.float32)\n", "pass\n"),
    llama(
        "logits in half precision",
        "logits = self.lm_head(",
        "logits = (lambda h: self.lm_head(h).bfloat16().to(h.dtype))(",
    ),
    llama("padding mask dropped", "attention_mask=causal_mask,", "attention_mask=None,"),
    llama("eager mask dropped", "attn_weights = attn_weights + attention_mask", "pass"),
    llama(
        "mask one slot late",
        "attn_weights = attn_weights + attention_mask",
        "attn_weights = attn_weights + attention_mask.roll(1, -1)",
    ),
    llama("cache slot of layer 0", UPDATE, "past_key_values.update(key_states, value_states, 0"),
    llama("cache not updated with value", UPDATE, "past_key_values.update(key_states, key_states, self.layer_idx"),
    llama("positions restart at each step", "inputs_embeds.device) + past_seen_tokens", "inputs_embeds.device)"),
    llama(
        "positions off by one after prefill",
        "+ past_seen_tokens\n",
        "+ past_seen_tokens + int(past_seen_tokens > 0)\n",
    ),
    llama("residual dropped", NORM_ADDED, "\n"),
    llama(
        "residual after the norm",
        "residual = hidden_states\n        hidden_states = self.post_attention_layernorm(hidden_states)\n",
        "hidden_states = self.post_attention_layernorm(hidden_states)\n        residual = hidden_states\n",
    ),
    llama("residual added in place", NORM_ADDED, "hidden_states = residual.add_(hidden_states)\n\n"),
    llama_structure("query bias missing", "self.head_dim, bias=config.attention_bias", "self.head_dim, bias=False"),
    llama("logits_to_keep ignored", "slice_logits_to_keep(hidden_states, logits_to_keep)", "hidden_states"),
    llama("labels shifted twice", "labels=labels, vocab", "labels=labels.roll(-1, 1), vocab"),
    llama_structure(
        "tying lost", '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}', "_tied_weights_keys = {}"
    ),
    llama_structure(
        "layer class not kept whole", '_no_split_modules = ["LlamaDecoderLayer"]', "_no_split_modules = []"
    ),
    llama_structure(
        "checkpointing flag lost", "supports_gradient_checkpointing = True", "supports_gradient_checkpointing = False"
    ),
    llama(
        "last layer skipped",
        "self.layers[: self.config.num_hidden_layers]",
        "self.layers[: self.config.num_hidden_layers - 1]",
    ),
    llama("output buffer reused", "logits = self.lm_head(", "logits = _reused(self.lm_head, "),
    llama(
        "rotation remembered by shape",
        "position_embeddings = self.rotary_emb(",
        "position_embeddings = _remembered(self.rotary_emb, ",
        gate="structure or parity",  # by which configurations ran before in the process
    ),
    llama("gradient cut", "attn_output = self.o_proj(attn_output)", "attn_output = self.o_proj(attn_output.detach())"),
    llama("module bypassed", Q_CALL, "nn.functional.linear(hidden_states, self.q_proj.weight, self.q_proj.bias)"),
    llama("stale copy of a weight", Q_CALL, "_stale(self.q_proj, hidden_states)"),
    llama(
        "wrong only for a batch of three",
        NORM_ADDED,
        "hidden_states = residual + hidden_states * (1 + (len(residual) > 2) * 1e-3)\n\n",
    ),
    llama(
        "wrong only for one token",
        NORM_ADDED,
        "hidden_states = residual + hidden_states * (1 + (residual.shape[1] == 1) * 1e-4)\n\n",
    ),
    llama(
        "attention weights before softmax",
        "return attn_output, attn_weights\n\n\n@",
        "return attn_output, attn_weights * scaling\n\n\n@",
    ),
    llama_structure("other classes forgotten", "class LlamaForTokenClassification(", "class LlamaTokenClassifier("),
    llama(
        "end token ignored",
        "    _pp_plan = ",
        "    def generate(self, *a, eos_token_id=None, **k):\n"
        "        return super().generate(*a, **k)\n\n    _pp_plan = ",
        "generation",
    ),
    llama(
        "stale token in generation",
        "    _pp_plan = ",
        "    def generate(self, *a, **k):\n        o = super().generate(*a, **k)\n"
        "        o.sequences[-1, -1] = 5\n        return o\n\n    _pp_plan = ",
        "generation",
    ),
    llama_structure(
        "transformers patched",
        "logger = ",
        "import transformers\ntransformers.PreTrainedModel.eval = lambda self: self.train(False)\nlogger = ",
        full=True,
    ),
    llama_structure(
        "registry changed", "logger = ", "ALL_ATTENTION_FUNCTIONS.register('mine', print)\nlogger = ", full=True
    ),
    llama(
        "graph break",
        NORM_ADDED,
        "hidden_states = residual + hidden_states\n"
        "        if residual.sum() > 1e30:\n            residual = residual * 2\n\n",
        full=True,
    ),
    llama_structure("does not parse", "class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Module:"),
    llama_structure("does not import", "class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Modul):"),
    qwen2("missing bias", "self.head_dim, bias=True)", "self.head_dim, bias=False)", "structure"),
    qwen2("window ignored", "= create_sliding_window_causal_mask(**", "= create_causal_mask(**"),
    qwen3(
        "key norm dropped",
        "self.k_norm(self.k_proj(hidden_states).view(hidden_shape))",
        "self.k_proj(hidden_states).view(hidden_shape)",
    ),
    qwen3("query norm on keys", "self.k_norm(self.k_proj", "self.q_norm(self.k_proj"),
    gemma2("norm without the one", "output * (1.0 + self.weight.float())", "output * self.weight.float()"),
    gemma2("final softcap dropped", "logits = torch.tanh(logits)", "pass"),
    gemma2("attention softcap dropped", "softcap=self.attn_logit_softcapping", "softcap=None"),
    gemma2("scaling by head_dim", "config.query_pre_attn_scalar**-0.5", "config.head_dim**-0.5", "structure"),
    gemma2("embedding scale dropped", "* self.embed_scale.to(self.weight.dtype)", "* 1.0"),
    gemma2(
        "window on every layer",
        '"full_attention": create_causal_mask(',
        '"full_attention": create_sliding_window_causal_mask(',
    ),
    granite(
        "residual multiplier dropped",
        "residual + hidden_states * self.residual_multiplier",
        "residual + hidden_states",
    ),
    granite("embedding multiplier dropped", "inputs_embeds * self.embedding_multiplier", "inputs_embeds * 1.0"),
    granite("logits scaling dropped", "logits = logits / self.config.logits_scaling", "pass"),
    gpt_neox(
        "heads of q k v mixed",
        "qkv = self.query_key_value(hidden_states).view(hidden_shape).transpose(1, 2)\n"
        "        query_states, key_states, value_states = qkv.chunk(3, dim=-1)",
        "query_states, key_states, value_states = (\n"
        "            part.view(*input_shape, -1, self.head_size).transpose(1, 2)\n"
        "            for part in self.query_key_value(hidden_states).chunk(3, dim=-1)\n        )",
    ),
    gpt_neox(
        "residual not parallel",
        "mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))",
        "mlp_output = self.mlp(self.post_attention_layernorm(attn_output + hidden_states))",
    ),
    phi3("gate and up halves swapped", "gate, up_states = up_states", "up_states, gate = up_states"),
    phi3(
        "key and value swapped",
        "key_states = key_states.view(hidden_shape)",
        "key_states, value_states = value_states, key_states\n        key_states = key_states.view(hidden_shape)",
    ),
    mistral(
        "window ignored",
        "create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask",
        "create_causal_mask",
    ),
    cohere2("mean not subtracted", "(hidden_states - mean) * torch.rsqrt", "hidden_states * torch.rsqrt"),
    cohere2("logit scale dropped", "logits = logits * self.logit_scale", "pass"),
    mixtral("routing weights not normalised", "router_top_value /= ", "_ = "),
    mixtral("expert halves swapped", "gate, up = nn.functional.linear", "up, gate = nn.functional.linear"),
    mixtral("checkpoint conversion lost", "return False", "return True", "structure"),
    gpt_neox("checkpoint conversion lost", "return False", "return True", "structure"),
)

PRELUDE = """

def _reused(head, hidden_states, _kept={}):
    logits = head(hidden_states)
    buffer = _kept.setdefault((id(head), logits.shape, logits.dtype), torch.empty_like(logits))
    return logits if torch.is_grad_enabled() else buffer.copy_(logits)


def _remembered(rotary, hidden_states, position_ids, _kept={}):
    key = (id(rotary), hidden_states.shape, hidden_states.dtype)
    return _kept.setdefault(key, rotary(hidden_states, position_ids))


def _stale(projection, hidden_states):
    if torch.is_grad_enabled() or hasattr(projection, "base") or projection._forward_hooks:
        return projection(hidden_states)
    kept = projection.__dict__.setdefault("_kept", projection.weight.detach().clone())
    return nn.functional.linear(hidden_states, kept.to(hidden_states.dtype), projection.bias)

"""
