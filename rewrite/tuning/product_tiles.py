"""Who multiplies: times every path of `runtime/linear/gemm.py` for the products of a model, and writes `gemm.json`.

The products are those that prompts of the given lengths make. A path is timed alone, inside a graph over copies of the
weight that do not fit into any cache; one that computes something else, or cannot be captured, is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching.card_tables import GEMM
from rewrite.benchmark.benchmark_models import lock_of
from rewrite.errors import NothingToTune
from rewrite.measure.runtime_part import runtime_part

from .choices import Choice, Outcome, choose
from .timed_calls import in_turn, timer
from .tuning_run import Plan, require_gpu, small_model
from .write import write as write_entries

VENDOR = "vendor"
ROWS = (64, 512, 2048)
ROTATED_BYTES = 512 << 20
"""Of copies of a weight: more than the last cache of any chip here holds."""
FURTHEST = 0.02
"""Relative distance from the vendor's product; both round to 16 bits, in orders of their own."""
HEADINGS = ("rows x out x in", "n", "us", "path", "us")


def write(folder: Path, chip: str, facts: Mapping[str, Any], choices: Sequence[Choice]) -> Path:
    """Put what was found into `gemm.json` of a folder; what it says of other sizes and chips stays.

    Args:
        folder: of tables.
        chip: the device's name.
        facts: what `export` needs to know about the chip: `gfx` and `cu_num` on AMD cards.
        choices: of the sizes.
    """
    found = {choice.size: {"path": choice.way, "us": dict(sorted(choice.us.items()))} for choice in choices}

    def entries(there: Mapping[str, Any]) -> dict[str, Any]:
        return {**facts, "products": dict(sorted({**there.get("products", {}), **found}.items()))}

    return write_entries(folder, GEMM, chip, entries)


def tune_products(
    plan: Plan, lengths: Sequence[int] = ROWS, progress: Callable[[str], None] = lambda message: None
) -> Outcome:
    """Time the products of prompts of `lengths` tokens.

    Raises:
        NeedsGpu: there is no GPU, or no triton.
        NothingToTune: the package was made without `--with route_gemm`.
        RewriteError: the package cannot be loaded or built.
    """
    lock_of(plan.package)
    require_gpu()
    import torch

    progress("building the model")
    products = Products(small_model(plan))
    sizes = products.sizes(lengths)
    if not sizes:
        raise NothingToTune(type(products.model).__name__, "its package was made without --with route_gemm")
    choices = choose(products, sizes, VENDOR, progress)
    properties = torch.cuda.get_device_properties(products.device)
    facts: dict[str, Any] = {}
    if torch.version.hip is not None:
        facts = {"gfx": properties.gcnArchName.split(":")[0], "cu_num": properties.multi_processor_count}
    path = write(plan.tables, properties.name, facts, choices)
    products.tables.forget()
    return Outcome(properties.name, choices, path)


class Products:
    """A model of the package whose products are timed."""

    def __init__(self, model: Any):
        package = type(model).__module__.rpartition(".")[0]
        self.gemm = runtime_part(package, "linear/gemm")
        self.arrivals = runtime_part(package, "device/split_k_semaphores")
        self.tables = runtime_part(package, "launching/card_tables")
        self.model, self.device = model, model.device

    def sizes(self, lengths: Sequence[int]) -> dict[Any, int]:
        """Return the sizes of the products that prompts of these lengths make, and how often one prompt does."""
        import torch

        found: dict[Any, int] = {}

        def heard(size: Any, path: str) -> None:
            found[size] = found.get(size, 0) + 1

        self.gemm.listen(heard)
        try:
            with torch.no_grad():
                for length in lengths:
                    self.model(torch.full((1, length), 4, device=self.device), use_cache=False)
        finally:
            self.gemm.listen(None)
        return found

    def times(self, size: Any) -> dict[str, float]:
        """Return the microseconds of a call by each path that computes a size."""
        import torch

        dtype = getattr(torch, size.dtype)
        copies = max(2, min(64, ROTATED_BYTES // (size.outputs * size.inputs * dtype.itemsize)))
        x = torch.randn(size.rows, size.inputs, device=self.device).to(dtype)
        weights = [self._weight(size, dtype) for _ in range(copies if self.device.type == "cuda" else 2)]
        bias = torch.randn(size.outputs, device=self.device).to(dtype) if size.bias else None
        with torch.no_grad():
            wanted = self._product(VENDOR, x, bias, weights[0])
            timers = {}
            for name in self.gemm.PATHS:
                run = functools.partial(self._product, name, x, bias)
                found = run(weights[0])
                if found is not None and self._near(found, wanted):
                    timed = self._timer(run, weights)
                    if timed is not None:
                        timers[name] = timed
            return in_turn(timers)

    def _weight(self, size: Any, dtype: Any) -> Any:
        import torch

        weight = torch.randn(size.outputs, size.inputs, device=self.device, dtype=dtype) * size.inputs**-0.5
        return torch.nn.Parameter(weight, requires_grad=False)

    def _product(self, name: str, x: Any, bias: Any, weight: Any) -> Any:
        return self.gemm.by_path(name, x, weight, bias, x.shape[0])

    @staticmethod
    def _near(found: Any, wanted: Any) -> bool:
        return bool((found.float() - wanted.float()).norm() <= FURTHEST * wanted.float().norm())

    def _timer(self, run: Callable[[Any], Any], weights: Sequence[Any]) -> Callable[[], float] | None:
        """Return what times a call once; None if the calls cannot be captured."""
        counters = self.arrivals.new(self.device) if self.device.type == "cuda" else None
        return timer(run, weights, self.device, counters, lambda: self.arrivals.of_graph(counters))
