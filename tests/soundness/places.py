"""Which random modules a transform is tried on."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st

from soundness.case import Case
from soundness.random_computations import expansions, layer_norms, rms_norms, rotations
from soundness.random_forwards import forwards
from soundness.random_losses import losses
from soundness.random_models import (
    HOST_SITES,
    LENGTH_SITES,
    decoders,
    host_values,
    latent_decoders,
    loops,
    sparse_blocks,
)
from soundness.random_modules import downs, gated, pairs, patches, projections, residuals
from soundness.random_segments import segments
from soundness.random_states import gated_norms, windows


@dataclass(frozen=True)
class Place:
    """What random modules for a transform are made of, and the transforms that have to run before it."""

    cases: st.SearchStrategy[Case]
    also: tuple[str, ...] = ()


_STEP = (
    "fuse_add_norm", "fuse_gate_up", "fuse_gated_activation", "fuse_qkv", "fuse_rms_norm", "fuse_rope", "native_gqa",
)  # fmt: skip

PLACES = {
    "batch_segments": Place(segments()),
    "capture_forward": Place(forwards()),
    "decode_head": Place(decoders(("head",))),
    "decode_layers": Place(st.one_of(decoders(("feed", "attention", "layer")), latent_decoders()), _STEP),
    "decode_masks": Place(decoders(("model",)), (*_STEP, "decode_layers")),
    "fixed_count_loops": Place(loops()),
    "fuse_add_norm": Place(residuals(), ("fuse_rms_norm",)),
    "fuse_experts": Place(sparse_blocks(), ("fuse_gated_activation",)),
    "fuse_gate_up": Place(pairs()),
    "fuse_gated_activation": Place(gated()),
    "fuse_gated_norm": Place(gated_norms()),
    "fuse_layer_norm": Place(layer_norms()),
    "fuse_loss": Place(losses()),
    "fuse_qkv": Place(projections()),
    "fuse_rms_norm": Place(rms_norms()),
    "fuse_rope": Place(rotations()),
    "fuse_state_steps": Place(windows()),
    "multiply_patches": Place(patches()),
    "native_gqa": Place(expansions()),
    "preallocate_buffers": Place(
        st.one_of(
            host_values(HOST_SITES, "constants"), host_values(HOST_SITES, "constants"), decoders(("rotary", "model"))
        ),
        (*_STEP, "decode_layers"),
    ),
    "route_gemm": Place(projections()),
    "spare_activation": Place(downs(), ("fuse_gated_activation",)),
    "static_cache": Place(host_values(LENGTH_SITES, "lengths")),
}
