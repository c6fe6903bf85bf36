"""Names of locals, parameters, attributes and imports."""

from __future__ import annotations

import re
from collections import Counter
from typing import ClassVar

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, self_attribute, walk
from rewrite.analysis.tree.nodes import bound_names, parameters

from ..calls import Calls, derives, plain_names
from ..rewriting import Rewriting

_CONTRACT = frozenset({"past_key_values", "past_key_value", "layer_past", "use_cache", "self", "cls", "config"})
"""Parameters that transformers' checkpointing wrapper and its annotations know by name."""
_READ_ELSEWHERE = frozenset({
    "config", "is_causal", "layer_idx", "num_key_value_groups", "scaling", "sliding_window", "weight", "bias",
    "training", "inv_freq", "head_dim", "original_inv_freq", "rope_type", "max_seq_len_cached",
    "attention_scaling", "original_max_seq_len", "rope_init_fn", "layer_type", "attention_type",
    "gradient_checkpointing", "num_heads", "hidden_size", "embedding_dim", "padding_idx",
})  # fmt: skip
"""Attributes that attention functions, rotary embeddings and initialisers of transformers read by name."""


class _Renaming(Rewriting):
    """Replaces the names whose identity is in `new`."""

    def prepare(self) -> None:
        self.new: dict[int, str] = {}
        self.choose()
        self.places = len(self.new)

    def choose(self) -> None:
        """Fill `new`."""
        raise NotImplementedError

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self.new.get(id(original_node))
        return updated_node if new is None else updated_node.with_changes(value=new)


class RenameLocals(_Renaming):
    """Every local of every function gets another name; parameters keep theirs."""

    def choose(self) -> None:
        for function in self.file.functions():
            kept = set(parameters(function)) | _fixed(function) | self._of_the_file()
            names = bound_names(function.body) & _stored(function) - kept
            taken = {name.value for name in plain_names(function, self.module)}
            fresh = {name: f"{name}_here" for name in sorted(names) if f"{name}_here" not in taken}
            for node in plain_names(function.body, self.module):
                if node.value in fresh:
                    self.new[id(node)] = fresh[node.value]

    def _of_the_file(self) -> set[str]:
        """Names of the module, which a function may read where a function inside it has a local of the same name."""
        return {*self.module.imports, *self.module.classes, *self.module.functions}


def _stored(function: cst.FunctionDef) -> set[str]:
    """Names that a function assigns as names, not only through a subscript or a method."""
    stored: set[str] = set()
    for node in walk(function.body):
        if isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.CompFor)):
            stored |= _names_of(node.target)
        elif isinstance(node, cst.AsName):
            stored |= _names_of(node.name)
    return stored


def _names_of(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, (cst.Tuple, cst.List)):
        return {name for element in target.elements for name in _names_of(element.value)}
    return _names_of(target.value) if isinstance(target, cst.StarredElement) else set()


def _fixed(function: cst.FunctionDef) -> set[str]:
    """Names of a function that mean something outside its own assignments."""
    fixed: set[str] = set()
    for node in walk(function.body):
        if isinstance(node, (cst.Global, cst.Nonlocal)):
            fixed |= {item.name.value for item in node.names}
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Param)):
            fixed.add(node.name.value)
        elif isinstance(node, (cst.ExceptHandler, cst.ImportAlias, cst.Match)):
            fixed |= {inner.value for inner in walk(node) if isinstance(inner, cst.Name)}
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in ("locals", "eval"):
            fixed |= {inner.value for inner in walk(function) if isinstance(inner, cst.Name)}
    return fixed


class RenameParameters(_Renaming):
    """Parameters of functions, and of the `forward` of layers that only this file calls, with the keywords."""

    keeps_names: ClassVar[bool] = False

    def choose(self) -> None:
        calls = Calls(self.module)
        unknown = {keyword for call, target in calls.all if target is None for keyword in _keywords(call)}
        for name, function in self.module.functions.items():
            if self._only_called(name) and not function.decorators:
                self._rename(function, calls, set())
            else:
                self._rename(function, calls, {k for call, _ in calls.all for k in _keywords(call)})
        for info in self.module.classes.values():
            forward = info.methods.get("forward")
            if forward is not None and not forward.decorators and self._is_layer(info) and self._alone(info):
                self._rename(forward, calls, unknown)

    def _only_called(self, name: str) -> bool:
        """Whether a function is never handed on, and never called with `**`."""
        uses = [n for n in plain_names(self.module.tree, self.module) if n.value == name]
        for use in uses:
            above = self.module.parent(use)
            if isinstance(above, cst.FunctionDef) and above.name is use:
                continue
            if not isinstance(above, cst.Call) or above.func is not use or any(a.star == "**" for a in above.args):
                return False
        return True

    def _is_layer(self, info: ClassInfo) -> bool:
        return derives(info, self.module, "torch.nn.Module") or derives(
            info, self.module, "GradientCheckpointingLayer"
        )

    def _alone(self, info: ClassInfo) -> bool:
        """Whether nothing derives from a class and it overrides no `forward` of this file."""
        family = [other for other in self.module.classes.values() if info.name in other.bases]
        bases = [base for base in info.bases if base in self.module.classes]
        return not family and not bases and not derives(info, self.module, "PreTrainedModel")

    def _rename(self, function: cst.FunctionDef, calls: Calls, kept: set[str]) -> None:
        """Rename the parameters that are given by position, or by a keyword of a call that is understood."""
        kept = kept | _CONTRACT | _fixed(function)
        mine = [call for call, target in calls.all if target is not None and target.function is function]
        if self._is_forward(function) and not mine:
            return  # who calls it, and how, is not known
        by_star = any(argument.star for call in mine for argument in call.args)
        params = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
        taken = {node.value for node in plain_names(function, self.module)}
        fresh: dict[str, str] = {}
        for place, param in enumerate(params):
            name = param.name.value
            position = place - self._is_forward(function)  # `self` takes none
            given = all(name in _keywords(call) or self._positions(call) > position for call in mine)
            if name in kept or f"{name}_given" in taken or (by_star and not (given and mine)):
                continue
            fresh[name] = f"{name}_given"
        for param in params:
            if param.name.value in fresh:
                self.new[id(param.name)] = fresh[param.name.value]
        for node in plain_names(function.body, self.module):
            if node.value in fresh:
                self.new[id(node)] = fresh[node.value]
        for call in mine:
            for argument in call.args:
                if argument.keyword is not None and argument.keyword.value in fresh:
                    self.new[id(argument.keyword)] = fresh[argument.keyword.value]

    def _is_forward(self, function: cst.FunctionDef) -> bool:
        return self.module.functions.get(function.name.value) is not function

    def _positions(self, call: cst.Call) -> int:
        return len([a for a in call.args if a.keyword is None and not a.star])


def _keywords(call: cst.Call) -> set[str]:
    return {argument.keyword.value for argument in call.args if argument.keyword is not None}


class RenameAttributes(_Renaming):
    """Attributes of layers, throughout the file. Parameters in them get other names in a checkpoint."""

    keeps_names: ClassVar[bool] = False

    def choose(self) -> None:
        allowed = {name for info in self.module.classes.values() if self._own(info) for name in info.assigned}
        allowed -= {name for info in self.module.classes.values() if not self._own(info) for name in info.assigned}
        allowed -= _READ_ELSEWHERE | self._members() | self._in_strings()
        accesses = [node for node in walk(self.module.tree) if isinstance(node, cst.Attribute)]
        elsewhere = {n.attr.value for n in accesses if self_attribute(n) is None and not self._of_layer(n)}
        outside = {n.attr.value for n in accesses if self_attribute(n) is not None and not self._inside(n)}
        allowed -= elsewhere | outside
        for node in accesses:
            if node.attr.value in allowed:
                self.new[id(node.attr)] = f"{node.attr.value}_kept"

    def _own(self, info: ClassInfo) -> bool:
        """Whether no code outside this file knows the attributes of a class."""
        named = {base.rsplit(".", 1)[-1] for base in info.bases}
        if not info.bases or not named <= {"Module", "GradientCheckpointingLayer", "ABC"}:
            return False
        decorated = [*info.node.decorators, *(d for m in info.methods.values() for d in m.decorators)]
        codes = {self.module.code(decorator.decorator).split("(")[0] for decorator in decorated}
        return codes <= {"torch.no_grad", "staticmethod", "property", "auto_docstring", "use_kernelized_func"} | {
            "use_kernel_forward_from_hub",
            "deprecate_kwarg",
        }

    def _of_layer(self, node: cst.Attribute) -> bool:
        layers = ("module", "layer", "decoder_layer", "encoder_layer", "block")
        return isinstance(node.value, cst.Name) and node.value.value in layers

    def _inside(self, node: cst.Attribute) -> bool:
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.ClassDef)]
        return bool(above) and self._own(self.module.classes[above[-1].name.value])

    def _members(self) -> set[str]:
        """Names that classes define: methods, properties and fields."""
        members: set[str] = set()
        for info in self.module.classes.values():
            members |= set(info.methods)
            for node in info.node.body.body:
                if isinstance(node, cst.SimpleStatementLine):
                    members |= bound_names(node)
        return members

    def _in_strings(self) -> set[str]:
        """Words of the strings of the file that are no docstrings."""
        found: Counter[str] = Counter()
        for node in walk(self.module.tree):
            if isinstance(node, cst.SimpleString) and not isinstance(self.module.parent(node), cst.Expr):
                found.update(re.findall(r"\w+", node.value))
        return set(found)


class RenameImports(_Renaming):
    """`from ...activations import ACT2FN` → `import ACT2FN as activations_by_name`, and so for functions of masks."""

    def choose(self) -> None:
        self.aliases: dict[str, str] = {}
        for local in sorted(self.module.imports):
            if local == "ACT2FN" or local.startswith("create_"):
                self.aliases[local] = f"{local}_imported"
        for node in plain_names(self.module.tree, self.module):
            above = self.module.parent(node)
            if node.value in self.aliases and not isinstance(above, (cst.ImportAlias, cst.AsName)):
                self.new[id(node)] = self.aliases[node.value]

    def leave_ImportAlias(self, original_node: cst.ImportAlias, updated_node: cst.ImportAlias) -> cst.ImportAlias:
        name = original_node.name
        if not isinstance(name, cst.Name) or name.value not in self.aliases or original_node.asname is not None:
            return updated_node
        return updated_node.with_changes(asname=cst.AsName(cst.Name(self.aliases[name.value])))


class SpellImports(Rewriting):
    """`from torch import nn` → `import torch.nn as nn`; `import torch.nn.functional as F` → `from torch.nn …`."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if len(updated_node.body) != 1:
            return updated_node
        code = self.module.code(original_node.body[0])
        new = {
            "from torch import nn": "import torch.nn as nn",
            "import torch.nn as nn": "from torch import nn",
            "import torch.nn.functional as F": "from torch.nn import functional as F",
            "from torch.nn import functional as F": "import torch.nn.functional as F",
        }.get(code)
        if new is None:
            return updated_node
        self.places += 1
        statement = cst.parse_statement(new)
        assert isinstance(statement, cst.SimpleStatementLine)
        return updated_node.with_changes(body=statement.body)


class FullNames(Rewriting):
    """`nn.Linear(...)` → `torch.nn.Linear(...)`."""

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        is_nn = isinstance(original_node.value, cst.Name) and self.module.code(original_node.value) == "nn"
        if not is_nn or self.module.imports.get("nn") != "torch.nn" or self.module.imports.get("torch") != "torch":
            return updated_node
        self.places += 1
        return updated_node.with_changes(value=cst.Attribute(cst.Name("torch"), cst.Name("nn")))
