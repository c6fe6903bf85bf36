"""Builds both sides with the same weights, in any dtype and attention implementation, and keeps them for the gates."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..judging.compare import Mismatch, NotRun, near_exact
from ..judging.fp32_free_reference import unrounded
from ..judging.requested import Record
from ..judging.tolerances import bound
from ..judging.verdict import ConfigField, Options
from ..judging.watchdog import of_original
from .configs import Variant
from .counting import uncounted
from .indices import asked_first
from .inputs import random_state_kept, seed_all
from .model_inputs import TEXT, make, tensors
from .rounding import Rounding
from .subjects import Subject

Result = TypeVar("Result")
LARGE = 2_000_000
"""Parameters of a model that is built once a check, and not once an argument (RoCBert: 600 s and more)."""
ADDED = "_added_by_an_edit"
"""Set on parameters that the original does not have: what changes the weights of both models leaves them alone."""
KEPT_NAMES = ("A_log", "dt_bias", "inv_freq", "position_ids")


@dataclass(frozen=True)
class Pair:
    """Both models with equal weights, in eval mode."""

    original: Any
    rewritten: Any


@dataclass
class Workbench:
    """One subject's models and weights, built when first asked for."""

    subject: Subject
    variants: list[Variant]
    options: Options
    rounding: Rounding | None = None
    """What the rewritten side rounds on request, and the original here with it."""
    fields: list[ConfigField] = field(default_factory=list)
    """The fields of the configuration, as far as they were varied: filled by the checks on them."""
    varied: Variant | None = None
    """As many of these fields at once as go together."""
    stepped: tuple[Variant, ...] = ()
    """What a step takes another way with: fields that are absent, and frequencies that depend on the length."""
    record: Record = field(default_factory=Record)
    """Which arguments were given and which outputs compared, of all classes together."""
    _weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    _first: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the rewritten class begins with, where it has parameters that the original does not have."""
    _zeros: bool | None = None
    """Whether such parameters are zeros, or what the class begins with."""
    _pairs: dict[tuple[str, str, str], Pair] = field(default_factory=dict)

    @property
    def base(self) -> Variant:
        """The variant that every check runs on."""
        return self.variants[0]

    @property
    def goes_on(self) -> bool:
        """Whether the class goes on with a text, and text alone is what it is fed."""
        return self.subject.writes and self.base.inputs == TEXT

    @property
    def large(self) -> bool:
        """Whether a model of the smallest configuration is so large that building it many times takes minutes."""
        return sum(value.numel() for value in self.weights(self.base).values()) > LARGE

    def seed_for(self, *parts: object) -> int:
        """A seed that differs per check, and with the verifier's own seed."""
        return zlib.crc32(repr((self.options.seed, *parts)).encode())

    def weights(self, variant: Variant) -> dict[str, Any]:
        """A random state dict of the original, exactly representable in bfloat16."""
        if variant.name not in self._weights:
            with random_state_kept():
                seed_all(self.seed_for("init", variant.name))
                model = on_original(build, self.subject.original, variant, "eager", "float32", "cpu")
                randomise(model, self.seed_for("weights", variant.name))
            self._weights[variant.name] = {name: value.clone() for name, value in model.state_dict().items()}
        return self._weights[variant.name]

    def fresh(self, variant: Variant, implementation: str, dtype: str) -> Pair:
        """A new pair, for checks that change their models."""
        pair = Pair(
            on_original(build, self.subject.original, variant, implementation, dtype, self.options.device),
            build(self.subject.rewritten, variant, implementation, dtype, self.options.device),
        )
        pair.original.load_state_dict(self.weights(variant))
        self.load(pair.rewritten, variant)
        if self.rounding is not None:
            self.rounding.apply(pair.original, pair.rewritten)
        return pair

    def load(self, rewritten: Any, variant: Variant) -> None:
        """Give a rewritten model the original's weights; parameters that an edit added are as good as not there."""
        if variant.name not in self._first and rewritten.state_dict().keys() - self.weights(variant).keys():
            with random_state_kept():
                seed_all(self.seed_for("new parameters", variant.name))
                model = build(self.subject.rewritten, variant, "eager", "float32", "cpu")
            self._first[variant.name] = model.state_dict()
        first = self._first.get(variant.name, rewritten.state_dict())
        rewritten.load_state_dict(self.completed(self.weights(variant), rewritten, first))
        for name, parameter in rewritten.named_parameters():
            if name not in self.weights(variant):
                setattr(parameter, ADDED, True)

    def completed(self, weights: Mapping[str, Any], rewritten: Any, first: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights that a rewritten model has, with neutral values of what the original does not have.

        Args:
            weights: those of the original.
            rewritten: the model.
            first: the values that its class begins with.
        """
        state = rewritten.state_dict()
        if state.keys() == weights.keys():
            return weights
        new = {name: first[name].bfloat16().to(first[name]) for name in state.keys() - weights.keys()}
        if new and self._zeros is None:
            self._zeros = True  # while it is tried
            self._zeros = zeros_are_neutral(self)
        if self._zeros:
            learned = {name for name, _ in rewritten.named_parameters()}
            new |= {name: value * 0 for name, value in new.items() if name in learned}
        return {**{name: weights[name] for name in state.keys() & weights.keys()}, **new}

    def plain_original(self, variant: Variant, implementation: str, dtype: str) -> Any:
        """The original as it is, also where the rewritten side rounds."""
        model = on_original(build, self.subject.original, variant, implementation, dtype, self.options.device)
        model.load_state_dict(self.weights(variant))
        return model

    def pair(self, variant: Variant, implementation: str, dtype: str) -> Pair:
        """The shared pair of this kind; checks leave it as they found it."""
        key = (variant.name, implementation, dtype)
        if key not in self._pairs:
            self._pairs[key] = self.fresh(variant, implementation, dtype)
        return self._pairs[key]

    def implementations(self) -> list[str]:
        """The attention implementations both sides are pinned to."""
        supported = getattr(self.subject.original, "_supports_sdpa", False)
        return ["sdpa", "eager"] if supported else ["eager"]

    def low_precisions(self) -> list[str]:
        """The dtypes held to the yardstick."""
        if self.options.quick:
            return [self.options.dtype]
        return list(dict.fromkeys(["float32", self.options.dtype, "float16"]))


def is_added(module: Any) -> bool:
    """Whether a module has parameters of its own, and the original none of them."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(hasattr(parameter, ADDED) for parameter in own)


def added(model: Any) -> dict[str, Any]:
    """The parameters of a model that the original does not have, by name."""
    return {name: value for name, value in model.named_parameters() if hasattr(value, ADDED)}


def without_added(model: Any) -> dict[str, Any]:
    """The state dict of a model without the parameters that the original does not have."""
    new = added(model)
    return {name: value for name, value in model.state_dict().items() if name not in new}


def comparable(bench: Workbench) -> bool:
    """Whether what this version's runtime does with the original has to be what the package does with its model.

    A package of another version may know less, and one that rounds on request computes something else. One that is
    compared with itself says nothing of the original.
    """
    from rewrite import __version__

    if bench.rounding is not None or bench.subject.original is bench.subject.rewritten:
        return False
    lock = lock_of(bench)
    return bool(lock) and lock["tool"]["version"] == __version__


def lock_of(bench: Workbench) -> dict[str, Any]:
    """The lock of the package that the rewritten side is in; empty for a file without one."""
    lock = Path(inspect.getfile(bench.subject.rewritten)).with_name("rewrite.lock")
    return json.loads(lock.read_text("utf-8")) if lock.is_file() else {}


@contextlib.contextmanager
def lent(original: Any, mixin: type, switch: str, on_cpu: bool) -> Iterator[None]:
    """Give the original a base of this version's runtime for a while; `switch` makes it work on a CPU.

    As in a package, what builds on transformers' loop stands behind what the class has of the loop itself.
    """
    from transformers.generation import GenerationMixin

    plain = type(original)
    about = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    bases = (plain, mixin) if issubclass(mixin, GenerationMixin) else (mixin, plain)
    original.__class__ = type(plain.__name__, bases, about)
    setattr(original, switch, on_cpu)
    try:
        yield
    finally:
        original.__class__ = plain
        delattr(original, switch)


def on_original(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run the original's side of a check; what the original cannot do is no fault of the rewritten file.

    On a GPU a CPU is asked first, operator by operator, whether it can.

    Raises:
        NotRun: the original raised.
    """
    with asked_first():
        return attempted(call, *args, **kwargs)


def unrounded_original(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Callable[[], Result]:
    """What runs the original's side of a check without its roundings to fp32."""

    def run() -> Result:
        with unrounded():
            return on_original(call, *args, **kwargs)

    return run


def attempted(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """The same where `torch.compile` is asked, which compiles nothing while operators are watched.

    Raises:
        NotRun: the original raised.
    """
    try:
        with uncounted(), of_original():
            return call(*args, **kwargs)
    except NotRun:
        raise
    except Exception as error:  # foreign model code raises what it likes
        raise NotRun(f"the original raises {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return textwrap.shorten((str(error).strip().splitlines() or [""])[0], 200, placeholder=" …")


def zeros_are_neutral(bench: Workbench) -> bool:
    """Whether a branch of parameters that the original does not have adds nothing where they are zeros.

    Else they are what the class begins with, as the ones of a scale.
    """
    import torch

    pair = bench.fresh(bench.base, bench.implementations()[0], "float32")
    made = make(bench.base.inputs, pair.original.config, 2, bench.seed_for("new parameters"), torch.float32)
    arguments = {name: value.to(bench.options.device) for name, value in made.items()}
    with torch.no_grad():
        expected = tensors(on_original(pair.original, **arguments))
        try:
            near_exact(expected, tensors(pair.rewritten(**arguments)), "fp32 max")
        except Mismatch:
            return False
    return True


def build(model_class: Any, variant: Variant, implementation: str, dtype: str, device: str) -> Any:
    """A model in eval mode with default weights; its dtype is set while it is built, so fp32 buffers stay fp32."""
    import torch

    config = copy.deepcopy(variant.config)
    pinned: dict[str, Any] = {"attn_implementation": implementation, "dtype": getattr(torch, dtype)}
    if dtype == "float64" and variant.routed:
        pinned["experts_implementation"] = "eager"  # torch's grouped matrix product has no fp64
    model = model_class._from_config(config, **pinned)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id, generation.pad_token_id = None, 0
    return model.to(device).eval()


def gradients_of(model: Any) -> dict[str, Any]:
    """The gradients that are there, without those that are zero but for roundings."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    sizes = {name: float(grad.abs().max()) if grad.numel() else 0.0 for name, grad in found.items()}
    smallest = bound("gradient zero") * max(sizes.values(), default=0.0)
    return {f"gradient of {name}": grad for name, grad in found.items() if not sizes[name] <= smallest}


def randomise(model: Any, seed: int) -> None:
    """Fill a model so that every parameter shows in the logits: scaled weights, random norms and biases.

    Vectors keep their initial value plus noise (so `1 + weight` norms and plain ones both work); matrices are drawn
    with variance 1 / fan-in; a tied embedding is scaled so that logits are neither flat nor one-hot.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    transposed = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device)
            if parameter.dim() < 2 or name.endswith(KEPT_NAMES) or "conv" in name:
                value = parameter + 0.25 * noise
            elif id(parameter) in embeddings:
                value = noise * 2 * parameter.shape[-1] ** -0.5
            else:
                fan_in = parameter.shape[-2] if id(parameter) in transposed else parameter.shape[-1]
                value = noise * 1.5 * fan_in**-0.5
            parameter.copy_(value.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("_bias") and buffer.is_floating_point():
                noise = torch.randn(buffer.shape, generator=generator).to(buffer.device)
                buffer.copy_((buffer + 0.25 * noise).bfloat16())
