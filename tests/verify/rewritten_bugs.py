"""Bugs planted into what the tool generates: in the modeling file, or in a runtime file of the package."""

from __future__ import annotations

from .bugs import Bug

QKV = "q, k, v = packed_linear(hidden_states, self.q_proj, self.k_proj, self.v_proj)"
GATE_UP = "gate, up = packed_linear(x, self.gate_proj, self.up_proj)"
ACTIVATION = "gated_activation(gate, up, self.act_fn)"

REWRITTEN = (
    Bug("llama", "split order", QKV, QKV.replace("q, k, v =", "q, v, k =")),
    Bug("llama", "packed order", QKV, QKV.replace("self.k_proj, self.v_proj", "self.v_proj, self.k_proj")),
    Bug("llama", "gate and up swapped", GATE_UP, GATE_UP.replace("gate, up =", "up, gate =")),
    Bug("llama", "activation on up", ACTIVATION, "gated_activation(up, gate, self.act_fn)"),
    Bug("llama", "activation dropped", ACTIVATION, "gate * up"),
    Bug("llama", "projected from the residual", GATE_UP, GATE_UP.replace("(x,", "(x + 1e-3,")),
    Bug(
        "llama",
        "grouped keys transposed wrongly",
        "grouped_matmul(query, key.transpose(2, 3), module.num_key_value_groups)",
        "grouped_matmul(query, key.flip(1).transpose(2, 3), module.num_key_value_groups)",
    ),
    Bug(
        "llama",
        "grouped values flipped",
        "grouped_matmul(attn_weights, value, module.num_key_value_groups)",
        "grouped_matmul(attn_weights, value.flip(1), module.num_key_value_groups)",
    ),
    Bug(
        "llama",
        "scaling dropped",
        "key.transpose(2, 3), module.num_key_value_groups) * scaling",
        "key.transpose(2, 3), module.num_key_value_groups)",
    ),
    Bug(
        "llama",
        "first layer's cache slot",
        "key_states, value_states, self.layer_idx",
        "key_states, value_states, 0",
    ),
    Bug(
        "llama",
        "packed weights stale",
        "output = multiply(input, *packed)",
        "output = F.linear(input, weights[0].__dict__.setdefault('_kept', packed[0].detach().clone()), packed[1])",
        file="_runtime/products",
    ),
    Bug(
        "llama",
        "packed in another order than split",
        "whole.split(rows)",
        "whole.split(rows[::-1])[::-1]",
        "structure",
        file="_runtime/products",
    ),
    Bug("llama", "hooks ignored", "if backend.observed(projection):", "if False:", file="_runtime/linear/packing.py"),
    Bug(
        "llama",
        "adapters ignored",
        "if type(projection) not in classes:",
        "projection = getattr(projection, 'base', projection)\n        if type(projection) not in classes:",
        file="_runtime/products",
    ),
    Bug(
        "llama",
        "gradient dropped",
        "gradient = torch.is_grad_enabled()",
        "gradient = False",
        file="_runtime/products",
    ),
    Bug(
        "llama",
        "bias dropped",
        "output = multiply(input, *packed)",
        "output = multiply(input, packed[0], None)",
        file="_runtime/products",
    ),
    Bug("qwen3", "query and key norms swapped", "self.q_norm(q", "self.k_norm(q"),
    Bug("gemma2", "softcap dropped", "softcap=self.attn_logit_softcapping", "softcap=None"),
    Bug(
        "granite",
        "residual multiplier dropped",
        "residual + hidden_states * self.residual_multiplier",
        "residual + hidden_states",
    ),
    Bug("mixtral", "expert halves swapped", ACTIVATION, "gated_activation(up, gate, self.act_fn)"),
)
