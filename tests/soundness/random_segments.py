"""Random attention to one image after the other: loops over pieces in many spellings, one of their parts often odd."""

from __future__ import annotations

import hypothesis.strategies as st

from soundness.case import Case, case_of
from soundness.noise import Draw, Names, supported
from soundness.random_computations import _pick
from soundness.random_models import _changed, _needed

_SIZES = ("lengths.tolist()", "3", "lengths.tolist()[::-1]", "self.next()", "lengths", "[1, *lengths.tolist()]")
_RESULTS = ("joined", "joined.flatten(2) * 2", "(joined, a)", "(joined, query, lengths)", "joined + q.mean()")


def _spelled(draw: Draw, tensors: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the lines that split three tensors, and what runs over the pieces."""
    sizes = _pick(draw, *_SIZES)
    dim = _pick(draw, "dim=2", "2", "dim=1", "dim=-2")
    torch_split, method = f"torch.split({{}}, {sizes}, {dim})", f"{{}}.split({sizes}, {dim})"
    other = f"{{}}.split({_pick(draw, *_SIZES[1:])}, {dim})"
    each = [_pick(draw, *draw(st.permutations((torch_split, method))), other).format(name) for name in tensors]
    listed = f"[{torch_split.format('states')} for states in ({', '.join(tensors)})]"
    way = draw(st.integers(0, 4))
    if way == 0:
        return [f"parts = {listed}"], "zip(*parts)"
    if way == 1:
        return [f"queries = {each[0]}", f"keys = {each[1]}", f"values = {each[2]}"], "zip(queries, keys, values)"
    if way == 2:
        return [f"parts = {each[0]}, {each[1]}, {each[2]}"], "zip(*parts)"
    return [], f"zip(*{listed})" if way == 3 else f"zip({', '.join(each)})"


def _called(draw: Draw) -> str:
    """Return the call of a turn."""
    pieces = _pick(draw, "q, k, v", "q, v, k", "k, k, v")
    mask = _pick(draw, "None", "attention_mask=None", "attention_mask=query.new_ones(1, 1, 1, 1)")
    more = _pick(
        draw,
        "",
        ", scaling=self.scaling",
        ", is_causal=True",
        ", scaling=0.5 if self.training else self.scaling",
        ", dropout=self.rate if self.training else 0.0",
        ", scaling=q.shape[2]",
        ", scaling=self.next()",
        ", scaling=self.bumped",
    )
    return f"attend(self, {pieces}, {mask}{more})"


@st.composite
def segments(draw: Draw) -> Case:
    """Return attention to the pieces of queries, keys and values, or what is nearly that."""
    lines, iterated = _spelled(draw, tuple(draw(st.permutations(("query", "key", "value")))))
    call, way = _called(draw), draw(st.integers(0, 3))
    empty, join = _pick(draw, "[]", "[query.transpose(1, 2)]"), _pick(draw, "dim=1", "1", "axis=1", "dim=0", "dim=2")
    results = _pick(draw, "outputs", "outputs[::-1]", "outputs[1:]")
    if way == 0:
        lines += [f"outputs = [{call}[0] for q, k, v in {iterated}]"]
    elif way == 1:
        results = f"[{call}[0] for q, k, v in {iterated}]"
    elif way == 2:
        lines += [f"outputs = {empty}", f"for q, k, v in {iterated}:", f"    outputs.append({call}[0])"]
    else:
        lines += [f"outputs, weights = {empty}, []", f"for q, k, v in {iterated}:", f"    output, weight = {call}"]
        lines += ["    outputs.append(output)", "    weights.append(weight)"]
    returned = _pick(draw, *(("(joined, weights)", *_RESULTS) if way == 3 else _RESULTS))
    lines += [f"joined = torch.cat({results}, {join})", f"return {returned}"]
    names = Names(("query", "key", "value"), ("a", "c", "query", "value"))
    body = "\n".join(lines)
    text = _changed(draw, body, names, draw(st.integers(0, 1)))
    needed = _needed(f"{text}\na" if "a)" in returned else text).format("query")
    holes = {"body": needed + text, "implementation": _pick(draw, '"sdpa"', '"eager"')}
    if draw(st.booleans()):
        holes["inputs"] = "*randn(4 * b, 3, 2, 4).permute(1, 2, 0, 3)[:, None].unbind(0), torch.tensor([b, b, 2 * b])"
    if draw(st.integers(0, 3)) == 0:
        holes["inputs"] = "randn(b, 2, 9, 4), randn(b, 2, 9, 4), randn(b, 2, 9, 4), torch.tensor([3, 3, 3])"
    return case_of("random/segments.attention", "segments", supported(holes))
