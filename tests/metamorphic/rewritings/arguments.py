"""Arguments by position and by keyword."""

from __future__ import annotations

import libcst as cst

from ..calls import Calls, Target, derives
from ..evaluation import trivial
from ..rewriting import Expressions

_TORCH: dict[str, tuple[str, ...]] = {
    "cat": ("tensors", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "flatten": ("input", "start_dim", "end_dim"),
    "mean": ("input", "dim", "keepdim"),
    "pow": ("input", "exponent"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "softmax": ("input", "dim"),
    "split": ("tensor", "split_size_or_sections", "dim"),
    "stack": ("tensors", "dim"),
    "sum": ("input", "dim", "keepdim"),
    "topk": ("input", "k", "dim"),
    "unsqueeze": ("input", "dim"),
}
_METHODS = {name: names[1:] for name, names in _TORCH.items() if names[0] == "input" and name != "repeat_interleave"}
_FUNCTIONAL: dict[str, tuple[str, ...]] = {
    "dropout": ("input", "p", "training"),
    "linear": ("input", "weight", "bias"),
    "softmax": ("input", "dim"),
}
_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


class _Arguments(Expressions[cst.Call]):
    """A rewriting of the arguments of calls whose parameters are known."""

    def prepare(self) -> None:
        self.calls = Calls(self.module)

    def names(self, call: cst.Call) -> tuple[str, ...]:
        """Return the parameters of what a call reaches, in order, as far as they may be named."""
        room, _, name = self.module.qualified(call.func).rpartition(".")
        if room == "torch":
            return _TORCH.get(name, ())
        if room == "torch.nn.functional":
            return _FUNCTIONAL.get(name, ())
        target = self.calls.target(call)
        if target is not None and target.function is not None:
            return self._own(target)
        if isinstance(call.func, cst.Attribute) and self.file.tensors.certain(call.func.value):
            return _METHODS.get(call.func.attr.value, ())
        return ()

    def _own(self, target: Target) -> tuple[str, ...]:
        """Parameters of a function or a plain layer of the file; hooks of transformers read those of other classes."""
        assert target.function is not None
        if target.layer:
            info = self.module.classes[target.layer]
            if not derives(info, self.module, "torch.nn.Module"):
                return ()
        if target.function.decorators:  # what a decorator calls its parameters is not known
            return ()
        return tuple(param.name.value for param in target.parameters)


class ArgumentsByKeyword(_Arguments):
    """`repeat_kv(key, n)` → `repeat_kv(hidden_states=key, n_rep=n)`, `x.mean(-1)` → `x.mean(dim=-1)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        names = self.names(original)
        positional = [a for a in updated.args if a.keyword is None]
        if not names or not positional or any(a.star for a in updated.args) or len(positional) > len(names):
            return None
        first = 1 if names[0] in ("input", "tensor", "tensors") else 0
        if len(positional) <= first:
            return None
        changed = [
            argument.with_changes(keyword=cst.Name(names[place]), equal=_EQUAL)
            if argument.keyword is None and place >= first
            else argument
            for place, argument in enumerate(updated.args)
        ]
        return updated.with_changes(args=changed)


class ArgumentsByPosition(_Arguments):
    """`mlp(x=h)` → `mlp(h)`, `torch.cat((a, b), dim=-1)` → `torch.cat((a, b), -1)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        names = self.names(original)
        positional = [a for a in updated.args if a.keyword is None and not a.star]
        by_name = {a.keyword.value: a for a in updated.args if a.keyword is not None}
        if not names or not by_name or any(a.star == "*" for a in updated.args):
            return None
        moved = []
        for name in names[len(positional) :]:
            if name not in by_name:
                break
            moved.append(by_name[name])
        in_order = list(by_name.values())[: len(moved)] == moved
        if not moved or not (in_order or all(trivial(a.value) for a in by_name.values())):
            return None
        plain = [a.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT) for a in moved]
        rest = [a for a in updated.args if a not in positional and a not in moved]
        return updated.with_changes(args=_with_commas([*positional, *plain, *rest], updated.args[-1].comma))


def _with_commas(arguments: list[cst.Arg], last: cst.Comma | cst.MaybeSentinel) -> list[cst.Arg]:
    """Return arguments in another order with commas between them, and after the last what was there."""
    inner = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = [a if isinstance(a.comma, cst.Comma) else a.with_changes(comma=inner) for a in arguments[:-1]]
    return [*between, arguments[-1].with_changes(comma=last)]
