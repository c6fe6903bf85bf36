"""Shapes, casts and views of tensors."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.tree.module import walk
from rewrite.analysis.tree.nodes import mutated_names, single_assignments

from ..rewriting import Expressions, call, guarded, method


def _receiver(node: cst.BaseExpression, name: str) -> cst.BaseExpression | None:
    """Return `x` of the call `x.name(...)`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == name:
        return node.func.value
    return None


def _renamed(node: cst.BaseExpression, name: str) -> cst.BaseExpression:
    """Return the call of another method of the same tensor."""
    assert isinstance(node, cst.Call)
    return node.with_changes(func=cst.ensure_type(node.func, cst.Attribute).with_changes(attr=cst.Name(name)))


class ViewAsReshape(Expressions[cst.Call]):
    """`x.view(s)` → `x.reshape(s)`; a view that is possible is what `reshape` returns."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "view")
        if receiver is None or not original.args or any(_is_dtype(a.value, self.module.code) for a in original.args):
            return None
        return _renamed(updated, "reshape")


class ReshapeAsView(Expressions[cst.Call]):
    """`x.reshape(s)` → `x.contiguous().view(s)`, where nothing of the function is written in place."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "reshape")
        if receiver is None or not self.file.tensors.certain(receiver) or _writes(self, original):
            return None
        assert isinstance(updated.func, cst.Attribute)
        return method(method(updated.func.value, "contiguous"), "view", *updated.args)


class ContiguousViewAsReshape(Expressions[cst.Call]):
    """`x.contiguous().view(s)` → `x.reshape(s)`, where nothing of the function is written in place."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "view")
        inner = _receiver(receiver, "contiguous") if receiver is not None else None
        if inner is None or _writes(self, original):
            return None
        assert isinstance(updated.func, cst.Attribute)
        found = _receiver(updated.func.value, "contiguous")
        return method(found, "reshape", *updated.args) if found is not None else None


def _writes(rewriting: Expressions, node: cst.CSTNode) -> bool:
    """Whether the function around a node writes tensors in place."""
    above = [n for n in rewriting.module.ancestors(node) if isinstance(n, cst.FunctionDef)]
    return not above or bool(mutated_names(above[-1].body))


def _is_dtype(node: cst.BaseExpression, code: object) -> bool:
    text = code(node)  # type: ignore[operator]
    return text.startswith("torch.") or text.endswith("dtype")


class TransposeAsSwapaxes(Expressions[cst.Call]):
    """`x.transpose(a, b)` → `x.swapaxes(a, b)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        plain = len(original.args) == 2 and all(a.keyword is None for a in original.args)
        receiver = _receiver(original, "transpose")
        if receiver is None or not plain or (isinstance(receiver, cst.Name) and receiver.value in ("torch", "self")):
            return None
        return _renamed(updated, "swapaxes")


class TransposeAsFunction(Expressions[cst.Call]):
    """`x.transpose(a, b)` → `torch.transpose(x, a, b)`, and back where it is the function."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "transpose")
        if receiver is None or "torch" not in self.module.imports:
            return None
        if isinstance(receiver, cst.Name) and receiver.value == "torch":
            plain = len(original.args) == 3 and all(a.keyword is None for a in original.args)
            return method(updated.args[0].value, "transpose", *updated.args[1:]) if plain else None
        assert isinstance(updated.func, cst.Attribute)
        return call("torch.transpose", updated.func.value, *updated.args) if len(original.args) == 2 else None


class TransposeAsPermute(Expressions[cst.Call]):
    """`x.transpose(1, 2)` → `x.permute(0, 2, 1, 3)`, where four dimensions are known."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "transpose")
        values = [a.value.value for a in original.args if isinstance(a.value, cst.Integer) and a.keyword is None]
        if receiver is None or len(values) != 2 or len(original.args) != 2 or not self._four(receiver):
            return None
        first, second = (int(value) for value in values)
        order = [0, 1, 2, 3]
        if not (0 <= first < 4 and 0 <= second < 4):
            return None
        order[first], order[second] = order[second], order[first]
        assert isinstance(updated.func, cst.Attribute)
        return method(updated.func.value, "permute", *(cst.Integer(str(place)) for place in order))

    def _four(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name):
            values = self._locals(node)
            return node.value in values and self._four(values[node.value])
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in self.module.functions:
            returned = [
                n.value for n in walk(self.module.functions[node.func.value].body) if isinstance(n, cst.Return)
            ]
            return any(value is not None and self._four(value) for value in returned)
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return False
        if node.func.attr.value in ("view", "reshape"):
            return self._length(node) == 4
        return node.func.attr.value in ("transpose", "contiguous", "to", "float") and self._four(node.func.value)

    def _length(self, shape: cst.Call) -> int:
        """How many dimensions a view is given; 0 where that is not known."""
        if len(shape.args) == 1 and not shape.args[0].star:
            value = shape.args[0].value
            value = self._locals(value).get(value.value, value) if isinstance(value, cst.Name) else value
            if not isinstance(value, cst.Tuple):
                return 0
            given = [(isinstance(e, cst.StarredElement), e.value) for e in value.elements]
        else:
            given = [(argument.star == "*", argument.value) for argument in shape.args]
        return sum(self._leading(value) if starred else 1 for starred, value in given)

    def _leading(self, value: cst.BaseExpression) -> int:
        """2 for `hidden_states.shape[:-1]`, batch and sequence; -9 for anything else."""
        if isinstance(value, cst.Name):
            value = self._locals(value).get(value.value, value)
        return 2 if self.module.code(value) == "hidden_states.shape[:-1]" else -9

    def _locals(self, node: cst.CSTNode) -> dict[str, cst.BaseExpression]:
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.FunctionDef)]
        return single_assignments(above[-1]) if above else {}


class CastAsMethod(Expressions[cst.Call]):
    """`x.to(torch.float32)`, `x.to(dtype=torch.float32)` → `x.float()`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "to")
        if receiver is None or len(original.args) != 1 or not self.file.tensors.certain(receiver):
            return None
        keyword = original.args[0].keyword
        short = {"torch.float32": "float", "torch.float": "float", "torch.bfloat16": "bfloat16"}
        name = short.get(self.module.code(original.args[0].value))
        if name is None or (keyword is not None and keyword.value != "dtype"):
            return None
        assert isinstance(updated.func, cst.Attribute)
        return method(updated.func.value, name)


class CastAsTo(Expressions[cst.Call]):
    """`x.float()` → `x.to(dtype=torch.float32)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver, cast = _receiver(original, "float"), _receiver(original, "to")
        if "torch" not in self.module.imports:
            return None
        assert (receiver is None and cast is None) or isinstance(updated.func, cst.Attribute)
        if receiver is not None and not original.args and self.file.tensors.certain(receiver):
            return method(updated.func.value, "to", _dtype("torch.float32"))  # type: ignore[attr-defined]
        if cast is None or len(original.args) != 1 or original.args[0].keyword is not None:
            return None
        dtype = self.module.code(original.args[0].value)
        if dtype != "torch.float32" and not dtype.endswith(".dtype") and not dtype.endswith("_dtype"):
            return None
        return method(updated.func.value, "to", _dtype(dtype))  # type: ignore[attr-defined]


def _dtype(name: str) -> cst.Arg:
    return cst.Arg(
        cst.parse_expression(name),
        cst.Name("dtype"),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )


class ShapeAsSize(Expressions[cst.Attribute | cst.Subscript]):
    """`x.shape[0]` → `x.size(0)`, `x.shape` → `x.size()`."""

    kinds = (cst.Attribute, cst.Subscript)

    def respelled(
        self, original: cst.Attribute | cst.Subscript, updated: cst.Attribute | cst.Subscript
    ) -> cst.BaseExpression | None:
        if isinstance(original, cst.Attribute):
            above = self.module.parent(original)
            inside = isinstance(above, cst.Subscript) and above.value is original
            if original.attr.value != "shape" or (inside and _index(above) is not None):
                return None
            assert isinstance(updated, cst.Attribute)
            return method(updated.value, "size") if self.file.tensors.certain(original.value) else None
        assert isinstance(original, cst.Subscript)
        index, shape = _index(original), updated.value
        if index is None or not isinstance(original.value, cst.Attribute) or original.value.attr.value != "shape":
            return None
        assert isinstance(shape, cst.Attribute)
        return method(shape.value, "size", index) if self.file.tensors.certain(original.value.value) else None


def _index(node: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the one number that a subscript asks for."""
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return None
    value = node.slice[0].slice.value
    number = value.expression if isinstance(value, cst.UnaryOperation) else value
    return value if isinstance(number, cst.Integer) else None


class SizeAsShape(Expressions[cst.Call]):
    """`x.size(0)` → `x.shape[0]`, `x.size()` → `x.shape`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "size")
        if receiver is None or len(original.args) > 1 or any(a.keyword is not None for a in original.args):
            return None
        assert isinstance(updated.func, cst.Attribute)
        shape = cst.Attribute(guarded(updated.func.value), cst.Name("shape"))
        if not updated.args:
            return shape
        return cst.Subscript(shape, [cst.SubscriptElement(cst.Index(updated.args[0].value))])


class NoneAsUnsqueeze(Expressions[cst.Subscript]):
    """`x[:, None]` → `x.unsqueeze(1)`, `x[..., None]` → `x.unsqueeze(-1)`."""

    kinds = (cst.Subscript,)

    def respelled(self, original: cst.Subscript, updated: cst.Subscript) -> cst.BaseExpression | None:
        parts = [self.module.code(element.slice) for element in original.slice]
        if (
            "None" not in parts
            or not set(parts) <= {"None", ":", "..."}
            or not self.file.tensors.certain(original.value)
        ):
            return None
        if "..." in parts and parts != ["...", "None"]:
            return None
        result = updated.value
        for place, part in enumerate(parts):
            if part == "None":
                where = "-1" if "..." in parts else str(place)
                result = method(result, "unsqueeze", cst.parse_expression(where))
        return result


class UnsqueezeAsNone(Expressions[cst.Call]):
    """`x.unsqueeze(1)` → `x[:, None]`, `x.unsqueeze(-1)` → `x[..., None]`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        receiver = _receiver(original, "unsqueeze")
        plain = len(original.args) == 1 and original.args[0].keyword is None
        if receiver is None or not plain or (isinstance(receiver, cst.Name) and receiver.value == "torch"):
            return None
        place = self.module.code(original.args[0].value)
        if place == "-1":
            parts = "..., None"
        elif place.isdigit() and int(place) < 4:
            parts = ":, " * int(place) + "None"
        else:
            return None
        assert isinstance(updated.func, cst.Attribute)
        template = cst.parse_expression(f"x[{parts}]")
        assert isinstance(template, cst.Subscript)
        return template.with_changes(value=guarded(updated.func.value))
