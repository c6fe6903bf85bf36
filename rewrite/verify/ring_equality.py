"""Whether both models are the same polynomials: a forward pass of each in a finite ring, with every weight random.

Nothing rounds there, so there is no tolerance: a norm that has lost its eps, a scale of 1.001 or a weight that is left
out changes every output, where 16 bits and the small values of fresh models would hide it. See `rewrite.finite.ring`
for what exp, an order or a square root are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .configuration.values import Variation, changed
from .configuration.variations import APART, Configurations
from .judging.checks import CheckRun, describe
from .judging.compare import Mismatch, NotRun, about
from .judging.verdict import POLYNOMIALS, Figure
from .judging.watchdog import of_original
from .models.configs import Variant
from .models.counting import uncounted
from .models.inputs import Padding
from .models.model_inputs import make
from .models.model_pair import Workbench, build


def ring_checks(bench: Workbench) -> Iterator[CheckRun]:
    """Yield the check, which stands before those in fp64."""
    if bench.rounding is None and bench.options.device == "cpu" and bench.options.weights is None and not bench.large:
        yield CheckRun(POLYNOMIALS, lambda: _Comparison(bench).figures())


class _Comparison:
    """Both models with one configuration after another."""

    def __init__(self, bench: Workbench):
        self.bench = bench
        self.compared = 0
        self.refused = 0
        """Configurations with which a side does not run."""
        self.meaningless: dict[str, int] = {}
        """How many have no meaning in the ring, by the operation that has none."""
        self.why = ""
        """Why, of the first of them."""

    def figures(self) -> Mapping[str, Figure]:
        from rewrite.finite import ring

        quick = self.bench.options.quick
        for number, variant in enumerate(self.bench.variants):
            for implementation in self.bench.implementations()[: 1 if quick and number else None]:
                self._compare(variant, implementation, ring.PRIMES[number % len(ring.PRIMES)])
        if not self.compared:
            operation = next(iter(self.meaningless), "")
            raise NotRun(f"{operation} has no meaning in a finite ring" if operation else self.why)
        variations = self._variations()
        if quick:
            self._all_at_once(variations)
        for number, variation in enumerate(() if quick else variations):
            implementations = self.bench.implementations()
            self._compare((variation,), implementations[number % len(implementations)], ring.PRIMES[0])
        figures: dict[str, Figure] = {"configurations": self.compared}
        if self.meaningless:
            figures |= {"without a meaning": sum(self.meaningless.values()), "first": next(iter(self.meaningless))}
        return figures | ({"refused": self.refused} if self.refused else {})

    def _variations(self) -> list[Variation]:
        if not self.bench.options.configuration:
            return []
        found = Configurations(self.bench).choices()
        return [variation for one in found for variation in one.variations if not variation.trains]

    def _variant(self, variations: tuple[Variation, ...]) -> Variant:
        name = ", ".join(one.name for one in variations)
        return Variant(name, changed(self.bench.base.config, variations), self.bench.base.inputs)

    def _all_at_once(self, variations: list[Variation]) -> None:
        """One value of each field together, halved where the original does not run so."""
        from rewrite.finite import ring

        together = (one for one in reversed(variations) if not any(part in one.field for part in APART))
        firsts = list({one.field: one for one in together if "rope_type" not in one.field}.values())
        if not firsts or self._compare(tuple(firsts), self.bench.implementations()[0], ring.PRIMES[1]):
            return
        for half in (firsts[: len(firsts) // 2], firsts[len(firsts) // 2 :]):
            self._compare(tuple(half), self.bench.implementations()[0], ring.PRIMES[1])

    def _compare(self, given: Variant | tuple[Variation, ...], implementation: str, prime: int) -> bool:
        """Compare both sides with one configuration; return whether the original runs with it.

        What the rewritten side raises here is no failure: the checks in fp64 run it too.

        Raises:
            Mismatch: an output differs.
        """
        from rewrite.finite import ring

        ring.use(prime)
        side = "original"
        try:
            variant = given if isinstance(given, Variant) else self._variant(given)
            with uncounted(), of_original():
                expected = self._outputs(self.bench.subject.original, variant, implementation)
            side = "rewritten side"
            found = self._outputs(self.bench.subject.rewritten, variant, implementation)
        except ring.Meaningless as operation:
            self.meaningless[str(operation)] = self.meaningless.get(str(operation), 0) + 1
            return False
        except Exception as error:  # a configuration that it refuses, in whatever way
            self.refused += 1
            self.why = self.why or f"the {side} does not run in a finite ring: {describe(error)}"
            return False
        with about(f"{implementation}, {variant.name}"):
            _require_equal(expected, found)
        self.compared += 1
        return True

    def _outputs(self, model_class: Any, variant: Variant, implementation: str) -> dict[str, Any]:
        """The outputs of a pass, elements or numbers, by the way to them."""
        import torch

        from rewrite.finite.ring_model import fill, flattened
        from rewrite.finite.ring_tensor import InTheRing

        model = fill(build(model_class, variant, implementation, "float64", "cpu"))
        seed = self.bench.seed_for("prompt", "ring")
        padding: Padding = (
            "right"
            if self.bench.subject.accepts("attention_mask") and variant.inputs == self.bench.base.inputs
            else "none"
        )
        given = make(variant.inputs, variant.config, 2, seed, torch.float32, padding)
        with torch.no_grad(), InTheRing():
            return flattened(model(**{name: _as_elements(name, value) for name, value in given.items()}))


def _as_elements(name: str, value: Any) -> Any:
    from rewrite.finite import ring
    from rewrite.finite.ring_tensor import RingTensor

    return RingTensor(ring.random(tuple(value.shape), name)) if value.is_floating_point() else value


def _require_equal(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    import torch

    if expected.keys() != found.keys():
        raise Mismatch(f"other outputs: {', '.join(sorted(expected.keys() ^ found.keys()))}")
    for name, value in expected.items():
        other = found[name]
        if value.shape != other.shape:
            raise Mismatch(f"{name} is {list(other.shape)} and not {list(value.shape)}")
        if count := int(torch.count_nonzero(value != other)):
            text = f"{count} of {value.numel()} values of {name} are of another polynomial"
            raise Mismatch(text, {"different": count, "values": value.numel()})
