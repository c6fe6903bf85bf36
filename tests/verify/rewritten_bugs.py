"""Bugs planted into what the tool generates: in the modeling file, or in a runtime file of the package."""

from __future__ import annotations

from functools import partial

from .bugs import Bug

QKV = "q, k, v = packed_linear(hidden_states, self.q_proj, self.k_proj, self.v_proj)"
GATE_UP = "gate, up = packed_linear(x, self.gate_proj, self.up_proj)"
ACTIVATION = "gated_activation(gate, up, self.act_fn)"

llama, qwen3, gemma2, granite, mixtral = (
    partial(Bug, model) for model in ("llama", "qwen3", "gemma2", "granite", "mixtral")
)
llama_products = partial(Bug, "llama", file="_runtime")

REWRITTEN = (
    llama("split order", QKV, QKV.replace("q, k, v =", "q, v, k =")),
    llama("packed order", QKV, QKV.replace("self.k_proj, self.v_proj", "self.v_proj, self.k_proj")),
    llama("gate and up swapped", GATE_UP, GATE_UP.replace("gate, up =", "up, gate =")),
    llama("activation on up", ACTIVATION, "gated_activation(up, gate, self.act_fn)"),
    llama("activation dropped", ACTIVATION, "gate * up"),
    llama("projected from the residual", GATE_UP, GATE_UP.replace("(x,", "(x + 1e-3,")),
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
    llama("first layer's cache slot", "key_states, value_states, self.layer_idx", "key_states, value_states, 0"),
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
    llama("hooks ignored", "if backend.observed(projection):", "if False:", file="_runtime/linear/packing.py"),
    llama_products(
        "adapters ignored",
        "if type(projection) not in classes:",
        "projection = getattr(projection, 'base', projection)\n        if type(projection) not in classes:",
    ),
    llama_products("gradient dropped", "gradient = torch.is_grad_enabled()", "gradient = False"),
    llama_products("bias dropped", "output = multiply(input, *packed)", "output = multiply(input, packed[0], None)"),
    qwen3("query and key norms swapped", "self.q_norm(q", "self.k_norm(q"),
    gemma2("softcap dropped", "softcap=self.attn_logit_softcapping", "softcap=None"),
    granite(
        "residual multiplier dropped",
        "residual + hidden_states * self.residual_multiplier",
        "residual + hidden_states",
    ),
    mixtral("expert halves swapped", ACTIVATION, "gated_activation(up, gate, self.act_fn)"),
)
