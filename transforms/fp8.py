"""Weights of projections are read in 8 bits: on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import LINEAR
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute
from rewrite.analysis.tree.nodes import called_attribute, calls_in, expression, single_argument
from rewrite.analysis.tree.replacement import name_is_free
from rewrite.operators import offers
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform


@cache
def products() -> Mapping[str, str]:
    """Return the products that other transforms call, with the form of each that reads its weights in 8 bits."""
    return {offer.name: offer.fp8 for offer in offers() if offer.fp8}


@cache
def norms() -> Mapping[str, str]:
    """Return the operators whose rows those products read, with the form of each that writes them in 8 bits."""
    return {offer.name: offer.fp8_rows for offer in offers() if offer.fp8_rows}


@cache
def bases() -> Mapping[str, str]:
    """Return the bases of classes with such products, with the one that knows how these round."""
    return {offer.name: offer.fp8_class for offer in offers() if offer.fp8_class}


@dataclass(frozen=True)
class _Site:
    """A call, the function that takes its place, and the projections that it reads."""

    call: cst.Call
    new: str
    label: str


class Fp8(Transform):
    """Projections read their weights in 8 bits, on request only.

    What it does:
        The products that other transforms wrote (`linear`, `gated_linear`, `packed_linear`, `qkv_step`), the other
        projections of the same attention and MLP, and the head, become calls of the same form with weights in e4m3.
        The copies in 8 bits are made on the device at first use and kept beside the parameters: the checkpoint, the
        state dict and what is saved stay as they are. `GraphGeneration` becomes `Fp8GraphGeneration`, which knows how
        such products round. Prompts quantise the activations too, in the kernels that add
        the residual and normalise, and that activate.

    Why:
        A decode step reads every weight once, so half the bytes are nearly half the time; a chip that multiplies
        8-bit floats reads a prompt at up to twice the speed.

    What it needs:
        `rewrite MODEL --with fp8`, and memory for the copies: half of what the bf16 weights take.

    Numerics:
        Approximate: a weight is rounded to 3 mantissa bits with a power of two for each output row. Verification
        compares with the original's weights rounded in the same way, and says how far that is from the original.

    Known limits:
        Embeddings, norms, routers and the experts of a mixture stay. With gradients, hooks, adapters or quantised
        weights the weights are read as they are, and `explain` says so. `torch.compile` quantises in every call.
    """

    name = "fp8"
    summary = "Projections read their weights in 8 bits: half the bytes of a decode step."
    numerics = Numerics.APPROXIMATE
    stage = Stage.STEP
    on_request = True
    after = (
        "decode_head", "decode_layers", "fuse_add_norm", "fuse_gate_up", "fuse_gated_activation", "fuse_qkv",
        "fuse_rms_norm", "static_cache",
    )  # fmt: skip
    reasons: ClassVar[Mapping[str, str]] = {
        "other_call": "a projection is called with other arguments than its input",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every product of a class that has one of the runtime's, the sums that are normalised for them, the base."""
        any_product = any(_projections(info, module) for info in module.classes.values())
        for info in module.classes.values():
            for argument in info.node.bases if any_product else ():
                if (name := _base(argument.value, module)) is not None:
                    yield Candidate(argument.value, info.name, name)
            for name, method in info.methods.items():
                for site in _sites(info, method, module):
                    yield Candidate(site.call, f"{info.name}.{name}", site.label)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the function's name, or the call of the module by one of the function."""
        if candidate.where in module.classes:
            return _with_base(candidate.node, bases()[candidate.label])
        owner, name = candidate.where.split(".")
        method = module.classes[owner].methods[name]
        sites = _sites(module.classes[owner], method, module)
        site = next(site for site in sites if site.call is candidate.node)
        call = site.call
        attribute = called_attribute(call)
        if attribute is None:
            return Found((Edit(call.func, (cst.Name(site.new),)),), (site.new,))
        argument = single_argument(call)
        if argument is None:
            return Skip("other_call")
        if _calls(argument, "gated_activation", module) and isinstance(argument, cst.Call):
            arguments = ", ".join(module.code(inner.value) for inner in argument.args)
            product = expression(f"fp8_gated_product({arguments}, self.{attribute})")
            return Found((Edit(call, (product,)),), ("fp8_gated_product",))
        return Found(
            (Edit(call, (expression(f"fp8_linear({module.code(argument)}, self.{attribute})"),)),), (site.new,)
        )


def _base(node: cst.BaseExpression, module: Module) -> str | None:
    """Return the name of the runtime's class that a base is, of those that there is another of for 8 bits."""
    name = node.value if isinstance(node, cst.Name) else ""
    return name if name in bases() and name_is_free(name, module) else None


def _with_base(base: cst.CSTNode, new: str) -> Found:
    return Found((Edit(base, (cst.Name(new),)),), (new,))


def _sites(info: ClassInfo, method: cst.FunctionDef, module: Module) -> Iterator[_Site]:
    """Yield what is to be rewritten in a method, in source order."""
    projections = _projections(info, module)
    packs = any(_calls(call, "packed_linear", module) or _is_new(call) for call in calls_in(method.body))
    for call in calls_in(method.body):
        attribute = called_attribute(call)
        if (norm := _called(call, norms(), module)) is not None:
            if any(_projections(other, module) for other in module.classes.values()):
                yield _Site(call, norms()[norm], module.code(call.args[-1].value).removeprefix("self."))
        elif (product := _called(call, products(), module)) is not None:
            if read := _read(call):
                yield _Site(call, products()[product], f"{product}: {', '.join(read)}")
        elif attribute is not None and (attribute in projections or (packs and _is_linear(info, attribute, module))):
            yield _Site(call, products()["linear"], attribute)


def _called(call: cst.Call, names: Iterable[str], module: Module) -> str | None:
    return next((name for name in names if _calls(call, name, module)), None)


def _projections(info: ClassInfo, module: Module) -> set[str]:
    """Return the attributes that the runtime's products read in any method, in 8 bits or not."""
    calls = [call for method in info.methods.values() for call in calls_in(method.body)]
    reading = (c for c in calls if _is_new(c) or _called(c, products(), module) is not None)
    return {attribute for call in reading for attribute in _read(call)}


def _read(call: cst.Call) -> list[str]:
    """Return the attributes that a product is given as its projections: all but its first argument, or in a tuple."""
    found = []
    for argument in call.args[1:]:
        if argument.keyword is not None:
            continue
        given = argument.value
        values = [element.value for element in given.elements] if isinstance(given, cst.Tuple) else [given]
        names = [self_attribute(value) for value in values]
        found += [name for name in names if name is not None]
        if isinstance(given, cst.Tuple):
            break
    return found


def _calls(node: cst.CSTNode, name: str, module: Module) -> bool:
    """Whether `node` calls the runtime's function of a name: nothing in the file itself is called that."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Name) or node.func.value != name:
        return False
    return name_is_free(name, module)


def _is_new(call: cst.Call) -> bool:
    new = {*products().values(), *norms().values()}
    return isinstance(call.func, cst.Name) and call.func.value in new


def _is_linear(info: ClassInfo, attribute: str, module: Module) -> bool:
    values = module.assignments(info, attribute)
    return bool(values) and all(isinstance(v, cst.Call) and module.qualified(v.func) in LINEAR for v in values)
