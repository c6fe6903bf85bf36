"""Keys and values that are repeated for the query heads that share them: who repeats them, who reads the result."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.syntax.module import Module
from rewrite.analysis.syntax.nodes import expression
from rewrite.analysis.syntax.replacement import is_docstring


def expands_heads(function: cst.FunctionDef, module: Module) -> bool:
    """Return whether `function(x, n)` repeats dimension 1 of a 4-D tensor n times, element by element."""
    params = [param.name.value for param in function.params.params]
    lines = [module.code(line) for line in function.body.body if not is_docstring(line)]
    if len(params) != 2 or len(lines) != 4:
        return False
    x, n = params
    shape = lines[0].removesuffix(f" = {x}.shape")
    sizes = [size.strip() for size in shape.split(",")]
    if len(sizes) != 4 or shape == lines[0]:
        return False
    b, h, s, d = sizes
    expanded = f"{x}[:, :, None, :, :].expand({b}, {h}, {n}, {s}, {d})"
    return [" ".join(line.split()) for line in lines[1:]] == [
        f"if {n} == 1: return {x}",
        f"{x} = {expanded}",
        f"return {x}.reshape({b}, {h} * {n}, {s}, {d})",
    ]


def product_of(use: cst.Name, module: Module) -> cst.Call | cst.BinaryOperation | None:
    """Return the matrix product whose right side is `use` or a transposition of it."""
    right: cst.CSTNode = use
    parent = module.parent(use)
    if m.matches(parent, m.Attribute(attr=m.Name("transpose"))):
        right = module.parent(parent)
        if not isinstance(right, cst.Call) or not _swaps_last_two(right, module):
            return None
        parent = module.parent(right)
    if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.MatrixMultiply):
        return parent if parent.right is right else None
    if isinstance(parent, cst.Arg):
        call = module.parent(parent)
        if isinstance(call, cst.Call) and module.qualified(call.func) == "torch.matmul" and call.args[1] is parent:
            return call
    return None


def reads_a_kept_size(use: cst.Name, module: Module) -> bool:
    """Return whether `use` only tells a size that expansion leaves alone, any but the number of heads."""
    shape = module.parent(use)
    size = module.parent(shape)
    kept = m.Subscript(slice=[m.SubscriptElement(m.Index(m.Integer("0") | m.Integer("2") | m.Integer("3")))])
    last = m.Index(m.UnaryOperation(m.Minus(), m.Integer("1") | m.Integer("2") | m.Integer("4")))
    return m.matches(shape, m.Attribute(attr=m.Name("shape"))) and m.matches(
        size, kept | m.Subscript(slice=[m.SubscriptElement(last)])
    )


def grouped_product(
    product: cst.Call | cst.BinaryOperation, use: cst.Name, compact: cst.Name, module: Module
) -> cst.Call:
    """Return the product with `use` replaced by the tensor before expansion, as a call of `grouped_matmul`."""
    left, right = (
        (product.args[0].value, product.args[1].value)
        if isinstance(product, cst.Call)
        else (product.left, product.right)
    )
    renamed = right.deep_replace(use, cst.Name(compact.value))
    call = expression(f"grouped_matmul({module.code(left)}, {cst.Module([]).code_for_node(renamed)})")
    if not isinstance(call, cst.Call):
        raise TypeError("not a call")
    return call


def _swaps_last_two(transpose: cst.Call, module: Module) -> bool:
    axes = [module.code(argument.value) for argument in transpose.args]
    return len(axes) == 2 and {axes[0], axes[1]} in ({"2", "3"}, {"-1", "-2"})
