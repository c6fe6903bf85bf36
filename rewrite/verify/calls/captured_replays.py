"""Gate 2, the captured forward of a rewritten package: replays against the original, call by call.

On a GPU a graph is replayed; on a CPU the forward is run again in its place, with the same copies in and out. A check
asks the package what ran: where it captures nothing, the check is not run and says why.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, Observations, near_exact
from ..judging.verdict import Figure
from ..models.counting import uncounted
from ..models.inputs import Padding, seed_all
from ..models.model_inputs import SMALL, TEXT, Sizes, make, tensors
from ..models.model_pair import Pair, Workbench, comparable, is_added, lent, on_original, unrounded_original
from .single_forward import real_rows

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "_forward_without_graph"
"""Set on a model, it makes a call take the way of a captured forward on any device."""
CALLS, MORE_ROWS = 5, 2
"""Calls with inputs of their own, the first of which captures, and which of them has a row more."""
LENGTHS = (9, 13, 8, 12)
"""Tokens of texts that may share a graph, if the package pads them."""


def captured_checks(bench: Workbench) -> Iterator[CheckRun]:
    """One check of a class whose forward may be captured; none of another."""
    if hasattr(bench.subject.rewritten, SWITCH):
        yield CheckRun("captured forward", partial(_captured, bench))


def _captured(bench: Workbench) -> Mapping[str, Figure]:
    """Every replay computes what the original does with these inputs, and leaves what was returned before alone.

    Raises:
        Mismatch: one does not, or the package captures nothing where the original can be captured.
        NotRun: the package captures nothing of this class.
    """
    dtype = "float64" if bench.options.device == "cpu" else "float32"
    pair = bench.fresh(bench.base, bench.implementations()[0], dtype)
    if bench.options.device == "cpu":
        setattr(pair.rewritten, SWITCH, True)
    origin = next(base.__module__ for base in type(pair.rewritten).__mro__ if SWITCH in vars(base))
    room = origin.rpartition(".")[0]
    switch, store = (importlib.import_module(f"{room}.{name}") for name in ("forward_settings", "forward_cache"))
    maximum = "fp64 max" if dtype == "float64" else "fp32 max"
    figures: dict[str, Figure] = {}
    with switch.use_forward_graphs("always"):
        for padding in _paddings(bench):
            figures |= _calls(bench, pair, dtype, padding, maximum)
            if bench.base.inputs == TEXT:
                figures |= _lengths(bench, pair, dtype, padding, maximum)
        kept = store.store_of(pair.rewritten)
        unpadded = _unpadded(kept)
        if not bench.options.quick:
            _outputs_of_zeros(bench, dtype, maximum)
            figures |= _after_changes(bench, pair, kept, dtype, maximum)
    if "differs" in {refusal.reason for refusal in kept.refused.values()}:
        raise Mismatch("a graph of the forward computes something else than the forward does")
    replays = kept.replays
    if not replays:
        reason = f"nothing was replayed: {'; '.join(store.describe(pair.rewritten)) or 'no reason is known'}"
        if comparable(bench):
            _needless(bench, dtype, reason)
        raise NotRun(reason)
    on_cpu = bench.options.device == "cpu"  # on a GPU a kernel may round a padded text in another way
    if on_cpu and unpadded and comparable(bench) and (needless := unpadded - _unpadded_of_original(bench, dtype)):
        raise Mismatch(f"texts of the original may be padded to share a graph, and the package's are not: {needless}")
    return {**figures, "replays": replays}


class _Compared:
    """What both sides give in several calls, and the original without its roundings to fp32 in the state before each.

    Args:
        pair: the models.
        maximum: the bound of the comparison; only that of fp64 asks for the original without its roundings.
    """

    def __init__(self, pair: Pair, maximum: str):
        self._pair, self._maximum = pair, maximum
        self._expected: dict[str, Tensor] = {}
        self._found, self._exact = dict(self._expected), dict(self._expected)
        self._reason: NotRun | None = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observations:
        """Make a call. Returns what the rewritten side gives."""
        original = self._pair.original
        if self._maximum == "fp64 max":
            try:  # a copy of it, since a call may leave something behind
                truth = unrounded_original(lambda: _outputs(copy.deepcopy(original), arguments))()
                self._exact |= _named(truth, name)
            except NotRun as reason:
                self._reason = reason
        self._expected |= _named(on_original(_outputs, original, arguments), name)
        outputs = _outputs(self._pair.rewritten, arguments)
        self._found |= _named(outputs, name)
        return outputs

    def figures(self, of: str) -> dict[str, Figure]:
        """Compare all calls."""
        found = near_exact(self._expected, self._found, self._maximum, self._truth)
        return {f"{of} {name}": value for name, value in found.items()}

    def _truth(self) -> Observations:
        if self._reason is not None:
            raise self._reason
        return self._exact


def _unpadded(store: Any) -> set[str]:
    """Why texts of several lengths have a graph each; empty where they share one."""
    return {refusal.reason for refusal in (*store.unpadded.values(), *store.hidden.values())}


def _unpadded_of_original(bench: Workbench, dtype: str) -> set[str]:
    """The same of the original itself on a CPU, its forward captured by this version."""
    from hf_rewrite_runtime.forward import captured, forward_cache, forward_settings

    original = bench.fresh(bench.base, bench.implementations()[0], dtype).original
    with lent(original, captured.CapturedForward, SWITCH, True), forward_settings.use_forward_graphs("always"):
        for padding in _paddings(bench):
            for number, length in enumerate(LENGTHS):
                arguments = _arguments(bench, original.config, dtype, padding, number, Sizes(length))
                on_original(_outputs, original, arguments)
    return _unpadded(forward_cache.store_of(original))


def _needless(bench: Workbench, dtype: str, reason: str) -> None:
    """Let this version capture the forward of the original itself: two calls, the second of which is a replay.

    The original is asked first whether it can, watched; what is raised after that is the fault of what captures.

    Raises:
        Mismatch: it does, so that the package has no reason not to.
    """
    from hf_rewrite_runtime.forward import captured, forward_cache, forward_settings

    original = bench.fresh(bench.base, bench.implementations()[0], dtype).original
    calls = [_arguments(bench, original.config, dtype, "none", number) for number in range(2)]
    for arguments in calls:
        on_original(_outputs, original, arguments)
    on_cpu = bench.options.device == "cpu"
    with (
        uncounted(),
        lent(original, captured.CapturedForward, SWITCH, on_cpu),
        forward_settings.use_forward_graphs("always"),
    ):
        for arguments in calls:
            _outputs(original, arguments)
    if forward_cache.store_of(original).replays:
        raise Mismatch(f"the original's forward can be captured, and the package's is not: {reason}")


def _paddings(bench: Workbench) -> tuple[Padding, ...]:
    text = bench.base.inputs == TEXT and bench.subject.accepts("attention_mask")
    return ("none", "right") if text else ("none",)


def _calls(bench: Workbench, pair: Pair, dtype: str, padding: Padding, maximum: str) -> dict[str, Figure]:
    """Compare calls with other inputs each, the last after the weights have changed in place."""
    compared = _Compared(pair, maximum)
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(CALLS):
        if number == CALLS - 1:
            _change_weights(pair)
        arguments = _arguments(bench, pair.original.config, dtype, padding, number)
        outputs = compared.call(f"call {number}", arguments)
        kept += [(tensor, tensor.clone()) for tensor in outputs.values()]
    if not all(bool(((tensor == before) | (tensor != tensor)).all()) for tensor, before in kept):
        raise Mismatch("a later call wrote to what an earlier one had returned")
    return compared.figures(padding)


def _lengths(bench: Workbench, pair: Pair, dtype: str, padding: Padding, maximum: str) -> dict[str, Figure]:
    """Compare texts of several lengths, which may be padded to share a graph."""
    compared = _Compared(pair, maximum)
    for number, length in enumerate(LENGTHS):
        compared.call(f"call {number}", _arguments(bench, pair.original.config, dtype, padding, number, Sizes(length)))
    return compared.figures(f"{padding} lengths,")


def _after_changes(bench: Workbench, pair: Pair, kept: Any, dtype: str, maximum: str) -> dict[str, Figure]:
    """Compare calls of one shape after what users do to a model: each change shows in the next call, too."""
    compared = _Compared(pair, maximum)
    arguments = _arguments(bench, pair.original.config, dtype, "none", 0)
    for number, (name, change) in enumerate(CHANGES.items()):
        for model in (pair.original, pair.rewritten):
            change(model)
        for turn in range(2):
            before = kept.replays
            compared.call(f"{name}, {number}.{turn}", arguments)
            if kept.replays > before and turn == 0 and change in (_replace_weights, _hook, _replace_module):
                raise Mismatch(f"a graph is replayed that was captured before there was {name}")
        if number == 0:
            _not_while_watched(pair, kept, arguments)
    return compared.figures("after changes,")


def _not_while_watched(pair: Pair, kept: Any, arguments: Mapping[str, Any]) -> None:
    """Who watches every function or operator of torch sees them all: nothing is replayed meanwhile."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    before = kept.replays
    for watches in (Functions(), Operators()):
        with watches:
            _outputs(pair.rewritten, arguments)
        if kept.replays > before:
            raise Mismatch(f"a graph is replayed where {type(watches).__name__.lower()} of torch are watched")


def _outputs_of_zeros(bench: Workbench, dtype: str, maximum: str) -> None:
    """A model whose weights are zeros, which has nothing to tell one output from another by, is captured as any."""
    import torch

    pair = bench.fresh(bench.base, bench.implementations()[0], dtype)
    if bench.options.device == "cpu":
        setattr(pair.rewritten, SWITCH, True)
    with torch.no_grad():
        for parameter in (*pair.original.parameters(), *pair.rewritten.parameters()):
            parameter.zero_()
    arguments = _arguments(bench, pair.original.config, dtype, "none", 0)
    expected = on_original(_outputs, pair.original, arguments)
    for _ in range(2):
        near_exact(expected, _outputs(pair.rewritten, arguments), maximum)


def _leaves_of(model: Any) -> dict[str, Any]:
    """The modules with weights of their own by name, but those that another module shares."""
    counts = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return {
        name: module
        for name, module in model.named_modules()
        if not list(module.children()) and list(module.parameters()) and not is_added(module)
        if all(counts[id(weight)] == 1 for weight in module.parameters())
    }


def _replace_weights(model: Any) -> None:
    """Other parameters in place of those of every third module."""
    import torch

    for module in list(_leaves_of(model).values())[::3]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach() * 0.75, requires_grad=parameter.requires_grad))


def _hook(model: Any) -> None:
    """A hook on a module in the middle, which changes what comes out."""
    if leaves := list(_leaves_of(model).values()):
        leaves[len(leaves) // 2].register_forward_hook(_halved)


def _halved(module: Any, arguments: Any, output: Any) -> Any:
    return output * 0.5 if hasattr(output, "is_floating_point") and output.is_floating_point() else output


def _unhook(model: Any) -> None:
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if hook is _halved]:
            del module._forward_hooks[key]


def _replace_module(model: Any) -> None:
    """A copy of a module with other weights in place of it."""
    import torch

    if leaves := list(_leaves_of(model).items()):
        name, chosen = leaves[len(leaves) // 3]
        other = copy.deepcopy(chosen)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        model.set_submodule(name, other)


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None,
    "other weights": _replace_weights,
    "a hook": _hook,
    "the hook gone": _unhook,
    "another module": _replace_module,
}
"""What is done to both models before a call, one after another."""


def _arguments(
    bench: Workbench, config: Any, dtype: str, padding: Padding, number: int, sizes: Sizes = SMALL
) -> dict[str, Any]:
    import torch

    seed = bench.seed_for(bench.subject.name, "captured", padding, number)
    rows = 3 if number == MORE_ROWS else 2
    made = make(bench.base.inputs, config, rows, seed, getattr(torch, dtype), padding, sizes)
    arguments: dict[str, Any] = {name: value.to(bench.options.device) for name, value in made.items()}
    return arguments | ({"use_cache": False} if bench.subject.accepts("use_cache") else {})


def _outputs(model: Any, arguments: Mapping[str, Any]) -> Observations:
    import torch

    seed_all(0)
    with torch.no_grad():
        found = tensors(model(**arguments))
    mask = arguments.get("attention_mask")
    return found if mask is None else {name: real_rows(value, mask) for name, value in found.items()}


def _named(outputs: Observations, call: str) -> dict[str, Tensor]:
    return {f"{call}, {name}": tensor for name, tensor in outputs.items()}


def _change_weights(pair: Pair) -> None:
    import torch

    with torch.no_grad():
        for model in (pair.original, pair.rewritten):
            for parameter in model.parameters():
                parameter.mul_(1.25)
