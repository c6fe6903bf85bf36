"""Bugs planted into the step of latent attention; each names the check of the loop that has to catch it."""

from __future__ import annotations

from functools import partial

from .generation_bugs import CONTINUED, ONE, PADDED, bug

SCORES = "scores = torch.matmul(absorbed, latents.transpose(1, 2))"
HALVES = "ups, values = weight.view(-1, sizes.nope + sizes.value, weight.shape[1]).split([sizes.nope, sizes.value], 1)"
WRITTEN = "past_key_values.update(latent, key, layer_idx)"
VISIBLE = "return (slots <= cache.position) & (slots >= cache.starts[:, None])"
TURNED = "rope, key = rotary(rope, key, *position_embeddings, **options)"
LAYER = "layer = past_key_values.layers[layer_idx]"
HEADS = "values.transpose(1, 2)).transpose(0, 1).reshape"

minicpm3, deepseek_v3, deepseek_v2 = (partial(bug, model) for model in ("minicpm3", "deepseek_v3", "deepseek_v2"))

LATENTS = (
    minicpm3(
        "the wrong half of kv_b_proj",
        ONE,
        "latents",
        HALVES,
        HALVES.replace("ups, values", "values, ups").replace("sizes.nope, sizes.value]", "sizes.value, sizes.nope]"),
    ),
    minicpm3(
        "the rotated part not scaled",
        ONE,
        "latents",
        SCORES,
        f"absorbed, scaling = absorbed * scaling, 1.0\n    {SCORES}",
    ),
    minicpm3("the rotated part left out", ONE, "latents", SCORES, f"rope = 0 * rope\n    {SCORES}"),
    minicpm3("a stale latent", ONE, "latents", WRITTEN, WRITTEN.replace("latent", "0 * latent")),
    minicpm3("a stale key", ONE, "latents", WRITTEN, WRITTEN.replace("key, l", "0 * key, l")),
    minicpm3("a token too few is seen", ONE, "latents", VISIBLE, VISIBLE.replace("<=", "<")),
    minicpm3(
        "a token too many is seen", ONE, "latents", VISIBLE, VISIBLE.replace("cache.position)", "cache.position + 1)")
    ),
    minicpm3("padding is seen", PADDED, "latents", VISIBLE, VISIBLE.replace("cache.starts", "0 * cache.starts")),
    minicpm3(
        "latents of another layer",
        ONE,
        "_runtime/attention/latent_attention.py",
        LAYER,
        LAYER.replace("[layer_idx]", "[layer_idx - 1]"),
    ),
    minicpm3("heads exchanged", ONE, "latents", HEADS, HEADS.replace("values", "values.flip(0)")),
    deepseek_v3("the key not rotated", ONE, "latents", TURNED, TURNED.replace("rope, key =", "rope, _ =")),
    deepseek_v3("the query not rotated", ONE, "latents", TURNED, TURNED.replace("rope, key =", "_, key =")),
    deepseek_v3(
        "latents not normed", ONE, "latents", "latent, key = norm(latent).view(", "latent, key = latent.view("
    ),
    deepseek_v3(
        "the scaling of another width",
        ONE,
        "",
        "            scaling=self.scaling,\n            norm=norm,",
        "            scaling=self.qk_rope_head_dim**-0.5,\n            norm=norm,",
    ),
    deepseek_v3("pairs not written apart", ONE, "", "            deinterleave=self.config.rope_interleave,\n", ""),
    deepseek_v2(
        "cosines for sines",
        ONE,
        "",
        "(position_embeddings.real, position_embeddings.imag)",
        "(position_embeddings.imag, position_embeddings.real)",
    ),
    deepseek_v2(
        "halves of a head for neighbours",
        ONE,
        "",
        "            interleaved=True,\n            half_table=True,\n            in_fp32=True,\n",
        "            half_table=True,\n            in_fp32=True,\n",
    ),
    deepseek_v2(
        "latents not continued",
        CONTINUED,
        "_runtime/cache/layers.py",
        "= other.keys[:, :, : length - start]",
        "= 0 * other.keys[:, :, : length - start]",
    ),
)
