"""Which expressions are certainly tensors: by annotations, by what makes them and by what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import bound_names, parameters

_ANNOTATIONS = ("torch.Tensor", "torch.FloatTensor", "torch.LongTensor", "torch.BoolTensor", "torch.IntTensor")
_LAYERS = frozenset(
    {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Dropout", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "SiLU"}
    | {"GELU", "ReLU", "Sigmoid", "Tanh", "BatchNorm2d", "Identity"}
)
_MAKERS = frozenset({
    "abs", "add", "addmm", "arange", "baddbmm", "bmm", "cat", "clamp", "concat", "cos", "cumsum", "div", "einsum",
    "empty", "empty_like", "exp", "eye", "flatten", "full", "full_like", "gather", "index_select", "linspace",
    "log", "logical_and", "logical_not", "logical_or", "masked_fill", "matmul", "mean", "mul", "neg", "ones",
    "ones_like", "outer", "pow", "rand", "randn", "relu", "repeat_interleave", "reshape", "rsqrt", "sigmoid",
    "sin", "softmax", "sqrt", "square", "squeeze", "stack", "sub", "sum", "tanh", "tensor", "tile", "transpose",
    "tril", "triu", "unsqueeze", "where", "zeros", "zeros_like",
})  # fmt: skip
_FUNCTIONAL = frozenset({
    "dropout", "embedding", "gelu", "interpolate", "layer_norm", "leaky_relu", "linear", "log_softmax",
    "logsigmoid", "normalize", "one_hot", "pad", "relu", "scaled_dot_product_attention", "sigmoid", "silu",
    "softmax", "softplus", "tanh",
})  # fmt: skip
METHODS = frozenset({
    "abs", "bfloat16", "bmm", "clamp", "contiguous", "cos", "cumsum", "detach", "double", "exp", "expand",
    "expand_as", "flatten", "float", "gather", "half", "index_select", "log", "masked_fill", "matmul", "mean",
    "mul", "neg", "new_ones", "new_zeros", "permute", "pow", "repeat", "repeat_interleave", "reshape", "rsqrt",
    "sigmoid", "sin", "softmax", "sqrt", "square", "squeeze", "sum", "swapaxes", "tanh", "to", "transpose",
    "tril", "triu", "type_as", "unsqueeze", "view", "view_as",
})  # fmt: skip
"""Methods that return a tensor when called on one."""
_TENSOR_ONLY = frozenset({
    "unsqueeze", "view", "permute", "contiguous", "expand", "masked_fill", "softmax", "new_zeros", "new_ones",
    "type_as", "flatten", "size", "dim", "numel", "repeat_interleave", "reshape", "transpose", "rsqrt", "float",
})  # fmt: skip
"""Methods that, in a modeling file without numpy, only a tensor is asked for."""


class Tensors:
    """Answers `certain(expression)`. An expression that it does not know is not certain."""

    def __init__(self, module: Module):
        self.module = module
        self._names: dict[int, set[str]] = {}
        self._returns: dict[str, bool] = {}
        self._numpy = any(name.split(".")[0] == "numpy" for name in module.imports.values())

    def certain(self, node: cst.BaseExpression) -> bool:
        """Whether `node`, a node of the module, is certainly one tensor."""
        if isinstance(node, cst.Name):
            return node.value in self._known(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        if isinstance(node, cst.BinaryOperation):
            return self.certain(node.left) or self.certain(node.right)
        if isinstance(node, cst.UnaryOperation):
            return not isinstance(node.operator, cst.Not) and self.certain(node.expression)
        if isinstance(node, cst.Subscript):
            return self.certain(node.value)
        if isinstance(node, cst.IfExp):
            return self.certain(node.body) and self.certain(node.orelse)
        return isinstance(node, cst.Call) and self._call(node)

    def owner(self, node: cst.CSTNode) -> ClassInfo | None:
        """The top-level class around a node."""
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.ClassDef)]
        return self.module.classes.get(above[-1].name.value) if above else None

    def built_of(self, owner: ClassInfo, attribute: str) -> set[str]:
        """Return the qualified names of what `self.<attribute>` is made by calling; `""` for anything else."""
        values = self.module.assignments(owner, attribute)
        return {self.module.qualified(v.func) if isinstance(v, cst.Call) else self._indexed(v) for v in values}

    def _indexed(self, value: cst.BaseExpression) -> str:
        is_table = isinstance(value, cst.Subscript) and isinstance(value.value, cst.Name)
        return f"{value.value.value}[]" if is_table else ""  # type: ignore[attr-defined]

    def _attribute(self, node: cst.Attribute) -> bool:
        owner = self.owner(node)
        if node.attr.value == "T":
            return self.certain(node.value)
        attribute = self_attribute(node)
        if attribute is None or owner is None:
            return node.attr.value in ("weight", "bias") and isinstance(node.value, cst.Attribute)
        return self.built_of(owner, attribute) in ({"torch.nn.Parameter"}, {"torch.nn.Buffer"})

    def _call(self, node: cst.Call) -> bool:
        qualified = self.module.qualified(node.func)
        room, _, name = qualified.rpartition(".")
        if room == "torch":
            return name in _MAKERS
        if room == "torch.nn.functional":
            return name in _FUNCTIONAL
        if not room and name in self.module.functions:
            return self._function_returns(name)
        if not isinstance(node.func, cst.Attribute):
            return False
        attribute, owner = self_attribute(node.func), self.owner(node)
        if attribute is not None and owner is not None:
            return self._layer(owner, attribute)
        if node.func.attr.value in METHODS and self.certain(node.func.value):
            return True
        return node.func.attr.value in _TENSOR_ONLY - {"size", "dim", "numel"} and not self._numpy

    def _layer(self, owner: ClassInfo, attribute: str) -> bool:
        made = self.built_of(owner, attribute)
        return bool(made) and all(self._gives_tensor(name) for name in made)

    def _gives_tensor(self, made: str) -> bool:
        room, _, name = made.rpartition(".")
        if made == "ACT2FN[]" or (room == "torch.nn" and name in _LAYERS):
            return True
        if made not in self.module.classes:
            return False
        forward = self.module.method(self.module.classes[made], "forward")
        return forward is not None and forward.returns is not None and self._annotated(forward.returns)

    def _annotated(self, annotation: cst.Annotation) -> bool:
        code = self.module.code(annotation.annotation).replace(" ", "")
        kinds = set(code.removeprefix("Optional[").removesuffix("]").split("|")) - {"None"}
        return bool(kinds) and kinds <= set(_ANNOTATIONS)

    def _function_returns(self, name: str) -> bool:
        if name not in self._returns:
            self._returns[name] = False  # a function that calls itself
            function = self.module.functions[name]
            values = [node.value for node in walk(function.body) if isinstance(node, cst.Return)]
            known = function.returns is not None and self._annotated(function.returns)
            self._returns[name] = known or (bool(values) and all(v is not None and self.certain(v) for v in values))
        return self._returns[name]

    def _known(self, node: cst.Name) -> set[str]:
        """The names that are tensors throughout the function around `node`."""
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.FunctionDef)]
        if not above:
            return set()
        function = above[-1]
        if id(function) not in self._names:
            self._names[id(function)] = set()
            self._names[id(function)] = self._from_parameters(function) | self._asked(function)
            self._by_assignment(function)
        return self._names[id(function)]

    def _from_parameters(self, function: cst.FunctionDef) -> set[str]:
        params = (*function.params.posonly_params, *function.params.params, *function.params.kwonly_params)
        return {p.name.value for p in params if p.annotation is not None and self._annotated(p.annotation)}

    def _asked(self, function: cst.FunctionDef) -> set[str]:
        """Names of which something is asked that only a tensor answers, and that nothing else is bound to."""
        if self._numpy:
            return set()
        asked = {
            node.func.value.value
            for node in walk(function.body)
            if isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and isinstance(node.func.value, cst.Name)
            and node.func.attr.value in _TENSOR_ONLY
        }
        asked |= set(self._passed_on(function))
        return {name for name in asked if name in parameters(function) or name in bound_names(function.body)}

    def _passed_on(self, function: cst.FunctionDef) -> Iterator[str]:
        """Names handed to a function of this file whose body asks the like of its parameter."""
        for node in walk(function.body):
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
                target = self.module.functions.get(node.func.value)
                if target is None or target is function:
                    continue
                for argument, parameter in zip(node.args, target.params.params, strict=False):
                    plain = argument.keyword is None and not argument.star and isinstance(argument.value, cst.Name)
                    if plain and self._sliced_by_its_shape(target, parameter.name.value):
                        yield argument.value.value  # type: ignore[attr-defined]

    def _sliced_by_its_shape(self, function: cst.FunctionDef, name: str) -> bool:
        """Whether a function reads `name.shape` and indexes `name`: `x[..., : x.shape[-1] // 2]`."""
        nodes = list(walk(function.body))
        shape = any(isinstance(n, cst.Attribute) and self.module.code(n) == f"{name}.shape" for n in nodes)
        return shape and any(isinstance(n, cst.Subscript) and self.module.code(n.value) == name for n in nodes)

    def _by_assignment(self, function: cst.FunctionDef) -> None:
        """Add the locals that only tensors are assigned to, and take out those that get something else as well."""
        values: dict[str, list[cst.BaseExpression | None]] = {}
        for node in walk(function.body):
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    if isinstance(target.target, cst.Name):
                        values.setdefault(target.target.value, []).append(node.value)
                    elif isinstance(target.target, (cst.Tuple, cst.List)):
                        for name in bound_names(cst.Assign([target], node.value)):
                            values.setdefault(name, []).append(None)
            elif isinstance(node, (cst.For, cst.CompFor, cst.With, cst.AnnAssign, cst.NamedExpr)):
                for name in bound_names(node):
                    values.setdefault(name, []).append(None)
        known = self._names[id(function)]
        unsure = {n for n in values if n in known and any(v is not None and _no_tensor(v) for v in values[n])}
        known -= unsure
        inputs = set(parameters(function))
        while True:
            more = {
                name
                for name, found in values.items()
                if name not in known | inputs | unsure and all(v is not None and self.certain(v) for v in found)
            }
            if not more:
                return
            known |= more


def _no_tensor(value: cst.BaseExpression) -> bool:
    literal = (cst.Integer, cst.Float, cst.Tuple, cst.List, cst.Dict, cst.SimpleString)
    return isinstance(value, literal) or (isinstance(value, cst.Name) and value.value in ("None", "True", "False"))
