"""A convolution whose kernels lie side by side is a product of patches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.as_written import why_replaced
from rewrite.analysis.projections.linear_calls import only_argument
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.nodes import called_attribute, calls_in
from rewrite.analysis.tree.replacement import with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

OPERATOR = "patch_product"

_BUILT = tuple(f"torch.nn.{place}Conv{dimensions}d" for dimensions in (1, 2, 3) for place in ("", "modules.conv."))
_PLACES = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
"""The arguments of a convolution, in their order."""
_PLAIN: Mapping[str, tuple[str, ...]] = {
    "padding": ("0", '"valid"', "'valid'"),
    "dilation": ("1",),
    "groups": ("1",),
}


class MultiplyPatches(Transform):
    """Compute a patch embedding's convolution as one product.

    What it does:
        `self.projection(pixel_values)` becomes `patch_product(pixel_values, self.projection)` where `__init__` builds
        the projection with a stride that is its kernel's size. The module stays, and so do its weight and its keys.

    Why:
        No number is read twice there, so it is a product. Libraries do not see that: for three channels in 16 bits
        they reorder the image and take kernels that fill the matrix units badly, or, in three dimensions, none that
        use them.

    What it needs:
        `kernel_size` and `stride` are the same expression, and neither padding, dilation nor groups are given, or they
        are those by default. At run time the operator looks at the module that is there, and at the input's sizes.

    Numerics:
        Reordered: the same sums, which the product's kernel takes in an order of its own.

    Known limits:
        Where gradients are wanted, under autocast, with hooks or adapters, in fp32 on a GPU (torch lets convolutions
        round to TF32 there) and where the kernel does not divide the input, the module is called, with the reason
        counted; on a GPU outside of a captured forward also for kernels of 16 places or fewer, as Swin's and
        ConvNeXt's. torch.compile sees the module. Sizes that a configuration may set apart stay.
    """

    name: ClassVar[str] = "multiply_patches"
    summary: ClassVar[str] = "A convolution whose kernels lie side by side, as of patches, is one product."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "not_convolution": "the layer may be something else than a plain convolution of torch, or has padding, "
        "dilation or groups",
        "other_call": "the layer is called with other arguments",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of an attribute that is built with a stride as large as its kernel."""
        for owner, name, method in module.methods():
            for call in calls_in(method.body):
                attribute = called_attribute(call)
                if attribute is not None and any(map(_has_own_stride, _built(attribute, owner, module))):
                    yield Candidate(call, f"{owner.name}.{name}", attribute)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check how the layer is built, and replace the call."""
        class_name, method_name = candidate.where.split(".")
        owner, call = module.classes[class_name], candidate.node
        assert isinstance(call, cst.Call)
        names = effects_of(module).names
        values = module.assignments(owner, candidate.label)
        plain = all(isinstance(value, cst.Call) and names.resolved(value.func) in _BUILT for value in values)
        if not plain or candidate.label in names.tampered:
            return Skip("not_convolution", candidate.label)
        if not all(isinstance(value, cst.Call) and _is_plain(value) for value in values):
            return Skip("not_convolution", candidate.label)
        argument = only_argument(call)
        if argument is None or isinstance(argument, cst.GeneratorExp):
            return Skip("other_call", candidate.label)
        method = owner.methods[method_name]
        if why := why_replaced(candidate.label, [argument], owner, effects_of(module).scope(method, owner)):
            return Skip("not_convolution", why)
        old, new = with_call(call, OPERATOR, [module.code(argument), f"self.{candidate.label}"], module)
        return Found((Edit(old, (new,)),), (OPERATOR,))


def _built(attribute: str, owner: ClassInfo, module: Module) -> Iterable[cst.Call]:
    """Yield what builds a convolution in any value of an attribute; transformers' `Conv1D` is a linear layer."""
    for value in module.assignments(owner, attribute):
        for call in calls_in(value):
            if module.qualified(call.func).rsplit(".", 1)[-1] in ("Conv1d", "Conv2d", "Conv3d"):
                yield call


def _has_own_stride(convolution: cst.Call) -> bool:
    """Whether a convolution has a stride, and it is written as its kernel's size is; not that of single numbers."""
    given = _given(convolution)
    kernel, stride = given.get("kernel_size"), given.get("stride")
    if kernel is None or stride is None:
        return False
    size = _written(kernel)
    return size == _written(stride) and size != "1"


def _is_plain(convolution: cst.Call) -> bool:
    given = _given(convolution)
    return _has_own_stride(convolution) and all(
        name not in given or _written(given[name]) in defaults for name, defaults in _PLAIN.items()
    )


def _given(call: cst.Call) -> dict[str, cst.BaseExpression]:
    """Return the arguments of a convolution by their names; none where a star may hand over any."""
    if any(argument.star for argument in call.args):
        return {}
    places = [argument.value for argument in call.args if argument.keyword is None]
    named = {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
    return dict(zip(_PLACES, places, strict=False)) | named


def _written(size: cst.BaseExpression) -> str:
    """Return how a size is written: `(n, n)` as `n`, which means the same."""
    if isinstance(size, (cst.Tuple, cst.List)) and size.elements:
        each = {_written(element.value) for element in size.elements}
        if len(each) == 1:
            return each.pop()
    return cst.Module([]).code_for_node(size)
