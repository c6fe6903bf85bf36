"""A decode step stands for the attention that a file has for `eager` only where both compute the same."""

from __future__ import annotations

import libcst as cst
import pytest

from rewrite.analysis.blocks.terms import NoStep
from rewrite.analysis.decode.eager_attention import check_eager_attention
from rewrite.analysis.terms.spelling import NONE, Term
from rewrite.analysis.tree.module import Module

HEAD = """
import torch
import torch.nn.functional as F


def spread(heads, times):
    rows, count, length, width = heads.shape
    return heads[:, :, None].expand(rows, count, times, length, width).reshape(rows, count * times, length, width)


def attend(owner, query, key, value, mask, scaling=None, dropout=0.0, softcap=None, bias=None, **others):
"""
PLAIN = """
    key, value = spread(key, owner.groups), spread(value, owner.groups)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=owner.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
"""
CAP = "        scores = softcap * torch.tanh(scores / softcap)\n"
CAPPED = PLAIN.replace("    if mask", f"    if softcap is not None:\n{CAP}    if mask", 1)
SINK = """
    scores = scaling * torch.matmul(query, spread(key, owner.groups).transpose(2, 3)) + mask
    sinks = owner.sinks.view(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    joined = torch.cat((scores, sinks), dim=-1)
    weights = (joined - joined.max(dim=-1, keepdim=True).values).softmax(-1)[..., :-1]
    return torch.matmul(weights, spread(value, owner.groups)).transpose(1, 2), None
"""
GATED = PLAIN.replace(
    "return torch.matmul(weights, value).transpose(1, 2)",
    "return (torch.matmul(weights, value)\n"
    "        * torch.sigmoid(scores.logsumexp(dim=-1) - owner.sinks.view(1, -1, 1)).unsqueeze(-1)).transpose(1, 2)",
)
OWN = {name: Term("attribute", (), name) for name in ("scaling", "softcap", "sinks")}
GIVEN = {name: Term("parameter", (), name) for name in ("query", "key", "value", "attention_mask")}
GIVEN |= {"scaling": OWN["scaling"]}


def refusal(body: str, function: str = "attend", **given: Term) -> str:
    module = Module(cst.parse_module(HEAD + body))
    chosen = Term(
        "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface", (NONE, Term("name", (), function))
    )
    try:
        check_eager_attention(chosen, GIVEN | given, module)
    except NoStep as error:
        return error.detail
    return ""


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (PLAIN, {}),
        (PLAIN.replace("scores + mask", "mask[..., : key.shape[-2]] + scores"), {}),
        (PLAIN.replace("* scaling", "* (query.shape[-1] ** -0.5 if scaling is None else scaling)"), {}),
        (CAPPED, {}),
        (CAPPED, {"softcap": OWN["softcap"]}),
        (SINK, {"s_aux": OWN["sinks"]}),
        (GATED, {"s_aux": OWN["sinks"]}),
    ],
    ids=["plain", "mask first", "scaling or default", "cap unused", "cap", "sink", "sink as a gate"],
)
def test_what_a_step_computes_too(body: str, given: dict[str, Term]) -> None:
    assert refusal(body, **given) == ""


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (PLAIN.replace("scores + mask", "scores + mask + owner.slopes"), {}),
        (PLAIN.replace("* scaling", "* scaling * 2"), {}),
        (PLAIN.replace("* scaling", "/ scaling"), {}),
        (PLAIN.replace("dim=-1, dtype", "dim=-2, dtype"), {}),
        (PLAIN.replace("F.softmax(scores, dim=-1, dtype=torch.float32)", "torch.sigmoid(scores)"), {}),
        (PLAIN.replace("matmul(weights, value)", "matmul(weights, value * 2)"), {}),
        (PLAIN.replace("matmul(weights, value)", "matmul(weights, key)"), {}),
        (PLAIN.replace("matmul(query,", "matmul(query.tanh(),"), {}),
        (PLAIN.replace("    weights = F.drop", "    weights = weights / 2\n    weights = F.drop"), {}),
        (PLAIN.replace("training=owner.training", "training=True"), {}),
        ("\n    spread = owner.spread" + PLAIN, {}),
        (PLAIN.replace("    if mask", "    scores = scores.clamp(max=9)\n    if mask"), {}),
        (PLAIN.replace("transpose(1, 2)", "transpose(1, 3)"), {}),
        (PLAIN, {"softcap": OWN["softcap"]}),
        (CAPPED.replace("scores / softcap", "scores / 2"), {"softcap": OWN["softcap"]}),
        (SINK, {}),
        (PLAIN, {"s_aux": OWN["sinks"]}),
        (GATED, {}),
        (SINK, {"s_aux": OWN["scaling"]}),
        (SINK.replace("[..., :-1]", "[..., 1:]"), {"s_aux": OWN["sinks"]}),
        (SINK.replace("(scores, sinks)", "(scores, scores, sinks)"), {"s_aux": OWN["sinks"]}),
        (GATED.replace("scores.logsumexp", "weights.logsumexp"), {"s_aux": OWN["sinks"]}),
        (PLAIN.replace("    key, value =", "    owner.seen = 1\n    key, value ="), {}),
        (PLAIN.replace("spread(key, owner.groups)", "key.repeat_interleave(owner.groups, dim=2)"), {}),
        (PLAIN.replace("spread(value, owner.groups)", "value.repeat_interleave(owner.groups, dim=2)"), {}),
    ],
)
def test_what_a_step_does_not_compute(body: str, given: dict[str, Term]) -> None:
    assert body not in (PLAIN, CAPPED) or given
    assert refusal(body, **given).startswith("attend: ")


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        ("transformers.models.llama.modeling_llama.eager_attention_forward", ""),
        ("torch.nn.functional.scaled_dot_product_attention", ""),
        ("elsewhere.attend_otherwise", "elsewhere.attend_otherwise is not of this file"),
        ("given_at_run_time", "given_at_run_time is not of this file"),
    ],
)
def test_functions_of_other_files(function: str, refused: str) -> None:
    assert refusal(PLAIN, function) == refused
