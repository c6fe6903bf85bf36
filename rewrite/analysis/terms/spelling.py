"""Terms, and the one spelling that each operation has among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

BINARY = {
    cst.Add: "add",
    cst.Subtract: "sub",
    cst.Multiply: "mul",
    cst.Divide: "div",
    cst.FloorDivide: "floordiv",
    cst.Modulo: "mod",
    cst.Power: "pow",
    cst.MatrixMultiply: "matmul",
    cst.BitAnd: "bitand",
    cst.BitOr: "bitor",
    cst.BitXor: "bitxor",
    cst.LeftShift: "lshift",
    cst.RightShift: "rshift",
}
COMPARISON = {
    cst.Equal: "eq",
    cst.NotEqual: "ne",
    cst.Is: "is",
    cst.IsNot: "isnot",
    cst.In: "in",
    cst.NotIn: "notin",
    cst.LessThan: "lt",
    cst.LessThanEqual: "le",
    cst.GreaterThan: "gt",
    cst.GreaterThanEqual: "ge",
}

ARGUMENTS = {
    "add": ("input", "other"),
    "amax": ("input", "dim", "keepdim"),
    "cat": ("tensors", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "div": ("input", "other"),
    "flatten": ("input", "start_dim", "end_dim"),
    "gather": ("input", "dim", "index"),
    "masked_fill": ("input", "mask", "value"),
    "gt": ("input", "other"),
    "matmul": ("input", "other"),
    "mean": ("input", "dim", "keepdim"),
    "mul": ("input", "other"),
    "nn.functional.conv1d": ("input", "weight", "bias"),
    "nn.functional.one_hot": ("tensor", "num_classes"),
    "nonzero": ("input",),
    "permute": ("input", "dims"),
    "pow": ("input", "exponent"),
    "relu": ("input",),
    "repeat_interleave": ("input", "repeats", "dim", "output_size"),
    "reshape": ("input", "shape"),
    "sigmoid": ("input",),
    "size": ("input", "dim"),
    "softmax": ("input", "dim"),
    "split": ("tensor", "split_size_or_sections", "dim"),
    "squeeze": ("input", "dim"),
    "stack": ("tensors", "dim"),
    "sub": ("input", "other"),
    "sum": ("input", "dim", "keepdim"),
    "tanh": ("input",),
    "tensor_split": ("input", "indices_or_sections", "dim"),
    "to": ("input", "dtype"),
    "topk": ("input", "k", "dim"),
    "transpose": ("input", "dim0", "dim1"),
    "type": ("input", "dtype"),
    "unbind": ("input", "dim"),
    "unflatten": ("input", "dim", "sizes"),
    "unsqueeze": ("input", "dim"),
    "var": ("input", "dim"),
    "where": ("condition", "input", "other"),
}
"""The positions of keyword arguments, of the functions in which modeling files use both."""

ALIASES = {
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "floor_divide": "floordiv",
    "greater": "gt",
    "multiply": "mul",
    "negative": "neg",
    "nn.functional.relu": "relu",
    "nn.functional.sigmoid": "sigmoid",
    "nn.functional.softmax": "softmax",
    "nn.functional.tanh": "tanh",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
}
"""Names of operations that have another one."""
KEYWORDS = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim"}
"""Names of arguments that have another one."""
_CASTS = {"bfloat16": "bfloat16", "double": "float64", "float": "float32", "half": "float16"}
_DTYPES = {f"torch.{name}" for name in ("bfloat16", "double", "float", "float16", "float32", "float64", "half")}


@dataclass(frozen=True)
class Term:
    """An operation on terms, or a leaf: a parameter, an attribute of `self`, a name of the file or a constant."""

    op: str
    args: tuple[Term, ...] = ()
    value: str = ""
    size: int = field(default=1, compare=False)
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(argument.size for argument in self.args))
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.value)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def commutes(self) -> bool:
        """Whether the operands may change places without changing a bit."""
        return self.op in ("add", "mul") and len(self.args) == 2

    def __str__(self) -> str:
        if not self.args:
            return {"parameter": "", "attribute": "self."}.get(self.op, "") + (self.value or f"{self.op}()")
        name = f"{self.op} {self.value}".strip()
        return f"{name}({', '.join(map(str, self.args))})"


NONE = Term("name", (), "None")


def constant(value: object) -> Term:
    """Return the leaf of a number; `1.0` and `1` are the same operand of a tensor operation."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return Term("constant", (), repr(value))


FLOAT32 = Term("name", (), "torch.float32")


def is_dtype(term: Term) -> bool:
    """Whether `term` is certainly a dtype."""
    return term.op == "dtype" or (term.op == "name" and term.value in _DTYPES)


def dtype_of(term: Term) -> Term | None:
    """Return the dtype of a tensor term where its spelling decides it."""
    if term.op == "cast":
        return term.args[1]
    if term.op in ("neg", "mean", "index", "unsqueeze") or (term.op == "pow" and term.args[1].op == "constant"):
        return dtype_of(term.args[0])
    if term.op in ("add", "mul"):
        kinds = {dtype_of(argument) for argument in term.args if argument.op not in ("constant", "attribute")}
        return kinds.pop() if len(kinds) == 1 and all(a.op != "attribute" for a in _factors(term)) else None
    return None


def _factors(term: Term) -> tuple[Term, ...]:
    """Return the operands whose dtype counts: a number's does not, nor that of an eps that is added."""
    return term.args if term.op == "mul" else ()


_SYNTAX = {
    "attribute", "call", "cast", "constant", "deleted", "dtype", "in", "index", "inner", "is", "isnot", "keyword",
    "keywords", "name", "not", "notin", "parameter", "select", "self", "shape", "slice", "star", "tuple",
}  # fmt: skip
"""Operations that stand for Python's syntax and for leaves, whatever has a method of the name: `x.select(0, 1)`."""


def named_call(name: str) -> str:
    """Return the operation of a call by name, which is none of Python's syntax."""
    return f"{name}()" if name in _SYNTAX else name


def make(name: str, *args: Term) -> Term:
    """Return the canonical term of operation `name` on `args`."""
    name = ALIASES.get(name, name)
    if name in _CASTS and len(args) == 1:
        return _cast(args[0], Term("name", (), f"torch.{_CASTS[name]}"))
    rule = _RULES.get(name)
    made = rule(*args) if rule is not None else None
    if made is not None:
        return made
    if name in ("add", "mul") and len(args) == 2:
        args = tuple(sorted(args, key=str)) if args[0].size + args[1].size < 400 else args
    return Term(name, args)


def _cast(tensor: Term, dtype: Term) -> Term:
    if dtype.op == "name" and dtype.value == "torch.float":
        dtype = FLOAT32
    if dtype_of(tensor) == dtype or dtype == Term("dtype", (tensor,)):
        return tensor
    return Term("cast", (tensor, dtype))


def _to(*args: Term) -> Term | None:
    """`x.to(dtype)`, and `y.to(x)` of what is made of x on its device: x is a tensor where its dtype was changed."""
    if len(args) == 2 and is_dtype(args[1]):
        return _cast(*args)
    if len(args) == 2 and _is_cast_in(args[1], args[0]):
        return _cast(args[0], _dtype(args[1]))
    return None


def _is_cast_in(tensor: Term, term: Term) -> bool:
    return (term.op == "cast" and term.args[0] == tensor) or any(_is_cast_in(tensor, inner) for inner in term.args)


def _type_as(*args: Term) -> Term | None:
    return _cast(args[0], _dtype(args[1])) if len(args) == 2 else None


def _dtype(tensor: Term) -> Term:
    return dtype_of(tensor) or Term("dtype", (tensor,))


def _pow(*args: Term) -> Term | None:
    if len(args) != 2:
        return None
    base, exponent = args
    if exponent == constant(1):
        return base
    if exponent == constant(-1) and _is_root(base):  # the inverse of a root
        return Term("pow", (base.args[0], constant(-0.5)))
    return None


def _is_root(term: Term) -> bool:
    return term.op == "pow" and term.args[1] == constant(0.5)


def _add(*args: Term) -> Term | None:
    """`torch.add(a, b, alpha=2)` is `a + b * 2`."""
    if len(args) == 3 and args[2].op == "keyword" and args[2].value == "alpha":
        factor = args[2].args[0]
        return make("add", args[0], args[1] if factor == constant(1) else make("mul", args[1], factor))
    return None


def _sub(*args: Term) -> Term | None:
    if len(args) == 3 and args[2].op == "keyword" and args[2].value == "alpha":
        factor = args[2].args[0]
        return make("sub", args[0], args[1] if factor == constant(1) else make("mul", args[1], factor))
    return make("add", args[0], make("neg", args[1])) if len(args) == 2 else None


def _mul(*args: Term) -> Term | None:
    if len(args) != 2:
        return None
    left, right = args
    if left == right:
        return make("pow", left, constant(2))
    if left.op == "neg":
        return make("neg", make("mul", left.args[0], right))
    if right.op == "neg":
        return make("neg", make("mul", left, right.args[0]))
    return None


def _neg(*args: Term) -> Term | None:
    if args[0].op == "neg":
        return args[0].args[0]
    if args[0].op == "constant" and args[0].value[:1].isdigit():
        return Term("constant", (), f"-{args[0].value}")
    return None


def _div(*args: Term) -> Term | None:
    """Division by a root is the product with its inverse, up to the last bit."""
    if len(args) == 2 and _is_root(args[1]):
        inverse = Term("pow", (args[1].args[0], constant(-0.5)))
        return inverse if args[0] == constant(1) else make("mul", args[0], inverse)
    if len(args) == 2 and args[0].op == "sum" and len(args[0].args) > 1 and _counts(args[1], *args[0].args[:2]):
        return make("mean", *args[0].args)
    if len(args) == 2 and args[0].op == "exp":
        return _softmax_written(*args)
    return None


def _softmax_written(powers: Term, total: Term) -> Term | None:
    """`exp(x - max(x)) / sum(exp(x - max(x)))`; without the largest value it overflows where a softmax does not."""
    if total.op != "sum" or len(total.args) != 3 or total.args[0] != powers or total.args[2] != _TRUE:
        return None
    shifted, dimension = powers.args[0], total.args[1]
    for scores, less in (shifted.args, shifted.args[::-1]) if shifted.op == "add" else ():
        if less == Term("neg", (Term("amax", (scores, dimension, _TRUE)),)):
            return Term("softmax", (scores, dimension))
    return None


def _counts(number: Term, tensor: Term, dimension: Term) -> bool:
    """Whether a number is how many elements a tensor has in a dimension, as the tensor's own shape says."""
    while tensor.op in ("pow", "cast", "neg"):  # which have the shape of what they are made of
        if number == Term("index", (Term("shape", (tensor,)), dimension)):
            return True
        tensor = tensor.args[0]
    return number == Term("index", (Term("shape", (tensor,)), dimension))


def _select(*args: Term) -> Term | None:
    """A test and its negation are one: the branches change places."""
    if len(args) != 3:
        return None
    test, yes, no = args
    if yes == no:
        return yes
    if test.op == "not":
        return make("select", test.args[0], no, yes)
    opposite = {"isnot": "is", "ne": "eq", "notin": "in"}.get(test.op)
    return make("select", make(opposite, *test.args), no, yes) if opposite is not None else None


def _not(*args: Term) -> Term | None:
    """Tests whose negation has a name; an order of numbers has none, NaN is neither below nor above."""
    inner = args[0]
    if inner.op == "not" and inner.args[0].op in _TRUTHS:
        return inner.args[0]
    opposite = {"isnot": "is", "is": "isnot", "ne": "eq", "eq": "ne", "in": "notin", "notin": "in"}.get(inner.op)
    return Term(opposite, inner.args) if opposite is not None else None


_TRUTHS = ("is", "isnot", "eq", "ne", "in", "notin", "lt", "le", "not")


def _ordered(name: str) -> Callable[..., Term]:
    """Comparisons that read the same from both sides."""
    return lambda *args: Term(name, tuple(sorted(args, key=_rank)))


def _rank(term: Term) -> tuple[bool, str]:
    """Constants stand on the right, as most people write them."""
    return term.op == "constant" or term == NONE, str(term) if term.size < 400 else ""


def _index(*args: Term) -> Term | None:
    base, *items = args
    places = [place for place, item in enumerate(items) if item == NONE]
    if len(items) == 2 and items[0] == _ELLIPSIS and items[1] == NONE:
        return make("unsqueeze", base, constant(-1))
    if len(places) == 1 and all(item == _ALL for item in items if item != NONE):
        return make("unsqueeze", base, constant(places[0]))
    if base.op == "tuple" and len(items) == 1 and items[0].op == "constant":
        number = int(items[0].value) if items[0].value.lstrip("-").isdigit() else len(base.args)
        return base.args[number] if -len(base.args) <= number < len(base.args) else None
    return None


def _transpose(*args: Term) -> Term | None:
    """The dimensions of a swap have no order."""
    return Term("transpose", (args[0], *sorted(args[1:], key=str))) if len(args) == 3 else None


def _permute(*args: Term) -> Term | None:
    """A permutation that exchanges two dimensions is a transpose."""
    tensor, *order = args
    if len(order) == 1 and order[0].op == "tuple":
        order = list(order[0].args)
    wanted = [constant(place) for place in range(len(order))]
    moved = [place for place, dimension in enumerate(order) if dimension != wanted[place]]
    if len(moved) == 2 and order[moved[0]] == wanted[moved[1]] and order[moved[1]] == wanted[moved[0]]:
        return Term("transpose", (tensor, wanted[moved[0]], wanted[moved[1]]))
    return Term("permute", (tensor, *order))


_ALL = Term("slice", (NONE, NONE, NONE))
_ELLIPSIS = Term("constant", (), "...")
_TRUE = Term("name", (), "True")


def _unsqueeze(*args: Term) -> Term | None:
    """A mean whose dimension is put back is one that keeps it."""
    if len(args) == 2 and args[0].op == "mean" and args[0].args[1:] == (args[1],) and args[1].op == "constant":
        return Term("mean", (*args[0].args, _TRUE))
    return None


def _var(*args: Term) -> Term | None:
    """The mean of the squares of the differences from the mean, where it is not corrected for a sample's size."""
    words = {a.value: a.args[0] for a in args[2:] if a.op == "keyword"}
    plain = {"keepdim": _TRUE, "unbiased": Term("name", (), "False")}, {"keepdim": _TRUE, "correction": constant(0)}
    if len(args) != 4 or words not in plain:
        return None
    centered = make("sub", args[0], make("mean", args[0], args[1], _TRUE))
    return make("mean", make("pow", centered, constant(2)), args[1], _TRUE)


def _slice(*args: Term) -> Term:
    lower, upper, step = args
    return Term("slice", (NONE if lower == constant(0) else lower, upper, NONE if step == constant(1) else step))


def _mean(*args: Term) -> Term | None:
    if len(args) > 1 and args[1].op == "tuple" and len(args[1].args) == 1:
        return Term("mean", (args[0], args[1].args[0], *args[2:]))
    return None


def _call(*args: Term) -> Term | None:
    """A module of torch that is made where it is called."""
    return softmax_of(*args) if len(args) == 2 and args[0].op == "nn.Softmax" else None


def softmax_of(module: Term, tensor: Term) -> Term | None:
    """Return what a module computes that is made as `nn.Softmax(dim)`, the dimension given."""
    given = [argument.args[0] if argument.op == "keyword" else argument for argument in module.args]
    return make("softmax", tensor, given[0]) if len(given) == 1 else None


_RULES: dict[str, Callable[..., Term | None]] = {
    "to": _to,
    "type": _to,
    "type_as": _type_as,
    ".dtype": _dtype,
    ".mT": lambda *args: make("transpose", *args, constant(-2), constant(-1)),
    "call": _call,
    ".shape": lambda *args: Term("shape", args),
    "size": lambda *args: make("index", Term("shape", args[:1]), *args[1:]) if args[1:] else Term("shape", args),
    "square": lambda *args: make("pow", *args, constant(2)),
    "rsqrt": lambda *args: make("pow", *args, constant(-0.5)),
    "sqrt": lambda *args: make("pow", *args, constant(0.5)),
    "pow": _pow,
    "mul": _mul,
    "neg": _neg,
    "add": _add,
    "sub": _sub,
    "reciprocal": lambda *args: make("pow", *args, constant(-1)),
    "select": _select,
    "not": _not,
    "gt": lambda *args: Term("lt", args[::-1]) if len(args) == 2 else None,
    "ge": lambda *args: Term("le", args[::-1]) if len(args) == 2 else None,
    **{name: _ordered(name) for name in ("eq", "ne", "is", "isnot")},
    "div": _div,
    "index": _index,
    "slice": _slice,
    "mean": _mean,
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "var": _var,
}
