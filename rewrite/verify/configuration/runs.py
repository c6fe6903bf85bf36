"""What a model computes with a configuration: its initial weights, its outputs, the gradients of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back

from ..judging.compare import NotRun, equal
from ..models.configs import Variant
from ..models.inputs import Padding, seed_all
from ..models.model_inputs import TEXT, make, tensors
from ..models.model_pair import Workbench, build, gradients_of, on_original, randomise
from .values import Variation, changed

if TYPE_CHECKING:
    from torch import Tensor

Outputs = dict[str, "Tensor"]


@dataclass(frozen=True)
class Observed:
    """What the original computes with one configuration: the initial weights, the outputs, the gradients."""

    variations: tuple[Variation, ...]
    weights: Mapping[str, Any]
    initial: Outputs
    outputs: Outputs
    gradients: Outputs

    def differs(self, other: Observed) -> bool:
        """Whether anything is not bit-equal."""
        pairs = ((self.initial, other.initial), (self.outputs, other.outputs), (self.gradients, other.gradients))
        return any(one.keys() != two.keys() or not equal(one, two) for one, two in pairs)


@dataclass
class Runs:
    """Builds, loads and runs models of one class in one precision."""

    bench: Workbench
    dtype: str = "float64"

    def original(self, variations: tuple[Variation, ...], weights: Mapping[str, Any] | None) -> Observed:
        """What the original computes.

        Raises:
            NotRun: it cannot be built so, or does not run.
        """
        return on_original(self.observed, self.bench.subject.original, variations, weights)

    def observed(
        self,
        model_class: Any,
        variations: tuple[Variation, ...],
        weights: Mapping[str, Any] | None,
        expected: Observed | None = None,
    ) -> Observed:
        """Build, load and run a model; where the weights do not fit, it is filled with fresh ones."""

        variant = Variant("configuration", changed(self.bench.base.config, variations), self.bench.base.inputs)
        trains = any(variation.trains for variation in variations)
        initial: Outputs = {}
        outputs: Outputs = {}
        gradients: Outputs = {}
        for implementation in self.bench.implementations():
            seed_all(self.bench.seed_for("configuration"))
            model = build(model_class, variant, implementation, self.dtype, self.bench.options.device)
            if not outputs:
                initial = {f"initial {name}": value.clone() for name, value in _floating(model.state_dict()).items()}
                if expected is not None and weights is not None and model.state_dict().keys() - weights.keys():
                    # the random numbers went to other parameters too, as the check of the initial weights says
                    initial = dict(expected.initial)
                    weights = self.bench.completed(weights, model, model.state_dict())
                if weights is None or not _fits(weights, model.state_dict()):
                    randomise(model, self.bench.seed_for("weights", "configuration"))
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(weights)
            if not outputs:
                outputs = self._outputs(model, expected)
            if self.dtype == "float64":
                found = self._gradients(model, trains)
                gradients |= {f"{implementation}: {name}": value for name, value in found.items()}
        assert weights is not None
        return Observed(variations, weights, initial, outputs, gradients)

    def token(self) -> int:
        """A token that the prompt holds."""
        ids = self._arguments(self.bench.base.config).get("input_ids")
        return int(ids.flatten()[0]) if ids is not None else 0

    def _arguments(self, config: Any, padded: bool = True) -> dict[str, Any]:
        import torch

        bench = self.bench
        text = bench.base.inputs == TEXT
        padding: Padding = "right" if padded and text and bench.subject.accepts("attention_mask") else "none"
        found: dict[str, Any] = make(
            bench.base.inputs, config, 2, bench.seed_for("prompt"), getattr(torch, self.dtype), padding
        )
        if text and bench.subject.causal and bench.subject.accepts("labels"):
            mask = found.get("attention_mask")
            found["labels"] = found["input_ids"] if mask is None else found["input_ids"].masked_fill(mask == 0, -100)
        return {name: value.to(bench.options.device) for name, value in found.items()}

    def _run(self, model: Any, padded: bool = True) -> Outputs:
        """Every output of a pass, without the rows of padding, and whether there is a cache."""
        import torch

        arguments = self._arguments(model.config, padded)
        mask = arguments.get("attention_mask")
        result = model(**arguments)
        found = {
            name: value[mask.bool()] if mask is not None and value.shape[:2] == mask.shape else value
            for name, value in tensors(result).items()
        }
        cached = given_back(result) is not None
        return found | {"whether there is a cache": torch.tensor([float(cached)])}

    def _outputs(self, model: Any, expected: Observed | None) -> Outputs:
        """Every output of a pass, and where the original continues a text, of a token that follows."""
        import torch

        with torch.no_grad():
            found = self._run(model)
            found |= {f"without a mask: {name}": value for name, value in self._run(model, False).items()}
            if expected is not None:
                steps = any(name.startswith("step.") for name in expected.outputs)
                return found | (self._step(model) if steps else {})
            if self.bench.goes_on:
                with contextlib.suppress(NotRun):  # a loss of the routing, say, takes no token beside a longer mask
                    found |= on_original(self._step, model)
        return found

    def _step(self, model: Any) -> Outputs:
        import torch

        arguments = {name: value for name, value in self._arguments(model.config).items() if name != "labels"}
        result = model(**arguments)
        if (cache := given_back(result)) is None:
            return {}
        if (mask := arguments.get("attention_mask")) is not None:
            arguments["attention_mask"] = torch.cat([mask, mask[:, :1]], 1)
        arguments["input_ids"] = arguments["input_ids"][:, :1]
        return tensors(model(**arguments, **{argument_of(model): cache}), "step")

    def _gradients(self, model: Any, trains: bool) -> Outputs:
        """The gradient of every parameter for a random projection of all outputs, and the outputs."""
        import torch

        model.train(trains)
        seed_all(self.bench.seed_for("training"))
        outputs = self._run(model)
        generator = torch.Generator().manual_seed(self.bench.seed_for("direction"))
        total: Any = 0.0
        for value in outputs.values():
            if value.requires_grad:
                direction = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
                total = total + (value * direction).sum()
        if isinstance(total, float):
            return {}
        total.backward()
        return gradients_of(model) | {f"with gradients: {name}": value.detach() for name, value in outputs.items()}


def _floating(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def _fits(weights: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    return weights.keys() == state.keys() and all(weights[name].shape == state[name].shape for name in state)
