"""Causal language models that generate against a cache of fixed addresses, and code that can live with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import effects_of
from rewrite.analysis.loops.cache_length import Lengths, lengths, ranged, sized_argument, sliced, uses
from rewrite.analysis.loops.cache_windows import keeps_unmasked_window
from rewrite.analysis.loops.carried_states import handed_states, kept_states
from rewrite.analysis.loops.indexers import hindrance
from rewrite.analysis.loops.loop_inputs import only_recomputes
from rewrite.analysis.loops.own_caches import CACHES, mark_of_caches
from rewrite.analysis.loops.own_loop import own_part
from rewrite.analysis.loops.unseen_caches import handed_out, taken_by_place
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, expression, parameters, replace_nodes
from rewrite.analysis.tree.replacement import name_is_free, with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_OTHER_STATES = ("key_cache",)
"""Attributes of states that no cache of transformers' holds in a layer of its own."""


_PLAIN = m.Name() | m.Attribute(value=m.Name())
_TESTS = (cst.If, cst.IfExp, cst.While)


class StaticCache(Transform):
    """Generation without a growing cache.

    What it does:
        Puts `GraphGeneration` in the place of `GenerationMixin` in the bases of a class that generates, or behind a
        mixin of another file that builds on it. It is a `GenerationMixin` whose decode loop keeps keys, values and
        other states in buffers of fixed size and replays one captured step a token; what else a step is given
        (positions of several kinds, what an encoder found) it learns from the model's own loop. Code that needs the
        number of cached tokens on the host is changed to let it be on the device:
        `torch.arange(past, past + n)` → `torch.arange(n) + past`, `x[:, past : past + n]` →
        `(x.index_select(1, torch.arange(n) + past) if isinstance(past, torch.Tensor) else x[:, past : past + n])`,
        `torch.ones(b, past + n)` → `torch.ones(b, key_length(past_key_values, past, n))`. A
        `prepare_inputs_for_generation` that only forgets the cache where the rotary frequencies change (Phi-3) is
        marked: the loop runs where they do not. So is a class whose layers have a sliding window that no mask of the
        file has: a growing cache forgets what is outside, a buffer keeps all, and the loop runs where a text is not
        longer than the window. States without a cache are marked, too: attributes that modules compute from what they
        were (`keeps_states`), and an argument that `forward` gives back and the loop hands on (`hands_on_states`), in
        a list or in an object of a class of the file.

    Why:
        A cache that grows has another address and another shape at every token: no step can be captured, and each
        concatenation copies the cache.

    What it needs:
        A class that decodes with a cache of transformers' for state, or with states of a form that stays; ranges and
        slices whose length does not depend on the cache. An indexer (DeepSeek-V3.2's sparse attention) masks its
        scores before it chooses among them, and chooses among a number of candidates that the host knows.

    Numerics:
        Exact: the same integers, and where the loop cannot run, transformers' own does.

    Known limits:
        Against a cache of fixed size, a slice beyond the end of a buffer raises. Classes with a generation loop of
        their own keep `GenerationMixin`; a `generate` that calls the inherited one is none. So do classes of files
        with caches, or layers of caches, of their own (DeepSeek V4, MiniMax), and classes that act where they prepare
        a step (`prepare_inputs_for_generation`): it is asked for steps that are not run.
        A class is marked for states that its file's modules keep as attributes of their own, None before the first
        call. One that keeps them elsewhere has the loop, which finds that out at its first step and goes back.
    """

    name = "static_cache"
    summary = "Generation keeps keys and values in buffers of fixed size and replays a captured step."
    numerics = Numerics.EXACT
    stage = Stage.GRAPH
    in_decode_loop = True
    reasons: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "`forward` takes no cache, nor hands it on among its keywords",
        "other_state": "the file keeps states for which there is no buffer of fixed size",
        "device_size": "an indexer's number of candidates is known to the device alone, or some may hold no token: no "
        "mask is seen to be put over its scores",
        "own_cache": "the file makes a cache of a class of its own",
        "tuple_cache": "keys and values are taken out of the cache by place, which transformers' caches do not have",
        "unseen_cache": "the cache is handed to a class of another file, of which nothing is seen",
        "own_loop": "the class has a part of the generation loop of its own",
        "other_range": "the length of the range, size or slice depends on a cache, or it has a step, a dtype of its "
        "own or something beside whole dimensions in front of it",
        "host_test": "a branch depends on the number of cached tokens",
    }
    needs: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "a cache among what `forward` takes",
        "other_state": "fixed buffers for these states too",
        "device_size": "a choice among a fixed number of candidates, and a mask over them",
        "own_cache": "fixed buffers for what that cache holds",
        "tuple_cache": "`past_key_values.update(keys, values, layer_idx)` in its layers",
        "unseen_cache": "that file rewritten along",
        "own_loop": "a step that does what this part does",
        "name_taken": "another name in the file",
        "loses_comment": "the comment in another place",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class with `GenerationMixin` in its bases, and every use of a number of cached tokens by the host."""
        for info in module.classes.values():
            if _mixin(info, module) is not None:
                yield Candidate(info.node, info.name)
        for owner, name, method in module.methods():
            for node in uses(method, lengths(method, module), module):
                code = module.code(node.test if isinstance(node, _TESTS) else node)
                yield Candidate(node, f"{owner.name}.{name}", " ".join(code.split()))

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the base, unless the class needs more than keys and values of one sequence; or the expression."""
        if isinstance(candidate.node, cst.ClassDef):
            return self._with_mixin(module.classes[candidate.where], module)
        owner, name = candidate.where.split(".")
        method = module.classes[owner].methods[name]
        known = lengths(method, module)
        if isinstance(candidate.node, _TESTS):
            return Skip("host_test", candidate.label)
        if isinstance(candidate.node, cst.Subscript):
            return _selection(candidate.node, known, module)
        if not isinstance(candidate.node, cst.Call):
            raise TypeError("a candidate is a class, a call, a subscript or a test")
        sized = sized_argument(candidate.node, known, module)
        return _range(candidate.node, known, module) if sized is None else _size(candidate.node, sized, known, module)

    def _with_mixin(self, info: ClassInfo, module: Module) -> Found | Skip:
        skip = _skip(info, module)
        if skip is not None:
            return skip
        base = _mixin(info, module)
        if base is None:
            raise TypeError(f"{info.name} has no GenerationMixin")
        windowed = keeps_unmasked_window(info, module)
        marks = _marks(info, module, windowed)
        edits, found_uses = [_in_bases(info, base, module, marks)], ["GraphGeneration"]
        found_uses += [_use(mark) for mark in marks]
        method = info.methods.get("prepare_inputs_for_generation")
        if method is not None and only_recomputes(method) and name_is_free("recomputes_at_switch", module):
            decorator = cst.Decorator(cst.Name("recomputes_at_switch"))
            edits.append(Edit(method, (method.with_changes(decorators=[*method.decorators, decorator]),)))
            found_uses.append("recomputes_at_switch")
        return Found(tuple(edits), tuple(found_uses))


def _mixin(info: ClassInfo, module: Module) -> cst.BaseExpression | None:
    """Return the base of a class that brings the generation loop: transformers' own, or one of another file."""
    bases = [base.value for base in info.node.bases if not base.star and base.keyword is None]
    if any(module.qualified(base).rpartition(".")[2] == "GraphGeneration" for base in bases):
        return None
    brings = (base for base in bases if module.qualified(base).endswith("GenerationMixin"))
    return next((base for base in brings if module.qualified(base) not in module.classes), None)


def _marks(info: ClassInfo, module: Module, windowed: bool) -> list[str]:
    """Return the decorators that tell the loop what else to know of a class."""
    marks = ["within_window"] if windowed else []
    if not _takes_cache(_inputs(info, module)) and (handed := handed_states(info, module)) is not None:
        marks.append(f'hands_on_states("{handed}")')
    if kept := kept_states(module)[0]:
        names = ", ".join(f'"{name}"' for name in kept)
        marks.append(f"keeps_states({names})")
    if (mark := mark_of_caches(info, module)[0]) is not None:
        marks.append(mark)
    return marks


def _use(mark: str) -> str:
    """Return what of the runtime a mark is."""
    return mark.partition("(")[0]


def _in_bases(info: ClassInfo, base: cst.BaseExpression, module: Module, marks: list[str]) -> Edit:
    """Put our mixin in the place of `GenerationMixin`, or behind one of another file, which builds on that."""
    own = cst.Name("GraphGeneration")
    replaced = module.qualified(base).endswith(".GenerationMixin")
    if replaced and not marks:
        return Edit(base, (own,))
    bases = []
    for argument in info.node.bases:
        bases.append(argument.with_changes(value=own) if replaced and argument.value is base else argument)
        if argument.value is base and not replaced:
            bases[-1] = argument.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
            bases.append(cst.Arg(own, comma=argument.comma))
    decorators = [*info.node.decorators, *(cst.Decorator(expression(mark)) for mark in marks)]
    return Edit(info.node, (info.node.with_changes(bases=bases, decorators=decorators),))


def _inputs(info: ClassInfo, module: Module, before: tuple[str, ...] = ()) -> list[str]:
    """Return what `forward` takes by name; where no cache is among it, also what it hands on with its keywords.

    `before` are the classes that this one is a part of.
    """
    forward = module.method(info, "forward")
    names = parameters(forward) if forward is not None else []
    if (
        forward is None
        or any(name in CACHES for name in names)
        or not isinstance(forward.params.star_kwarg, cst.Param)
    ):
        return names
    keywords = forward.params.star_kwarg.name.value
    calls = [call for call in calls_in(forward.body) if any(_hands_on(argument, keywords) for argument in call.args)]
    read = [node for node in walk(forward.body) if type(node) is cst.Name and node.value == keywords]
    if len(read) != len(calls):
        return names  # something may be taken out of them, or put in
    for call in calls:
        given = {argument.keyword.value for argument in call.args if argument.keyword is not None}
        for part in _made(called_attribute(call), info, module):
            if part.name not in (info.name, *before):
                names += [name for name in _inputs(part, module, (info.name, *before)) if name not in given]
    return names


def _takes_cache(names: Iterable[str]) -> bool:
    return any(name in CACHES for name in names)


def _made(attribute: str | None, info: ClassInfo, module: Module) -> Iterable[ClassInfo]:
    """Yield the classes of this file that `self.<attribute>` is made from."""
    for value in module.assignments(info, attribute) if attribute is not None else ():
        name = module.qualified(value.func) if isinstance(value, cst.Call) else ""
        if name in module.classes:
            yield module.classes[name]


def _hands_on(argument: cst.Arg, keywords: str) -> bool:
    return argument.star == "**" and isinstance(argument.value, cst.Name) and argument.value.value == keywords


def _skip(info: ClassInfo, module: Module) -> Skip | None:
    if not _takes_cache(_inputs(info, module)) and handed_states(info, module) is None:
        return Skip("no_kv_cache")
    if (own := own_part(info, module)) is not None:
        return Skip("own_loop", own)
    if (cache := mark_of_caches(info, module)[1]) is not None:
        return Skip("own_cache", cache)
    attributes = [node.attr.value for node in of_kind(module.tree, cst.Attribute)]
    if (state := next((name for name in attributes if name in _OTHER_STATES), None)) is not None:
        return Skip("other_state", state)
    if (state := kept_states(module)[1]) is not None:
        return Skip("other_state", state)
    if (item := taken_by_place(info, module)) is not None:
        return Skip("tuple_cache", item)
    if (elsewhere := handed_out(info, module)) is not None:
        return Skip("unseen_cache", elsewhere)
    if (hindered := hindrance(module)) is not None:
        return Skip(*hindered)
    return None


def _range(call: cst.Call, known: Lengths, module: Module) -> Found | Skip:
    """Turn `torch.arange(past, past + n)` into `torch.arange(n) + past`."""
    found = ranged(call, known, module)
    if found is None:
        raise TypeError("a candidate's range starts at a length")
    start, end, rest = found
    count = known.more_than(end, start, module)
    named = {a.keyword.value: module.code(a.value) for a in rest if a.keyword is not None}
    if count is None or len(named) != len(rest) or not set(named) <= {"dtype", "device"}:
        return Skip("other_range", module.code(end))
    if named.get("dtype", "torch.long") not in ("torch.long", "torch.int64"):
        return Skip("other_range", named["dtype"])
    arguments = [count, *(f"{name}={value}" for name, value in named.items())]
    old, new = with_call(call, module.code(call.func), arguments, module, f" + {module.code(start)}")
    return Found((Edit(old, (new,)),))


def _selection(node: cst.Subscript, known: Lengths, module: Module) -> Found | Skip:
    """Turn `x[:, past : past + n]` into a selection of `torch.arange(n) + past` where `past` is on the device."""
    found = sliced(node, known)
    if found is None:
        raise TypeError("a candidate has a slice that starts at a length")
    dimension, start, part = found
    others = [element.slice for place, element in enumerate(node.slice) if place != dimension]
    whole = all(isinstance(o, cst.Slice) and o.lower is o.upper is o.step is None for o in others)
    if (
        not whole
        or "torch" not in module.imports
        or not m.matches(node.value, _PLAIN)
        or not isinstance(start, cst.Name)
        or (len(node.slice) == 1 and not module.code(node.value).startswith("self."))
    ):
        return Skip("other_range", module.code(node))
    names = effects_of(module).names
    if names.is_bound("isinstance") or not names.means("isinstance") or not names.means("torch"):
        return Skip("other_range", "`isinstance` or `torch` may be bound to something else")
    count = known.more_than(part.upper, start, module) if part.upper is not None and part.step is None else None
    if count is None:
        return Skip("other_range", module.code(node))
    tensor = module.code(node.value)
    places = f"torch.arange({count}, device={tensor}.device) + {start.value}"
    selected = f"{tensor}.index_select({dimension}, {places})"
    choice = expression(f"({selected} if isinstance({start.value}, torch.Tensor) else {module.code(node)})")
    return Found((Edit(node, (choice,)),))


def _size(
    call: cst.Call,
    sized: tuple[cst.BaseExpression, cst.BaseExpression, str],
    known: Lengths,
    module: Module,
) -> Found | Skip:
    """Turn the size `past + n` into `key_length(past_key_values, past, n)`."""
    size, length, more = sized
    cache = known.cache(length, module)
    if cache is None:
        return Skip("other_range", module.code(length))
    asked = expression(f"key_length({cache}, {module.code(length)}, {more})")
    arguments = [module.code(replace_nodes(argument, {id(size): (asked,)})).rstrip(", ") for argument in call.args]
    old, new = with_call(call, module.code(call.func), arguments, module)
    return Found((Edit(old, (new,)),), ("key_length",))
