"""Gate 2, the parts that need gradients, hooks or changed weights: what fused and packed code forgets first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..calls.scenarios import Outputs, Setting, call, main_output, real
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, equal, near_exact
from ..judging.fp32_free_reference import unrounded
from ..judging.verdict import Figure
from ..models.configs import WINDOW, Variant
from ..models.inputs import Batch, seed_all
from ..models.model_pair import ADDED, Pair, Workbench, added, gradients_of, is_added, on_original

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[Any], None]


def changing_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """Gradients, training mode, checkpointing, and models changed after their weights were packed."""
    for name, measure in GRADIENTS.items():
        yield CheckRun(f"{name}, {variant.name}", partial(_gradients, bench, variant, name, measure))
    for name, change in CHANGES.items():
        yield CheckRun(f"after {name}, {variant.name}", partial(_changed, bench, variant, name, change))


def _gradients(
    bench: Workbench, variant: Variant, name: str, measure: Callable[[Any, Setting], Outputs]
) -> Mapping[str, Figure]:
    pair = bench.fresh(variant, "eager", "float64")
    setting = _setting(bench, variant, name)
    expected = on_original(measure, pair.original, setting)

    def again() -> Outputs:
        return on_original(measure, bench.fresh(variant, "eager", "float64").original, setting)

    def truth() -> Outputs:
        with unrounded():
            return again()

    try:
        return near_exact(expected, measure(pair.rewritten, setting), "gradient max", truth)
    except Mismatch:
        if not equal(expected, again()):
            raise NotRun("the original's own gradients differ from run to run") from None
        raise


def _setting(bench: Workbench, variant: Variant, name: str) -> Setting:
    return Setting(bench.subject, variant.vocab_size, bench.options.device, bench.seed_for(variant.name, name))


def gradients(model: Any, setting: Setting) -> Outputs:
    """The gradient of every parameter, and of the input embeddings, for a random projection of the logits."""
    import torch

    inputs = setting.prompt(2, WINDOW + 3, "right")
    output = real(main_output(call(model, setting, inputs)), inputs)
    generator = torch.Generator().manual_seed(setting.seed)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    model.zero_grad()
    (output * direction).sum().backward()
    return gradients_of(model)


def _training(model: Any, setting: Setting) -> Outputs:
    model.train()
    seed_all(setting.seed)
    return gradients(model, setting)


def _of_the_loss(model: Any, setting: Setting) -> Outputs:
    """The loss in training mode, its gradients, and the logits, which it may be computed without."""
    if not (setting.subject.causal and setting.subject.accepts("labels")):
        raise NotRun("the model computes no loss of a next token")
    model.train()
    seed_all(setting.seed)
    inputs = setting.prompt(2, WINDOW + 3, "right")
    labels = inputs.input_ids.masked_fill(~inputs.real, -100)
    model.zero_grad()
    result = call(model, setting, inputs, labels=labels)
    logits = real(main_output(result).detach(), inputs)
    result.loss.backward()
    return {"loss": result.loss.detach().reshape(1), "logits": logits} | gradients_of(model)


def _after_inference(model: Any, setting: Setting) -> Outputs:
    """Weights packed in inference mode must be trainable afterwards."""
    import torch

    with torch.inference_mode():
        call(model, setting, setting.prompt(1, 5))
    return gradients(model, setting)


def _checkpointing(model: Any, setting: Setting) -> Outputs:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotRun("the model does not support gradient checkpointing")
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")()
    if not getattr(model, f"is_{name}_checkpointing"):
        raise Mismatch(f"{name}_checkpointing_enable() had no effect")
    return _training(model, setting)


GRADIENTS: dict[str, Callable[[Any, Setting], Outputs]] = {
    "gradients": gradients,
    "gradients after inference mode": _after_inference,
    "training mode": _training,
    "gradients of the loss": _of_the_loss,
    "checkpointing": _checkpointing,
}


def _changed(bench: Workbench, variant: Variant, name: str, change: Change) -> Mapping[str, Figure]:
    """Run twice, so that lazily packed weights are packed and used, change the model, and run again."""
    import torch

    if change is _replaced_linear and bench.rounding is not None:
        raise NotRun("the original is rounded in the modules that it was built with")
    pair = bench.fresh(variant, bench.implementations()[0], "float64")
    setting = _setting(bench, variant, name)

    def measure(model: Any) -> Outputs:
        with torch.no_grad():
            batch = setting.prompt(2, WINDOW + 1)
            for _ in range(2):
                main_output(call(model, setting, batch))
            change(model)
            return {"logits": main_output(call(model, setting, batch))}

    before = on_original(_plain, pair.original, setting)
    expected = on_original(measure, pair.original)
    if name not in SILENT and torch.equal(before, expected["logits"]):
        raise NotRun("the change does not show in the original")
    return near_exact(expected, measure(pair.rewritten))


def _plain(model: Any, setting: Setting) -> Tensor:
    import torch

    with torch.no_grad():
        return main_output(call(model, setting, setting.prompt(2, WINDOW + 1))).clone()


def _linears(model: Any) -> list[tuple[str, Any]]:
    import torch

    modules = ((name, module) for name, module in model.named_modules() if not is_added(module))
    return [(name, module) for name, module in modules if isinstance(module, torch.nn.Linear)]


def _noise(parameter: Any, number: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(number)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter) * 0.05


def _in_place(model: Any) -> None:
    for number, parameter in enumerate(p for p in model.parameters() if not hasattr(p, ADDED)):
        parameter.add_(_noise(parameter, number))


def _data(model: Any) -> None:
    for number, parameter in enumerate(p for p in model.parameters() if not hasattr(p, ADDED)):
        parameter.data = parameter.data + _noise(parameter, number)


def _loaded(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in state.keys() - added(model).keys():
        if state[name].is_floating_point() and name.endswith("weight"):
            state[name] = state[name] + _noise(state[name], state[name].numel() + state[name].shape[0])
    model.load_state_dict(state)


def _replaced_module(model: Any) -> None:
    """Put an adapter around every linear layer, as parameter-efficient training does."""
    from torch import nn

    class Adapter(nn.Module):
        def __init__(self, base: Any, number: int) -> None:
            super().__init__()
            self.base, self.number = base, number

        @property
        def weight(self) -> Any:
            return self.base.weight

        @property
        def bias(self) -> Any:
            return self.base.bias

        def forward(self, hidden_states: Tensor) -> Any:
            return self.base(hidden_states) * (1 + 0.01 * (self.number % 7 + 1))

    for number, (name, module) in enumerate(_linears(model)):
        model.set_submodule(name, Adapter(module, number))


def _assigned(model: Any) -> None:
    _assign(_linears(model))


def _some_assigned(model: Any) -> None:
    """Every other layer: of those that are packed together, one keeps its weight."""
    _assign(_linears(model)[1::2])


def _assign(layers: list[tuple[str, Any]]) -> None:
    from torch import nn

    for number, (_, module) in enumerate(layers):
        module.weight = nn.Parameter(module.weight.detach() + _noise(module.weight, number))
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias.detach() + _noise(module.bias, number))


def _replaced_linear(model: Any) -> None:
    """Every layer is another module of the same class."""
    from torch import nn

    for number, (name, module) in enumerate(_linears(model)):
        new = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=module.weight.dtype)
        new.weight.copy_(_noise(module.weight, number) * 4)
        if new.bias is not None:
            new.bias.copy_(_noise(module.bias, number) * 4)
        model.set_submodule(name, new.to(module.weight.device))


def _round_trip(model: Any) -> None:
    model.float()
    model.double()


def _copied(model: Any) -> None:
    import copy

    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.zero_()


CHANGES: dict[str, Change] = {
    "weights changed in place": _in_place,
    "weights replaced through .data": _data,
    "weights replaced by assignment": _assigned,
    "some weights replaced by assignment": _some_assigned,
    "linear layers replaced": _replaced_linear,
    "load_state_dict": _loaded,
    "adapters around every linear layer": _replaced_module,
    "a trip through another dtype": _round_trip,
    "a copy of the model was zeroed": _copied,
}
SILENT = {"a trip through another dtype", "a copy of the model was zeroed"}


def hook_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """Every module's hook fires with the original's output, and a hook that changes an output is obeyed."""
    yield CheckRun(f"forward hooks on every module, {variant.name}", lambda: _observed(bench, variant))
    yield CheckRun(f"a hook that changes one output, {variant.name}", lambda: _steered(bench, variant))


def recorded(model: Any, setting: Setting, batch: Batch) -> Outputs:
    """The first tensor that each call of each module returns, by module name and call number."""
    import torch

    outputs: Outputs = {}
    counts: dict[str, int] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, torch.Tensor):
                counts[name] = counts.get(name, -1) + 1
                outputs[f"{name}#{counts[name]}"] = first.detach().clone()

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(record(name)))
        call(model, setting, batch)
    return outputs


def _observed(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    pair = bench.pair(variant, "eager", "float64")
    setting = _setting(bench, variant, "hooks")
    batch = setting.prompt(2, WINDOW + 1)
    return near_exact(on_original(recorded, pair.original, setting, batch), recorded(pair.rewritten, setting, batch))


def _steered(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    pair = bench.pair(variant, bench.implementations()[0], "float64")
    setting = _setting(bench, variant, "steer")
    names = _first_layer_leaves(pair)
    expected: Outputs = {}
    found: Outputs = {}
    for name in names:
        expected[f"logits with a hook on {name}"] = on_original(_with_hook, pair.original, name, setting)
        found[f"logits with a hook on {name}"] = _with_hook(pair.rewritten, name, setting)
    if not names:
        raise NotRun("the model has no layer list")
    return near_exact(expected, found)


def _first_layer_leaves(pair: Pair) -> list[str]:
    names = [name for name, module in pair.original.named_modules() if name and not list(module.children())]
    return [name for name in names if ".0." in f"{name}."]


def _with_hook(model: Any, name: str, setting: Setting) -> Tensor:
    import torch

    def louder(module: Any, arguments: Any, output: Any) -> Any:
        return output * 1.25 if isinstance(output, torch.Tensor) else None

    with model.get_submodule(name).register_forward_hook(louder):
        return _plain(model, setting)
