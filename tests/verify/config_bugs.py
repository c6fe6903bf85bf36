"""Bugs that show only away from what a small configuration is by default: each takes a field's value for granted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rewrite.verify import Options
from rewrite.verify.configuration.variations import Configurations, configuration_checks
from rewrite.verify.generation.loop_checks import loop_checks
from rewrite.verify.judging.checks import CheckRun, run_check
from rewrite.verify.judging.verdict import Check
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.runner import settled

from .bugs import Bug
from .copies import plant, upstream

THETA = 'base = config.rope_parameters["rope_theta"]'
ROPE_TYPE = 'self.rope_type != "default"'
ACT_FN = "ACT2FN[config.hidden_act]"
DROPOUT = "dropout=0.0 if not self.training else self.attention_dropout"
GROUPS = "config.num_attention_heads // config.num_key_value_heads"
RMS_NORM = "rms_norm(hidden_states, self.weight, self.variance_epsilon)"
EMBEDDING = "nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)"

llama, qwen3_moe, gemma2, bert, t5, qwen3_next = (
    partial(Bug, model) for model in ("llama", "qwen3_moe", "gemma2", "bert", "t5", "qwen3_next")
)

CONFIGURED = (
    llama("theta hard-coded", THETA, "base = 10000.0"),
    llama("rope type ignored", ROPE_TYPE, "False"),
    llama("every rope type linear", "ROPE_INIT_FUNCTIONS[self.rope_type]", 'ROPE_INIT_FUNCTIONS["linear"]'),
    llama("scale of the rotation dropped", "emb.cos() * self.attention_scaling", "emb.cos()"),
    llama("frequencies never updated", "@dynamic_rope_update", "@(lambda forward: forward)"),
    llama("eps hard-coded", RMS_NORM, "rms_norm(hidden_states, self.weight, 1e-3)"),
    llama("eps at least 1e-3", RMS_NORM, "rms_norm(hidden_states, self.weight, max(self.variance_epsilon, 1e-3))"),
    llama("eps at most 1e-3", RMS_NORM, "rms_norm(hidden_states, self.weight, min(self.variance_epsilon, 1e-3))"),
    llama("activation hard-coded", ACT_FN, 'ACT2FN["silu"]'),
    llama("tanh form of gelu dropped", ACT_FN, 'ACT2FN[config.hidden_act.removesuffix("_pytorch_tanh")]'),
    llama("dropout dropped", DROPOUT, "dropout=0.0"),
    llama("dropout in inference", DROPOUT, "dropout=self.attention_dropout"),
    llama("dropout of one tenth", "self.attention_dropout = config", "self.attention_dropout = 0.0 * config"),
    llama("two heads a group", GROUPS, "2"),
    llama("at least two heads a group", GROUPS, f"max(2, {GROUPS})"),
    llama("padding row trained", EMBEDDING, "nn.Embedding(config.vocab_size, config.hidden_size)"),
    llama("cache against the configuration", "if use_cache and past", "if past"),
    llama("two layers", "[: self.config.num_hidden_layers]", "[:2]"),
    llama("activation of the decode step", "self.up_proj), self.act_fn", 'self.up_proj), ACT2FN["silu"]'),
    llama(
        "gradient of biases dropped",
        "reason, projections[0])\n    return tuple(projection(input) for projection in projections)",
        "reason, projections[0])\n    return tuple(\n"
        "        projection(input) if getattr(projection, 'bias', None) is None\n"
        "        else F.linear(input, projection.weight, projection.bias.detach())\n"
        "        for projection in projections\n    )",
        file="_runtime",
    ),
    llama(
        "no scaling where nothing is grouped",
        "groups = getattr(module",
        'scaling = 1.0 if getattr(module, "num_key_value_groups", 1) == 1 else scaling\n    groups = getattr(module',
        file="_runtime",
    ),
    llama(
        "key heads of two",
        "groups = getattr(module",
        "key = key.roll(1, 1) if key.shape[1] > 2 else key\n    groups = getattr(module",
        file="_runtime",
    ),
    qwen3_moe("theta hard-coded", THETA, "base = 10000.0"),
    qwen3_moe("sparse step ignored", "(layer_idx + 1) % config.decoder_sparse_step == 0", "True"),
    qwen3_moe("dense layers ignored", "(layer_idx not in config.mlp_only_layers)", "True"),
    qwen3_moe("loss coefficient", "router_aux_loss_coef = config.router_aux_loss_coef", "router_aux_loss_coef = 1e-3"),
    qwen3_moe("experts of the loss", "num_experts_per_tok = config.num_experts_per_tok", "num_experts_per_tok = 2"),
    qwen3_moe("logits of the router never given", "else self.config.output_router_logits", "else False"),
    qwen3_moe("window ignored", "self.config.sliding_window is None", "True"),
    qwen3_moe(
        "eps of the query norm",
        "self.q_norm = Qwen3MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)",
        "self.q_norm = Qwen3MoeRMSNorm(self.head_dim, eps=1e-3)",
    ),
    qwen3_moe("activation hard-coded", ACT_FN, 'ACT2FN["silu"]', count=2),
    qwen3_moe("choices normalised in the step", "normalize=self.norm_topk_prob", "normalize=False"),
    gemma2("embedding scale hard-coded", "self.config.hidden_size**0.5", "8.0"),
    gemma2("final cap expected", "self.config.final_logit_softcapping is not None", "True"),
    gemma2("final cap hard-coded", "logits / self.config.final_logit_softcapping", "logits / 5.0"),
    gemma2("attention cap hard-coded", "= self.config.attn_logit_softcapping", "= 5.0"),
    gemma2(
        "attention cap where there is none",
        "= self.config.attn_logit_softcapping",
        "= self.config.attn_logit_softcapping or 50.0",
    ),
    gemma2(
        "kinds of layers in turn",
        "causal_mask_mapping[self.config.layer_types[i]]",
        'causal_mask_mapping[("sliding_attention", "full_attention")[i % 2]]',
    ),
    gemma2("window of the decode step", "config.sliding_window if self", "8 if self"),
    gemma2("activation hard-coded", "ACT2FN[config.hidden_activation]", 'ACT2FN["gelu_pytorch_tanh"]'),
    gemma2("scale hard-coded", "config.query_pre_attn_scalar**-0.5", "24**-0.5"),
    gemma2("dropout dropped", "dropout=self.attention_dropout if self.training else 0.0", "dropout=0.0"),
    gemma2("theta hard-coded", THETA, "base = 10000.0"),
    bert("activation hard-coded", ACT_FN, 'ACT2FN["gelu"]', count=2),
    bert("attention dropout of one tenth", "nn.Dropout(config.attention_probs_dropout_prob)", "nn.Dropout(0.1)"),
    bert("hidden dropout of one tenth", "nn.Dropout(config.hidden_dropout_prob)", "nn.Dropout(0.1)"),
    bert("eps hard-coded", "eps=config.layer_norm_eps", "eps=1e-3"),
    bert("always causal", "is_causal=config.is_decoder", "is_causal=True"),
    bert("first token is padding", "padding_idx=config.pad_token_id", "padding_idx=0"),
    bert("two types of tokens", "nn.Embedding(config.type_vocab_size", "nn.Embedding(2"),
    bert(
        "no cross-attention",
        "self.add_cross_attention = config.add_cross_attention",
        "self.add_cross_attention = False",
    ),
    t5("eps hard-coded", "variance + self.variance_epsilon", "variance + 1e-3"),
    t5("never gated", "if config.is_gated_act:", "if False:"),
    t5("gate of relu", "gated_activation(wi_0, hidden_linear, self.act)", "nn.functional.relu(wi_0) * hidden_linear"),
    t5("activation hard-coded", "ACT2FN[config.dense_act_fn]", 'ACT2FN["relu"]', count=2),
    t5("distance hard-coded", "= config.relative_attention_max_distance", "= 128"),
    t5("buckets hard-coded", "num_buckets=self.relative_attention_num_buckets", "num_buckets=32"),
    t5("attention dropout of one tenth", "self.dropout = config.dropout_rate", "self.dropout = 0.1"),
    t5("factor of the initial weights", "factor = self.config.initializer_factor", "factor = 1.0"),
    t5("scale of the decoder", "if self.config.scale_decoder_outputs:", "if True:"),
    qwen3_next("rotated share hard-coded", '.get("partial_rotary_factor", 1.0)', '.get("a share", 0.25)'),
    qwen3_next("activation of the convolution", "self.activation = config.hidden_act", 'self.activation = "silu"'),
    qwen3_next(
        "eps of the gated norm", "self.layer_norm_epsilon = config.rms_norm_eps", "self.layer_norm_epsilon = 1e-3"
    ),
    qwen3_next("sparse step ignored", "(layer_idx + 1) % config.decoder_sparse_step == 0", "True"),
    qwen3_next("dense layers ignored", "(layer_idx not in config.mlp_only_layers)", "True"),
    qwen3_next(
        "range of the initial experts",
        "init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)",
        "init.normal_(module.down_proj, mean=0.0, std=0.02)",
    ),
    qwen3_next(
        "linear layers first",
        "self.block_type = config.layer_types[layer_idx]",
        'self.block_type = ("linear_attention", "full_attention")[layer_idx % 2]',
    ),
)


def spoiled(bug: Bug, folder: Path) -> None:
    """Plant a bug into a generated package."""
    plant(folder, bug.file or f"modeling_{bug.model}.py", bug.old, bug.new, bug.count)


def first_failure(model: str, package: Path, options: Options, field: str = "") -> Check | None:
    """Run the checks on configurations alone, until one fails; with a `field`, those on that one."""
    with settled(options):
        for check in _checks(model, package, options, field):
            if (result := run_check(check)).status == "failed":
                return result
    return None


def _checks(model: str, package: Path, options: Options, field: str) -> Iterator[CheckRun]:
    subjects = find_subjects(*(loaded_sides.load(loaded_sides.locate(side)) for side in (upstream(model), package)))
    main = subjects.main
    bench = Workbench(main, small_variants(main.original, main.causal, {})[:1], options)
    if field:
        fields = frozenset(one.field for one in Configurations(bench).choices())
        assert field in fields, f"{main.name} reads {sorted(fields)}"
        yield from Configurations(bench, fields - {field}).checks()
        return
    yield from configuration_checks(bench, subjects.others)
    yield from (check for check in loop_checks(bench, bench.variants) if "fields varied" in check.name)
