"""`rewrite verify DIR --tp N`: a package whose tensors are dealt to several ranks, against its original.

Run by torchrun, in every rank the same. A small checkpoint, or a given one, is loaded three times: the original whole,
the original under `tp_plan="auto"`, and the package under it. Whatever differs between the first two is transformers'
own, and the yardstick for the third. Where the model has a plan that gives each rank some of the experts, whole, all
of it is done under that plan too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.errors import VerificationError
from rewrite.measure.plans import columns_plan, deals_experts, experts_plan
from rewrite.measure.presets import config_for
from rewrite.measure.runtime_part import runtime_part

from .judging.tolerances import bound
from .models import loaded_sides
from .models.subjects import find_subjects
from .rank_processes import Check

if TYPE_CHECKING:
    from torch import Tensor

ROWS, PROMPT, NEW = 2, 9, 16
SWITCH = "_step_without_graph"


class Dealt:
    """One rank's part of the verification.

    Args:
        original: class of the original.
        rewritten: class of the package, of the same name.
        weights: a checkpoint's folder; None for a small model with random weights.
        device: `cpu`, or this rank's card.
        dtype: of the generation on a card; everything else is in fp64.
        seed: of weights and inputs.
        more: fields of the small model's configuration.
        experts: whether each rank has some of the experts, whole.
    """

    def __init__(
        self, original: Any, rewritten: Any, weights: str | None = None, device: str = "cpu", dtype: str = "float64",
        seed: int = 0, more: Mapping[str, Any] | None = None, experts: bool = False,
    ):  # fmt: skip
        import torch
        import torch.distributed as dist

        self.original, self.rewritten, self.device, self.seed = original, rewritten, device, seed
        self.dtype, self.more = getattr(torch, dtype), dict(more or {})
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.plan = experts_plan(self.size) if experts else columns_plan()
        self.suffix = ", whole experts" if experts else ""
        self.kept = tempfile.TemporaryDirectory()
        place = [self.kept.name]
        dist.broadcast_object_list(place, src=0)
        self.folder = Path(place[0])
        self.weights = weights or str(self.folder / "model")
        if weights is None and self.rank == 0:
            self._save_small()
        dist.barrier()

    def _save_small(self) -> None:
        import torch

        heads = {"num_attention_heads": 4 * self.size, "num_key_value_heads": 2 * self.size}
        heads["num_experts"] = 4 * self.size
        vocabulary = 130 * self.size - int(_deals_uneven_columns())
        sizes = {"hidden_size": 16 * self.size, "head_dim": 16, "vocab_size": vocabulary}
        biases = {"attention_bias": True, "mlp_bias": True}
        config = config_for(self.original.config_class, "tiny", **{**heads, **sizes, **biases, **self.more})
        torch.manual_seed(self.seed)
        model = self.original._from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        model.save_pretrained(self.weights)

    def whole(self) -> Any:
        """The original in this process alone."""
        import torch

        model = self.original.from_pretrained(self.weights, dtype=torch.float64)
        return _taking_fp64(model).to(self.device).eval()

    def dealt(self, kind: Any, dtype: Any = None) -> Any:
        """A model that the plan of its class has dealt."""
        import torch

        model = kind.from_pretrained(self.weights, dtype=dtype or torch.float64, **self.plan)
        return (model if dtype else _taking_fp64(model)).eval()

    def checks(self) -> Iterator[Check]:
        """Every check, in turn."""
        import torch

        whole, theirs, ours = self.whole(), self.dealt(self.original), self.dealt(self.rewritten)
        prompt = self.prompt(whole)
        with torch.no_grad():
            truth, own, got = (model(prompt).logits.double() for model in (whole, theirs, ours))
        yield self._close("forward", _error(truth, got), _error(truth, own), "fp64 max")
        yield self._gradients(whole, theirs, ours, prompt)
        before = {name: id(parameter) for name, parameter in ours.named_parameters()}
        yield from self.generation(whole, ours)
        after = {name: id(parameter) for name, parameter in ours.named_parameters()}
        yield self._everywhere("parameters stay", before == after, f"{len(after)} after generate() as before")
        yield self._bytes("weights a rank holds", _held(ours), _held(theirs))
        yield self._saved(theirs, ours)

    def generation(self, whole: Any, ours: Any) -> Iterator[Check]:
        """The checks of what the package generates beside the whole original."""
        import torch

        prompt = self.prompt(whole)

        if self.device == "cpu":
            setattr(type(ours), SWITCH, True)
            yield self._tokens_agree("tokens", whole, ours, prompt)
            yield self.steps(whole, ours)
            setattr(type(ours), SWITCH, False)
            yield self._tokens_agree("tokens of transformers' loop", whole, ours, prompt)
            setattr(type(ours), SWITCH, True)
        else:
            yield self._tokens_agree("tokens", whole, self.dealt(self.rewritten, self.dtype), prompt)
            yield self.steps(whole, ours)
        torch.manual_seed(self.seed + self.rank)
        drawn = ours.generate(prompt, max_new_tokens=NEW, do_sample=True)
        if self.device == "cpu":
            setattr(type(ours), SWITCH, False)
        alike, _ = self._same_everywhere(drawn)
        yield self._everywhere("drawn tokens", alike, f"{drawn.numel()} the same on every rank, whatever its seed")

    def steps(self, whole: Any, ours: Any) -> Check:
        """The logits of every step, which tell more than the tokens that are chosen from them."""
        import torch

        prompt = self.prompt(whole)
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        output = ours.generate(prompt, return_dict_in_generate=True, output_logits=True, **settings)
        got = torch.stack(output.logits, 1).double()
        with torch.no_grad():
            truth = whole(output.sequences[:, :-1]).logits[:, prompt.shape[1] - 1 :].double()
        return self._close("logits of steps", _error(truth, got), 0.0, "fp32 max")

    def _tokens_agree(self, name: str, whole: Any, ours: Any, prompt: Tensor) -> Check:
        """Every token is the whole original's best, or no further below it than a rounding reaches."""
        import torch

        tokens = ours.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        alike, _ = self._same_everywhere(tokens)
        if not alike:
            return self._everywhere(name, False, "the ranks generate different tokens")
        with torch.no_grad():
            truth = whole(tokens[:, :-1]).logits[:, prompt.shape[1] - 1 :].double()
            low = ours(tokens[:, :-1]).logits[:, prompt.shape[1] - 1 :].double()
        chosen = truth.gather(2, tokens[:, prompt.shape[1] :, None])[..., 0]
        deficit = float((truth.amax(-1) - chosen).max())
        scale = float(truth.abs().max())
        noise = max(float((truth - low).abs().max()), bound("fp32 max") * scale) if self.device != "cpu" else 0.0
        allowed = bound("near tie") * (noise or bound("fp32 max") * scale)
        beyond = "" if deficit <= allowed else f", beyond {allowed:.2g}"
        count = tokens.shape[0] * NEW
        return self._everywhere(name, deficit <= allowed, f"{count}, largest deficit {deficit:.2g}{beyond}")

    def _gradients(self, whole: Any, theirs: Any, ours: Any, prompt: Tensor) -> Check:
        """Gradients of a loss, brought together from all ranks."""
        truth, own, got = (_gradients_of(model, prompt) for model in (whole, theirs, ours))
        largest = max(float(gradient.abs().max()) for gradient in truth.values())
        worst, at, theirs_worst = 0.0, "", 0.0
        for name, expected in truth.items():
            floor = bound("gradient zero") * largest
            error = _error(expected, got[name], floor)
            theirs_worst = max(theirs_worst, _error(expected, own[name], floor))
            if not error <= worst:
                worst, at = error, name
        check = self._close("gradients", worst, theirs_worst, "gradient max")
        return Check(check.name, check.passed, f"{check.detail}, largest at {at}" if at else check.detail)

    def _saved(self, theirs: Any, ours: Any) -> Check:
        """The files that both write."""
        import torch.distributed as dist

        places = [self.folder / "theirs", self.folder / "ours"]
        refusals = [_refusal_to_save(model, place) for model, place in zip((theirs, ours), places, strict=True)]
        dist.barrier()
        if any(refusals):
            said = f"not written by this torch, nor is the original's: {refusals[0]}"
            differ = f"the original's: {refusals[0] or 'written'}, the package's: {refusals[1] or 'written'}"
            same = refusals[0] == refusals[1]
            return self._everywhere("checkpoint", same, said if same else differ)
        written = [{p.name: p.read_bytes() for p in place.glob("*.safetensors")} for place in places]
        same = written[0] == written[1] and bool(written[0])
        size = sum(map(len, written[1].values()))
        said = f"{size} bytes, as the original writes them" if same else "save_pretrained writes other bytes"
        return self._everywhere("checkpoint", same, said)

    def _close(self, name: str, error: float, own: float, tolerance: str) -> Check:
        allowed = max(bound(tolerance), bound("yardstick max") * own)
        detail = f"largest error {error:.2g}, the original's on these ranks {own:.2g}"
        beyond = "" if error <= allowed else f", beyond {allowed:.2g}"
        return self._everywhere(name, error <= allowed, detail + beyond)

    def _bytes(self, name: str, ours: int, theirs: int) -> Check:
        return self._everywhere(name, ours <= theirs, f"{ours} bytes, the original {theirs}")

    def _everywhere(self, name: str, passed: bool, detail: str) -> Check:
        """A check that has to pass on all ranks."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(passed)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        everywhere = bool(flag.item())
        name += self.suffix
        return Check(name, everywhere, detail if everywhere == passed else f"{detail}, but not on another rank")

    def _same_everywhere(self, tensor: Tensor) -> tuple[bool, list[Tensor]]:
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous())
        return all(torch.equal(found[0], other) for other in found), found

    def prompt(self, model: Any) -> Tensor:
        """Tokens `[ROWS, PROMPT]` for a model, the same on every rank."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        size = model.config.get_text_config().vocab_size
        return torch.randint(1, size, (ROWS, PROMPT), generator=generator).to(self.device)


def _taking_fp64(model: Any) -> Any:
    """The model, with its experts gathered for each token: torch's grouped product takes no fp64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model


def _deals_uneven_columns() -> bool:
    """Return whether this transformers gathers columns of which the last rank has fewer; 5.17 refuses them."""
    try:
        from transformers.distributed import tensor_parallel as plans
    except ImportError:  # 5.0 has them elsewhere
        return False
    return plans.ColwiseParallel.validate_param is plans.TensorParallelLayer.validate_param


def _gradients_of(model: Any, prompt: Tensor) -> dict[str, Tensor]:
    """The gradients of every parameter, whole; zeros where there is none."""
    import torch
    from torch.distributed.tensor import DTensor

    model.zero_grad(set_to_none=True)
    logits = model(prompt).logits.double()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), prompt[:, 1:].flatten()).backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = (_whole(gradient) if isinstance(gradient, DTensor) else gradient).detach().double()
    model.zero_grad(set_to_none=True)
    return found


def _refusal_to_save(model: Any, place: Path) -> str:
    """Save a model; return what torch says where it cannot put together what the ranks have, else nothing."""
    try:
        model.save_pretrained(place)
    except ValueError as error:  # torch 2.11, of experts that are packed
        return str(error).split(",")[0]
    return ""


def _whole(tensor: Any) -> Tensor:
    """Return what ranks of one group have of a DTensor, put together; torch 2.11 does not take packed parts."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import _StridedShard

    (placement,) = tensor.placements
    if not isinstance(placement, _StridedShard):
        whole: Tensor = tensor.full_tensor()
        return whole
    own = tensor.to_local().contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    pieces = int(placement.split_factor)
    packed = zip(*(part.chunk(pieces, placement.dim) for part in parts), strict=True)
    return torch.cat([part for of_one in packed for part in of_one], placement.dim)


def _error(truth: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """The largest error, as a share of the largest magnitude; infinite where shapes or finiteness differ."""
    if truth.shape != got.shape or not bool(got.isfinite().all()):
        return float("inf")
    scale = max(float(truth.abs().max()), floor)
    error = float((truth - got).abs().max())
    return 0.0 if error <= floor else error / scale


def _held(model: Any) -> int:
    """Bytes of the memory that this rank's parameters lie in."""
    from torch.distributed.tensor import DTensor

    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(held.values())


def run(package: str, original: str, given: argparse.Namespace, say: Callable[[Check], None]) -> list[Check]:
    """Verify in this rank.

    Raises:
        VerificationError: if a side has no class that generates.
    """
    module, rewritten = (
        loaded_sides.load(loaded_sides.locate(original)),
        loaded_sides.load(loaded_sides.locate(Path(package))),
    )
    main = find_subjects(module, rewritten).main
    if not main.causal:
        raise VerificationError(f"{main.name} does not generate text, which is what ranks are verified with.")
    runtime_part(str(main.rewritten.__module__.rpartition(".")[0]), "tensor_parallel/ranks")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if given.device != "cpu" else "cpu"
    done = []
    for experts in (False, True) if deals_experts(main.original.config_class) else (False,):
        arguments = (main.original, main.rewritten, given.weights, device, given.dtype, given.seed)
        for check in Dealt(*arguments, experts=experts).checks():
            say(check)
            done.append(check)
        gc.collect()
    return done


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    made = argparse.ArgumentParser(prog="python -m rewrite.verify.tensor_parallel_checks", description=__doc__)
    made.add_argument("package")
    made.add_argument("--original", required=True)
    made.add_argument("--weights")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float64")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path)
    given = made.parse_args()
    gpu = given.device != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else None
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device)
    checks = run(given.package, given.original, given, lambda check: None)
    if dist.get_rank() == 0 and given.json is not None:
        given.json.write_text(json.dumps([check.to_json() for check in checks]), encoding="utf-8")
    gc.collect()  # the models, with graphs that hold on to what is destroyed now
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
