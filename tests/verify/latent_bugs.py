"""Bugs planted into the step of latent attention; each names the check of the loop that has to catch it."""

from __future__ import annotations

from .generation_bugs import CONTINUED, ONE, PADDED, bug

SCORES = "scores = torch.matmul(absorbed, latents.transpose(1, 2))"
HALVES = "ups, values = weight.view(-1, sizes.nope + sizes.value, weight.shape[1]).split([sizes.nope, sizes.value], 1)"
WRITTEN = "past_key_values.update(latent, key, layer_idx)"
VISIBLE = "return (slots <= cache.position) & (slots >= cache.starts[:, None])"
TURNED = "rope, key = rotary(rope, key, *position_embeddings, **options)"
LAYER = "layer = past_key_values.layers[layer_idx]"
HEADS = "values.transpose(1, 2)).transpose(0, 1).reshape"

LATENTS = (
    bug(
        "minicpm3",
        "the wrong half of kv_b_proj",
        ONE,
        "latents",
        old=HALVES,
        new=HALVES.replace("ups, values", "values, ups").replace(
            "sizes.nope, sizes.value]", "sizes.value, sizes.nope]"
        ),
    ),
    bug(
        "minicpm3",
        "the rotated part not scaled",
        ONE,
        "latents",
        old=SCORES,
        new=f"absorbed, scaling = absorbed * scaling, 1.0\n    {SCORES}",
    ),
    bug("minicpm3", "the rotated part left out", ONE, "latents", old=SCORES, new=f"rope = 0 * rope\n    {SCORES}"),
    bug("minicpm3", "a stale latent", ONE, "latents", old=WRITTEN, new=WRITTEN.replace("latent", "0 * latent")),
    bug("minicpm3", "a stale key", ONE, "latents", old=WRITTEN, new=WRITTEN.replace("key, l", "0 * key, l")),
    bug("minicpm3", "a token too few is seen", ONE, "latents", old=VISIBLE, new=VISIBLE.replace("<=", "<")),
    bug(
        "minicpm3",
        "a token too many is seen",
        ONE,
        "latents",
        old=VISIBLE,
        new=VISIBLE.replace("cache.position)", "cache.position + 1)"),
    ),
    bug(
        "minicpm3",
        "padding is seen",
        PADDED,
        "latents",
        old=VISIBLE,
        new=VISIBLE.replace("cache.starts", "0 * cache.starts"),
    ),
    bug(
        "minicpm3",
        "latents of another layer",
        ONE,
        "_runtime/attention/latent_attention.py",
        old=LAYER,
        new=LAYER.replace("[layer_idx]", "[layer_idx - 1]"),
    ),
    bug("minicpm3", "heads exchanged", ONE, "latents", old=HEADS, new=HEADS.replace("values", "values.flip(0)")),
    bug(
        "deepseek_v3",
        "the key not rotated",
        ONE,
        "latents",
        old=TURNED,
        new=TURNED.replace("rope, key =", "rope, _ ="),
    ),
    bug(
        "deepseek_v3",
        "the query not rotated",
        ONE,
        "latents",
        old=TURNED,
        new=TURNED.replace("rope, key =", "_, key ="),
    ),
    bug(
        "deepseek_v3",
        "latents not normed",
        ONE,
        "latents",
        old="latent, key = norm(latent).view(",
        new="latent, key = latent.view(",
    ),
    bug(
        "deepseek_v3",
        "the scaling of another width",
        ONE,
        "",
        old="            scaling=self.scaling,\n            norm=norm,",
        new="            scaling=self.qk_rope_head_dim**-0.5,\n            norm=norm,",
    ),
    bug(
        "deepseek_v3",
        "pairs not written apart",
        ONE,
        "",
        old="            deinterleave=self.config.rope_interleave,\n",
        new="",
    ),
    bug(
        "deepseek_v2",
        "cosines for sines",
        ONE,
        "",
        old="(position_embeddings.real, position_embeddings.imag)",
        new="(position_embeddings.imag, position_embeddings.real)",
    ),
    bug(
        "deepseek_v2",
        "halves of a head for neighbours",
        ONE,
        "",
        old="            interleaved=True,\n            half_table=True,\n            in_fp32=True,\n",
        new="            half_table=True,\n            in_fp32=True,\n",
    ),
    bug(
        "deepseek_v2",
        "latents not continued",
        CONTINUED,
        "_runtime/cache/layers.py",
        old="= other.keys[:, :, : length - start]",
        new="= 0 * other.keys[:, :, : length - start]",
    ),
)
