"""Random expert loops, sparse blocks, decoders and reads of host values."""

from __future__ import annotations

import re

import hypothesis.strategies as st

from soundness.case import Case, case_of, scaffold
from soundness.noise import Draw, Lines, Names, around, noise, supported


def _filled(name: str, around_it: str, given: dict[str, str]) -> Case:
    return case_of(f"random/{around_it}.{name}", around_it, supported(given))


def _changed(draw: Draw, text: str, names: Names, most: int = 2, skip: int = 0) -> str:
    """Return a body with up to `most` statements put between its lines, at the indentation of the next one."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(skip, len(lines) - 1))
        following = lines[place]
        if not following.strip() or following.strip().startswith(
            (")", "hidden_states, attention", "position_embeddings=")
        ):
            continue
        if any(lines[place - 1].rstrip().endswith(end) for end in ("(", ",")) and place:
            continue
        indent = following[: len(following) - len(following.lstrip())]
        lines[place:place] = [indent + line for line in draw(noise(names))]
    return "\n".join(lines)


_LOCALS = (
    "a, c, xs, d, n, z = {0} * 1, {0}, [{0}], {{'k': {0}}}, None, None\n"
    "flag, late = len({0}) == 2, lambda: {0}\n"
    "self.kept = {0}\n"
)


_EACH = {
    "a": "a = {0} * 1", "c": "c = {0}", "xs": "xs = [{0}]", "d": "d = {{'k': {0}}}", "n": "n = None", "z": "z = None",
    "flag": "flag = len({0}) == 2", "late": "late = lambda: {0}", "kept": "self.kept = {0}",
}  # fmt: skip


def _needed(text: str) -> str:
    """Return those locals that a body reads: with a list or a function among them nothing is rewritten."""
    return "".join(f"{line}\n" for name, line in _EACH.items() if re.search(rf"\b{name}\b", text))


@st.composite
def expert_loops(draw: Draw) -> Case:
    """Return a loop over the experts that were hit."""
    body = _changed(draw, scaffold("expert_loop")[1]["body"], Names(("hidden_states", "a"), ("a", "c")), 1)
    if draw(st.booleans()):
        body = _changed(draw, body, Names(("state",), ("state", "c")), 1, skip=9)
    return _filled("loop", "expert_loop", {"body": _LOCALS.format("hidden_states") + body})


_FLOW = """\
dt = -1.0 / {steps}
{wrapped}
while time >= -dt / 2:
    x = x + dt * y * time
    time += dt
return x, y, n"""


@st.composite
def flows(draw: Draw) -> Case:
    """Return a loop that counts a time down."""
    steps = draw(st.sampled_from(("self.steps", "5", "self.next()", "n", "self.steps")))
    dtype = draw(st.sampled_from(("float32", "float32", "float64", "bfloat16")))
    tensors = f"dt = torch.tensor(dt, dtype=torch.{dtype})\ntime = torch.tensor(1.0, dtype=torch.{dtype})"
    wrapped = draw(st.sampled_from((tensors, "time = 1.0")))
    names = Names(("x", "y"), ("x", "a"), layout=False)
    body = _changed(draw, _FLOW.format(steps=steps, wrapped=wrapped), names, 1)
    odd = (
        "dt.mul_(1.1)",
        "time.sub_(0.1)",
        "t = time\n    t -= 0.1",
        "bump(time)",
        "self.steps += 1",
        "_ = 3",
        "pass",
    )
    if draw(st.booleans()):
        body = body.replace("    x = x + dt", f"    {draw(st.sampled_from(odd))}\n    x = x + dt", 1)
    start = _LOCALS.format("x") + "n = 4\n"
    init = draw(st.sampled_from(("", "", "self.steps = 3.5", "self.steps = torch.tensor(3)", "self.steps = 60")))
    # A time that a statement keeps from falling would turn for ever.
    body = body.replace("    time += dt", "    time += dt\n    self.turns += 1\n    assert self.turns < 400")
    return _filled("flow", "plain", {"body": start + body, "init": f"{init}\nself.turns = 0"})


@st.composite
def loops(draw: Draw) -> Case:
    """Return a loop of either kind."""
    return draw(st.one_of(expert_loops(), flows()))


@st.composite
def sparse_blocks(draw: Draw) -> Case:
    """Return a block of router and experts."""
    given = scaffold("experts")[1]
    body = _changed(draw, given["body"], Names(("hidden_states", "a"), ("a", "c")), 1)
    router = _changed(draw, given["router"], Names(("x", "a"), ("a", "c")), 1 if draw(st.booleans()) else 0)
    odd = {
        "weights)": ("weights)", "weights * 2)", "weights.fill_(1))"),
        "tokens, index": ("tokens, index", "tokens + 1, index", "tokens, index.flip(-1)", "bump(tokens), index"),
        "length, width)": (
            "length, width)",
            "length, width) + hidden_states",
            "length, width) + self.soft(hidden_states)",
        ),
    }
    for old, new in odd.items():
        body = body.replace(old, draw(st.sampled_from((old, *new))))
    router = router.replace("dim=-1, dtype", draw(st.sampled_from(("dim=-1, dtype", "dim=-1, dtype", "dim=0, dtype"))))
    holes = {"body": _LOCALS.format("hidden_states") + body, "router": _LOCALS.format("x") + router}
    supports = supported(holes)
    supports["router_init"] = supports.get("init", "")
    return case_of("random/experts.block", "experts", supports)


_PARTS = ("feed", "rotary", "attention", "layer", "model", "head")
_READS = {"feed": "x", "rotary": "x"}


_CUT = "attention_mask[:, :, :, : key.shape[-2]]"
_MASKS = ("attention_mask", "attention_mask", _CUT, "attention_mask * 0.5", "None")
_OF_SEVERAL = ", is_causal=attention_mask is None and query.shape[2] > 1"
_CAUSAL = ("", "", ", is_causal=False", _OF_SEVERAL, ", is_causal=True")
_SCALES = ("", ", scale=self.scaling", ", scale=self.scaling / 2", ", scale=1 / math.sqrt(self.head_dim)")
_ENDS = ("output.transpose(1, 2)", "output.transpose(1, 2).contiguous()", "output.mT", "output")


def _by_torch(draw: Draw, attention: str) -> str:
    """Return attention with torch's own function in the place of one that is looked up."""
    start, _ = attention.split("interface = ")
    given = [draw(st.sampled_from(choice)) for choice in (_MASKS, _CAUSAL, _SCALES)]
    called = f"output = F.scaled_dot_product_attention(query, key, value, {''.join(given)})"
    end = f"return self.o_proj({draw(st.sampled_from(_ENDS))}.reshape(*input_shape, -1)), None"
    return f"{start}{called}\n{end}"


def _decoder(draw: Draw, parts: tuple[str, ...], kind: str = "decoder") -> Case:
    """Return a decoder with statements in some of its parts."""
    given = dict(scaffold(kind)[1])
    holes: dict[str, str] = {}
    direct = kind == "decoder" and "attention" in parts and draw(st.integers(0, 2)) == 0
    if direct:
        given["attention"] = _by_torch(draw, given["attention"])
    for part in parts:
        source = _READS.get(part, "inputs_embeds" if part == "model" else "hidden_states")
        text = _changed(draw, given[part], Names((source, "a"), ("a", "c"), layout=part == "head"), 1)
        if text != given[part]:
            holes[part] = (_LOCALS if kind == "decoder" else _needed(text)).format(source) + text
        elif direct and part == "attention":
            holes[part] = text
    inits = {"feed": "layer_init", "rotary": "rotary_init", "attention": "attention_init", "layer": "layer_init"}
    supports = supported(dict(holes))
    holes |= {key: supports[key] for key in ("imports", "before") if key in supports}
    for part in parts:
        own = inits.get(part, f"{part}_init")
        if part in holes and "init" in supports:
            text = supports["init"].replace("self.", "self.mlp.") if part == "feed" else supports["init"]
            holes[own] = "\n".join(filter(None, (given.get(own), text)))
    for part, hole in (
        ("attention", "attention_methods"),
        ("layer", "layer_methods"),
        ("model", "model_methods"),
        ("head", "head_methods"),
    ):
        if part in holes and "methods" in supports:
            holes[hole] = supports["methods"]
    return case_of(f"random/{kind}.model", kind, holes)


@st.composite
def decoders(draw: Draw, parts: tuple[str, ...]) -> Case:
    """Return a decoder with statements in one or two of the given parts."""
    chosen = tuple(sorted({draw(st.sampled_from(parts)), draw(st.sampled_from(parts))}))
    return _decoder(draw, chosen)


@st.composite
def latent_decoders(draw: Draw) -> Case:
    """Return a decoder with statements in its attention, whose keys and values are made of latents."""
    return _decoder(draw, ("attention",), "latents")


_HOST = (
    ["z = x[:, [{i}], :]", "a = z + 1"],
    ["a = x[..., [{i}]] + y"],
    ["z = x[:, [{i}], :]", "self.relu(z)", "a = z * 2"],
    ["z = x[:, [{i}], :]", "bump(z)", "a = z * 2"],
    ["z = x[:, [{i}], :]", "self.kept = z", "self.bump_kept()"],
    ["z = x[..., [{i}]].view(-1)", "a = z.sum() + x"],
    ["a = x * torch.tensor({v}, device=x.device)"],
    ["z = torch.tensor({v}, device=x.device)", "a = x * z"],
    ["z = torch.tensor({v}, dtype=torch.{t}, device=x.device)", "a = x * z"],
    ["w = torch.finfo(x.dtype).min", "z = torch.tensor(w, dtype=x.dtype, device=x.device)", "a = x + 0 * z"],
    ["if self.limit > 0:\n    a = x * torch.tensor(self.limit, device=x.device)"],
)
_LENGTHS = (
    ["z = torch.arange(past_length, past_length + x.shape[1])", "a = x + z.sum()"],
    ["z = self.places[:, past_length : past_length + x.shape[1]]", "a = x + z.sum()"],
    ["z = self.places[:, past_length : past_length + x.shape[1]]", "bump(z)"],
    ["z = self.places[:, past_length : past_length + x.shape[1]]", "self.places.add_(1)", "a = x + z.sum()"],
    ["z = self.table[:, past_length : past_length + x.shape[1]]", "a = x + z.mean()"],
    ["z = self.table[:, past_length : past_length + x.shape[1]]", "z = z.view(-1)", "a = x + z.mean()"],
    ["past_length = past_length + 1", "z = torch.arange(past_length, past_length + x.shape[1])", "a = x * z.sum()"],
    ["z = torch.arange(past_length, past_length + self.next())", "a = x + z.sum()"],
    ["z = torch.arange(past_length, x.shape[1] + past_length)", "z += 1", "a = x + z.sum()"],
)


@st.composite
def host_values(draw: Draw, sites: tuple[Lines, ...], name: str) -> Case:
    """Return a method that reads numbers and places from the host."""
    holes = {
        "i": draw(st.sampled_from(("0", "-1", "1", "2", "5"))),
        "v": draw(st.sampled_from(("2.5", "3", "-1", "1e9", "self.limit"))),
        "t": draw(st.sampled_from(("float32", "float64", "int64", "float16"))),
    }
    site = [line.format(**holes) for line in draw(st.sampled_from(sites))]
    body = [*_LOCALS.format("x").splitlines(), *draw(around(site, Names(("x", "y", "a"), ("a", "c")), 1))]
    past = draw(st.sampled_from(("2", "0", "15", "-2", "2.5")))
    given = {
        "body": "\n".join([*body, "return x, y, a, c, n"]),
        "args": "self, x, y, past_length=0",
        "inputs": f"randn(b, 3, 8), randn(b, 3, 8), {past}",
        "init": "self.register_buffer('table', torch.randn(2, 16, 4))\n"
        + draw(st.sampled_from(("", "", "self.limit = [0.5]", "self.limit = 2", "self.limit = torch.tensor([0.5])"))),
    }
    return _filled(name, "plain", given)


HOST_SITES, LENGTH_SITES = _HOST, _LENGTHS
