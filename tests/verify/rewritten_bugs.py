"""Bugs planted into what the tool generates: in the modeling file, or in a runtime file of the package."""

from __future__ import annotations

from functools import partial

from .bugs import Bug

QKV = "query_states, key_states, value_states = qkv_rope_cache("
PROJECTIONS = "(self.q_proj, self.k_proj, self.v_proj)"
GATE_UP = "gated_linear(x, (self.gate_proj, self.up_proj), self.act_fn, norm=norm)"
DOWN = "linear(hidden_states, self.down_proj, residual=residual)"
KEPT = 'self.__dict__.setdefault("_kept", self.down_proj.weight.detach().clone())'
ACTIVATION = "gated_activation(gate, up, self.act_fn)"

llama, qwen3, gemma2, granite, mixtral = (
    partial(Bug, model) for model in ("llama", "qwen3", "gemma2", "granite", "mixtral")
)
llama_products = partial(Bug, "llama", file="_runtime")

REWRITTEN = (
    llama("split order", QKV, QKV.replace("key_states, value_states", "value_states, key_states")),
    llama("packed order", PROJECTIONS, "(self.q_proj, self.v_proj, self.k_proj)"),
    llama(
        "gate and up swapped", GATE_UP, GATE_UP.replace("self.gate_proj, self.up_proj", "self.up_proj, self.gate_proj")
    ),
    llama(
        "activation on up",
        "gate, up = multiply(input, *projections)",
        "up, gate = multiply(input, *projections)",
        file="_runtime/linear/linear.py",
    ),
    llama("activation dropped", GATE_UP, GATE_UP.replace("self.act_fn", "nn.Identity()")),
    llama("projected from the residual", GATE_UP, GATE_UP.replace("(x,", "(x + 1e-3,")),
    llama("old weight", DOWN, f"residual + nn.functional.linear(hidden_states, {KEPT})"),
    llama("residual dropped", DOWN, DOWN.replace("residual=residual", "residual=None")),
    llama("norm of the wrong place", "norm=self.post_attention_layernorm", "norm=self.input_layernorm"),
    llama(
        "grouped keys transposed wrongly",
        "grouped_matmul(query, key.transpose(2, 3), module.num_key_value_groups)",
        "grouped_matmul(query, key.flip(1).transpose(2, 3), module.num_key_value_groups)",
    ),
    llama(
        "grouped values flipped",
        "grouped_matmul(attn_weights, value, module.num_key_value_groups)",
        "grouped_matmul(attn_weights, value.flip(1), module.num_key_value_groups)",
    ),
    llama(
        "scaling dropped",
        "key.transpose(2, 3), module.num_key_value_groups) * scaling",
        "key.transpose(2, 3), module.num_key_value_groups)",
    ),
    llama("first layer's cache slot", "cache,\n            self.layer_idx,", "cache,\n            0,"),
    llama_products(
        "packed weights stale",
        "output = multiply(input, *packed)",
        "output = F.linear(input, weights[0].__dict__.setdefault('_kept', packed[0].detach().clone()), packed[1])",
    ),
    llama(
        "packed in another order than split",
        "whole.split(rows)",
        "whole.split(rows[::-1])[::-1]",
        "structure",
        file="_runtime",
    ),
    Bug("opt", "hooks ignored", "if backend.observed(projection):", "if False:", file="_runtime"),
    llama_products(
        "adapters ignored",
        "if type(projection) not in classes and",
        "projection = getattr(projection, 'base', projection)\n        if type(projection) not in classes and",
    ),
    llama_products("gradient dropped", "gradient = torch.is_grad_enabled()", "gradient = False"),
    llama_products("bias dropped", "output = multiply(input, *packed)", "output = multiply(input, packed[0], None)"),
    qwen3("query and key norms swapped", "q_norm=self.q_norm", "q_norm=self.k_norm"),
    gemma2("softcap dropped", "softcap=self.attn_logit_softcapping", "softcap=None"),
    granite(
        "residual multiplier dropped",
        "residual + hidden_states * self.residual_multiplier",
        "residual + hidden_states",
    ),
    mixtral("expert halves swapped", ACTIVATION, "gated_activation(up, gate, self.act_fn)"),
)
