"""Experts that are a list of modules are computed by the kernels of packed experts, for few tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.moe.expert_list import ListLoop, expert_classes, expert_parts, list_loop, over_list
from rewrite.analysis.moe.expert_loop import NotALoop
from rewrite.analysis.step.own_methods import is_own_method, why_taken
from rewrite.analysis.syntax.methods import Method
from rewrite.analysis.syntax.module import ClassInfo, Module, walk, without_runtime
from rewrite.analysis.syntax.nodes import LINE_LENGTH, calls_in
from rewrite.analysis.syntax.replacement import call_statement, name_is_free
from rewrite.analysis.terms.computation import NotComputable
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_CALL, _METHOD, _FORM = "add_experts", "expert_parts", "ExpertParts"


class FuseExpertLists(Transform):
    """Loops over a list of expert modules ask for the kernels first, and run where those do not.

    What it does:
        `for i, expert in enumerate(self.experts):`, whose turns add `expert(x[token]) * weights[token, place, None]`
        to rows of an output, stands behind `if not add_experts(output, x, self.experts, index, weights):`. The
        classes of experts get a method `expert_parts`, which says what they compute. Modules, their names and the
        checkpoint stay.

    Why:
        Each turn asks the host which tokens chose its expert, so that no step can be captured, and an expert is some
        ten kernels. Modeling files had their mixtures in this form before transformers 5, and files beside
        checkpoints have it still.

    What it needs:
        Tokens and places are what `torch.where` or `nonzero` finds in a turned `one_hot` of the choice, or where the
        choice equals the number of the turn; a turn does nothing else, but to leave an expert out that has no
        tokens. The output is a tensor that the method made. Experts compute `down(act(gate(x)) * up(x))` of plain
        `nn.Linear`.

    Numerics:
        Reordered: the weighted sum of a token is taken in fp32 and rounded once.

    Known limits:
        For few tokens on a GPU: prompts, the CPU, `torch.compile`, biases, gradients, hooks, quantised and sharded
        experts run the loop. The first call moves the experts' weights behind each other, as `packed_linear` does.
        Loops that bring the number of tokens of each expert to the host before they start stay.
    """

    name = "fuse_expert_lists"
    summary = "Experts that are a list of modules are two kernels for few tokens, without a question to the device."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    after = ("fuse_gate_up", "fuse_gated_activation")
    reasons: ClassVar[Mapping[str, str]] = {
        "other_loop": "a turn does something else than to add an expert's weighted output to the tokens that chose it",
        "experts_form": "an expert is no class of the file that computes `down(act(gate(x)) * up(x))`",
        "name_taken": "the file has a name of its own that the new code would call",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every loop that calls the modules of a list and writes rows of a tensor."""
        for info, name, method in module.methods():
            for node in walk(method.body):
                if isinstance(node, cst.For) and over_list(node, info, module) and not _is_asked(node, module):
                    yield Candidate(node, f"{info.name}.{name}", f"for {module.code(node.target)}")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Ask before the loop, and let the experts say what they compute."""
        info_name, method_name = candidate.where.split(".")
        info = module.classes[info_name]
        method = info.methods[method_name]
        if not isinstance(candidate.node, cst.For):
            raise TypeError("a candidate is a loop")
        try:
            loop = list_loop(candidate.node, method, info, module)
        except NotALoop as error:
            return Skip("other_loop", error.what)
        classes = expert_classes(loop.experts, info, module)
        if not classes:
            return Skip("experts_form", f"the file does not show what self.{loop.experts} is a list of")
        if not name_is_free(_CALL, module, method):
            return Skip("name_taken")
        methods = []
        for experts in classes:
            if (taken := why_taken(experts, _METHOD, module)) is not None:
                return Skip("name_taken", taken)
            try:
                parts = expert_parts(experts, module)
            except NotComputable as error:
                return Skip("experts_form", error.what)
            if not name_is_free(_FORM, module, experts.methods["forward"]):
                return Skip("name_taken")
            if not is_own_method(experts.methods.get(_METHOD), (), module):
                methods.append(_described(experts, parts, module))
        edits = (_asked(candidate.node, loop, module), *(method.edit(module) for method in methods))
        uses = {f"moe.{_CALL}", *(use for method in methods for use in method.uses)}
        return Found(edits, tuple(sorted(uses)))


def _is_asked(node: cst.For, module: Module) -> bool:
    """Whether a loop stands behind the question already."""
    above = (node for node in module.ancestors(node) if isinstance(node, cst.If))
    called = (without_runtime(module.qualified(call.func)) for test in above for call in calls_in(test.test))
    return _CALL in called


def _asked(node: cst.For, loop: ListLoop, module: Module) -> Edit:
    """Put the loop behind the question, laid out as the file's formatter lays out a long test."""
    given = [loop.output, loop.hidden_states, f"self.{loop.experts}", loop.index, loop.weights]
    given += [loop.count] if loop.count is not None else []
    given += [f"{word}=True" for word in ("strays", "dense") if getattr(loop, word)]
    head = f"if not {_CALL}({', '.join(given)}):"
    if module.indentation(node) + len(head) > LINE_LENGTH:
        head = f"if not {_CALL}(\n    {', '.join(given)}\n):"
    asked = cst.parse_statement(f"{head}\n    pass\n", config=module.tree.config_for_parsing)
    body = cst.IndentedBlock([node.with_changes(leading_lines=[])])
    return Edit(node, (asked.with_changes(body=body, leading_lines=node.leading_lines),))


def _described(experts: ClassInfo, parts: tuple[str, ...], module: Module) -> Method:
    statement = call_statement("return ", _FORM, parts, module)
    uses = (f"moe.{_FORM}",)
    return Method(
        experts.methods["forward"], _METHOD, {}, _FORM, "Returns what this expert computes.", (statement,), uses
    )
