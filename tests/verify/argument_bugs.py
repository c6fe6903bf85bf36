"""Bugs that only an argument, an output, a long row or a changed model shows, planted into what the tool generates."""

from __future__ import annotations

from functools import partial

from .bugs import Bug

GQA = "_runtime"
PACKING = "_runtime"
WHOLE = "    whole = joined_storage.joined(tensors)\n"
LOSS = "labels=labels, vocab_size=self.config.vocab_size, **kwargs)"
CACHE = "if use_cache and past_key_values is None:"
KEEP = "slice_logits_to_keep(hidden_states, logits_to_keep)"
NUMBERS = KEEP.replace(", logits_to_keep)", ", logits_to_keep if isinstance(logits_to_keep, int) else 0)")
ANGLES = "position_ids[..., None].float()"
BEFORE_FORWARD = "    @merge_with_config_defaults\n"
BEFORE_PLAN = "    _pp_plan = "


def _without(keyword: str) -> str:
    return LOSS.replace("**kwargs", f"**{{name: v for name, v in kwargs.items() if name != '{keyword}'}}")


llama, qwen3_moe, gemma2, bert, t5, qwen3_next = (
    partial(Bug, model) for model in ("llama", "qwen3_moe", "gemma2", "bert", "t5", "qwen3_next")
)
llama_structure, bert_structure = (partial(Bug, model, gate="structure") for model in ("llama", "bert"))
llama_attention = partial(Bug, "llama", file=GQA)

LLAMA = (
    llama("num_items_in_batch dropped", LOSS, _without("num_items_in_batch")),
    llama("shift_labels dropped", LOSS, _without("shift_labels")),
    llama("ignore_index dropped", LOSS, _without("ignore_index")),
    llama("logits_to_keep only as a number", KEEP, NUMBERS),
    llama("a cache against the caller's wish", CACHE, "if past_key_values is None:"),
    llama(
        "packed positions do not reach the mask",
        "                position_ids=position_ids,\n            )\n        )",
        "                position_ids=None,\n            )\n        )",
    ),
    llama(
        "a mask of booleans ignored",
        "                attention_mask=attention_mask,\n                past_key_values=past_key_values,\n"
        "                position_ids",
        "                attention_mask=None if getattr(attention_mask, 'dtype', None) == torch.bool else"
        " attention_mask,\n                past_key_values=past_key_values,\n                position_ids",
    ),
    llama(
        "embeddings with a cache",
        f"        {CACHE}",
        "        if input_ids is None and past_key_values is not None:\n"
        f"            inputs_embeds = inputs_embeds * 1.01\n\n        {CACHE}",
    ),
    llama_attention(
        "mask of the first head for the group",
        "mask = mask.unflatten(1, (-1, groups)).flatten(2, 3)",
        "mask = mask[:, ::groups].repeat(1, 1, groups, 1)",
    ),
    llama_attention(
        "keys copied in another order for many queries",
        "x.repeat_interleave(groups, dim=1) for x",
        "x.repeat(1, groups, 1, 1) for x",
    ),
    llama_attention(
        "heads of a mask in another order for one row",
        "mask = mask[0].unflatten(0, (-1, groups)).transpose(0, 1)",
        "mask = mask[0].unflatten(0, (-1, groups))",
    ),
    llama_attention(
        "is_causal ignored",
        "scaling=scaling, is_causal=is_causal, **kwargs",
        "scaling=scaling, is_causal=None, **kwargs",
    ),
    llama_attention(
        "a registered attention function ignored",
        "return _sdpa if interface is sdpa_attention_forward and is_intact(interface) else interface",
        "return interface if interface.__name__ == 'eager_attention_forward' else _sdpa",
    ),
    llama(
        "frequencies in the model's dtype",
        "self.inv_freq.to(device=x.device, dtype=torch.float)",
        "self.inv_freq.to(device=x.device, dtype=x.dtype).float()",
    ),
    llama("positions in the model's dtype", ANGLES, "position_ids[..., None].to(x.dtype).float()"),
    llama(
        "packed weights remembered by the first",
        WHOLE,
        "    kept = as_one.__dict__.setdefault('kept', {})\n"
        "    whole = kept.get(tensors[0].data_ptr(), joined_storage.joined(tensors))\n"
        "    if whole is not None:\n        kept[tensors[0].data_ptr()] = whole\n",
        file=PACKING,
    ),
    llama_structure(
        "embeddings copied instead of set",
        BEFORE_FORWARD,
        "    def set_input_embeddings(self, value):\n"
        f"        self.embed_tokens.weight.data.copy_(value.weight.data)\n\n{BEFORE_FORWARD}",
    ),
    llama_structure(
        "a state dict to save ignored",
        BEFORE_PLAN,
        "    def save_pretrained(self, *a, state_dict=None, **k):\n"
        f"        return super().save_pretrained(*a, **k)\n\n{BEFORE_PLAN}",
    ),
    llama_structure("plan for FSDP lost", '_fsdp_plan = {"lm_head": "keep_full_weight"}', "_fsdp_plan = {}"),
    llama_structure(
        "initial weights too large",
        BEFORE_PLAN,
        "    def _init_weights(self, module):\n        super()._init_weights(module)\n"
        "        if isinstance(module, nn.Linear):\n            module.weight.data.mul_(1.01)\n\n" + BEFORE_PLAN,
    ),
)

LM_LOSS = "self.loss_function(logits, labels, self.vocab_size, **kwargs)"
MOE = (
    qwen3_moe("auxiliary loss not added", "loss += self.router_aux_loss_coef", "aux_loss = self.router_aux_loss_coef"),
    qwen3_moe(
        "auxiliary loss of padding too",
        "                attention_mask,\n            )\n            if labels",
        "                None,\n            )\n            if labels",
    ),
    qwen3_moe("auxiliary loss of another k", "self.num_experts_per_tok,\n   ", "self.num_experts_per_tok + 1,\n   "),
    qwen3_moe(
        "tokens of an expert counted in 8 bits",
        "torch.float32 if compute_device.type in",
        "torch.bfloat16 if compute_device.type in",
    ),
    qwen3_moe("scores recorded as the router's logits", "TopKRouter, index=0)", "TopKRouter, index=1)"),
    qwen3_moe("loss without its keywords", LM_LOSS, LM_LOSS.replace(", **kwargs", "")),
    qwen3_moe(
        "router in low precision",
        "softmax(router_logits, dtype=torch.float, dim=-1)",
        "softmax(router_logits, dim=-1)",
    ),
    qwen3_moe(
        "experts beyond the sixteenth",
        "routed(top_k_index, self.num_experts)",
        "routed(top_k_index.clamp(max=15), self.num_experts)",
    ),
    qwen3_moe("experts initialised by a number", "std = self.config.initializer_range\n", "std = 0.02\n", "structure"),
)

GEMMA2 = (
    gemma2("a cache without windows", "DynamicCache(config=self.config)", "DynamicCache()"),
    gemma2(
        "masks of each kind of layer ignored",
        "if not isinstance(causal_mask_mapping := attention_mask, dict):",
        "attention_mask = None if isinstance(attention_mask, dict) else attention_mask\n        if True:",
    ),
    gemma2(
        "shift_labels dropped",
        LM_LOSS,
        LM_LOSS.replace("**kwargs", "num_items_in_batch=kwargs.get('num_items_in_batch')"),
    ),
    gemma2("norms initialised with ones", "init.zeros_(module.weight)", "init.ones_(module.weight)", "structure"),
    gemma2("positions in the model's dtype", ANGLES, "position_ids[..., None].to(x.dtype).float()"),
    gemma2(
        "token classes not named",
        "class Gemma2ForTokenClassification(GenericForTokenClassification,",
        "class Gemma2ForTokenClassification(GenericForSequenceClassification,",
    ),
)

CHUNKED = "self.feed_forward_chunk, self.chunk_size_feed_forward, self.seq_len_dim,"
BERT = (
    bert(
        "encoder's mask dropped",
        "if not self.is_cross_attention else encoder_attention_mask",
        "if not self.is_cross_attention else None",
    ),
    bert(
        "key and value of the encoder swapped",
        "key, value = packed_linear(encoder_hidden_states,",
        "value, key = packed_linear(encoder_hidden_states,",
    ),
    bert("encoder's keys taken anew", "past_key_values.is_updated[self.layer_idx] = True", "pass"),
    bert(
        "token types ignored",
        "self.token_type_embeddings(token_type_ids)",
        "self.token_type_embeddings(token_type_ids * 0)",
    ),
    bert(
        "chunks without their residual",
        "layer_output = self.output(intermediate_output, attention_output)",
        "chunked = attention_output.shape[1] == self.chunk_size_feed_forward\n"
        "        first = attention_output[:, :1] if chunked else attention_output\n"
        "        layer_output = self.output(intermediate_output, first)",
    ),
    bert(
        "next sentence the other way",
        "seq_relationship_scores.view(-1, 2), labels.view(-1)",
        "seq_relationship_scores.view(-1, 2), 1 - labels.view(-1)",
    ),
    bert(
        "loss of two heads without one",
        "total_loss = masked_lm_loss + next_sentence_loss",
        "total_loss = masked_lm_loss",
    ),
    bert("nothing ignored in masked text", "CrossEntropyLoss()  # -100", "CrossEntropyLoss(ignore_index=1)  # -100"),
    bert("mean of the span's losses", "total_loss = (start_loss + end_loss) / 2", "total_loss = start_loss"),
    bert("span outside the text", "ignored_index = start_logits.size(1)", "ignored_index = start_logits.size(1) - 1"),
    bert("span that ends at the first token", "end_positions.clamp(0, i", "end_positions.clamp(1, i"),
    bert("as many rows as classes", "seq_relationship_score.view(-1, 2)", "seq_relationship_score.view(2, -1)"),
    bert("several labels by squares", "loss_fct = BCEWithLogitsLoss()", "loss_fct = MSELoss()"),
    bert_structure(
        "output embeddings of another module",
        "return self.cls.predictions.decoder\n",
        "return self.cls.predictions.transform.dense\n",
    ),
    bert("bias left behind", "self.cls.predictions.bias = new_embeddings.bias", "pass", count=3),
    bert_structure("head's bias initialised with ones", "init.zeros_(module.bias)", "init.ones_(module.bias)"),
    bert_structure(
        "attention to the encoder not recorded",
        '"cross_attentions": BertCrossAttention',
        '"cross_attentions": BertSelfAttention',
    ),
)

T5 = (
    t5("decoder's mask dropped", "attention_mask=decoder_attention_mask,", "attention_mask=None,"),
    t5(
        "decoder's embeddings scaled",
        "inputs_embeds=decoder_inputs_embeds,",
        "inputs_embeds=None if decoder_inputs_embeds is None else decoder_inputs_embeds * 1.01,",
    ),
    t5("encoder's mask not for the decoder", "encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,"),
    t5(
        "what an encoder made scaled",
        "                last_hidden_state=encoder_outputs[0],",
        "                last_hidden_state=encoder_outputs[0] * 1.01,",
    ),
    t5(
        "an encoder's hidden states dropped",
        "hidden_states=encoder_outputs[1] if len(encoder_outputs) > 1 else None,",
        "hidden_states=None,",
    ),
    t5("start token dropped", "shifted_input_ids[..., 0] = decoder_start_token_id", "shifted_input_ids[..., 0] = 1"),
    t5(
        "positions begin anew with a cache",
        "device=query_states.device, past_seen_tokens=past_seen_tokens",
        "device=query_states.device",
    ),
    t5(
        "loss as a sum",
        "CrossEntropyLoss(ignore_index=-100)",
        "CrossEntropyLoss(ignore_index=-100, reduction='sum')",
        count=9,
    ),
    t5(
        "decoder keeps its embeddings",
        "self.decoder.set_input_embeddings(new_embeddings)",
        "pass",
        "structure",
        count=9,
    ),
    t5("encoder's keys taken anew", "past_key_values.is_updated[self.layer_idx] = True", "pass"),
    t5(
        "norms initialised without the factor",
        "init.constant_(module.weight, factor * 1.0)",
        "init.constant_(module.weight, 1.0)",
        "structure",
    ),
)

HYBRID = (
    qwen3_next("a cache against the caller's wish", CACHE, "if past_key_values is None:"),
    qwen3_next(
        "decay in low precision",
        "-self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)",
        "-self.A_log.exp() * F.softplus(a + self.dt_bias)",
    ),
    qwen3_next(
        "gate in low precision", "ACT2FN[self.activation](gate.to(torch.float32))", "ACT2FN[self.activation](gate)"
    ),
    qwen3_next("positions in the model's dtype", ANGLES, "position_ids[..., None].to(x.dtype).float()"),
    qwen3_next("logits_to_keep only as a number", KEEP, NUMBERS),
    qwen3_next("loss without its keywords", LM_LOSS, LM_LOSS.replace(", **kwargs", "")),
)

ARGUMENTS: tuple[Bug, ...] = (*LLAMA, *MOE, *GEMMA2, *BERT, *T5, *HYBRID)
