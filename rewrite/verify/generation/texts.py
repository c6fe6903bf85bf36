"""Gate 4: greedy generation, where a different token is forgiven only at a near-tie, and seeded sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import asked_with, given_back

from ..calls.approximate import step_by_step
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import Batch, prompt, seed_all
from ..models.model_pair import Workbench, on_original

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Generated:
    """`tokens` [batch, new] and the `logits` [batch, new, vocab] they were chosen from."""

    tokens: Tensor
    logits: Tensor


def size(bench: Workbench) -> tuple[int, int]:
    """How many prompts and new tokens: 64 × 256 on a GPU."""
    if bench.options.device != "cpu":
        return (8, 64) if bench.options.quick else (64, 256)
    return (8, 16) if bench.options.quick else (8, 32)


def generation_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """Greedy with dynamic and static cache, with an end token, in a package's own loop, sampled, and with beams."""
    dtypes = ["float32"] if bench.options.quick else ["float32", bench.options.dtype]
    for dtype in dtypes:
        for cache in ("dynamic", "static"):
            yield CheckRun(
                f"greedy, {dtype}, {cache} cache",
                partial(_greedy, bench, variant, dtype, cache),
            )
    yield CheckRun("greedy, one prompt, an end token", lambda: _ended(bench, variant))
    if not bench.options.quick:
        for name, arguments in WAYS.items():
            yield CheckRun(name, partial(_same, bench, variant, name, arguments))
        yield CheckRun("a conversation goes on with the cache", partial(_continued, bench, variant))
        yield CheckRun("a streamer gets every token", partial(_streamed, bench, variant))


WAYS: dict[str, dict[str, Any]] = {
    "sampling with a fixed seed": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "beam search": {"num_beams": 2, "do_sample": False},
    "greedy with logits processors": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def generate(model: Any, batch: Batch, new: int, seed: int, **arguments: Any) -> Generated:
    """Generate from a prompt, keeping the logits of every step."""
    import torch

    seed_all(seed)
    mask = batch.mask if batch.mask is not None else torch.ones_like(batch.input_ids)
    keep = batch.input_ids.clone()
    with torch.no_grad():
        output = model.generate(
            batch.input_ids,
            attention_mask=mask,
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            **arguments,
        )
    if not torch.equal(keep, batch.input_ids):
        raise Mismatch("generate() changed the prompt in place")
    logits = torch.stack(output.logits, 1) if output.logits else torch.empty(0)
    return Generated(output.sequences[:, batch.input_ids.shape[1] :], logits)


def _batch(bench: Workbench, variant: Variant, rows: int, name: str) -> Batch:
    padded = "left" if rows > 1 and bench.subject.accepts("attention_mask") else "none"
    return prompt(bench.seed_for("generate", name), variant.vocab_size, rows, 24, padded, bench.options.device)  # type: ignore[arg-type]


def _greedy(bench: Workbench, variant: Variant, dtype: str, cache: str) -> Mapping[str, Figure]:
    rows, new = size(bench)
    pair = bench.pair(variant, bench.implementations()[0], dtype)
    batch = _batch(bench, variant, rows, f"{dtype} {cache}")
    arguments: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    if cache == "static":
        arguments["cache_implementation"] = "static"
    original = on_original(generate, pair.original, batch, new, 0, **arguments)
    rewritten = generate(pair.rewritten, batch, new, 0, **arguments)
    noise = on_original(noise_of, bench, variant, dtype, batch, original)
    return near_tie(original, rewritten, noise)


def noise_of(bench: Workbench, variant: Variant, dtype: str, batch: Batch, generated: Generated) -> float:
    """The original's largest logit error against fp64, teacher-forced on what it generated."""
    import torch

    full = torch.cat([batch.input_ids, generated.tokens], 1)
    extra = torch.ones_like(generated.tokens)
    mask = torch.cat([batch.mask if batch.mask is not None else torch.ones_like(batch.input_ids), extra], 1)
    new = generated.tokens.shape[1]
    with torch.no_grad():
        model = bench.pair(variant, bench.implementations()[0], "float64").original
        if bench.rounding is not None:  # one token a sequence is rounded in another way than several
            truth = step_by_step(bench, model, full, mask, full.shape[1] - new)[:, :-1]
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            arguments = {"position_ids": positions} if bench.subject.accepts("position_ids") else {}
            truth = model(input_ids=full, attention_mask=mask, **arguments).logits[:, -new - 1 : -1]
    noise = (generated.logits.double() - truth.double()).abs()
    noise = noise[noise.isfinite().flatten(1).all(1)]  # eager attention in fp64 gives NaN for padded rows
    if not noise.numel():
        raise NotRun("the original's fp64 run is not finite for any row, so its noise is unknown")
    return float(noise.max())


def near_tie(original: Generated, rewritten: Generated, noise: float) -> dict[str, Figure]:
    """Compare tokens row by row up to the first difference, which must be a near-tie of the original.

    Raises:
        Mismatch: a token differs where the original's two best logits are further apart than the noise explains.
    """
    if original.tokens.shape != rewritten.tokens.shape:
        raise Mismatch(f"generated {list(rewritten.tokens.shape)} tokens, expected {list(original.tokens.shape)}")
    different = (original.tokens != rewritten.tokens).cpu()
    figures: dict[str, Figure] = {
        "rows": int(different.shape[0]),
        "tokens": int(different.numel()),
        "rows that diverge": int(different.any(1).sum()),
        "noise": noise,
    }
    for row in different.any(1).nonzero().flatten().tolist():
        step = int(different[row].int().argmax())
        top = original.logits[row, step].double().topk(2).values
        gap = float(top[0] - top[1])
        figures["largest gap"] = max(float(figures.get("largest gap", 0.0)), gap)
        if not gap <= bound("near tie") * noise:
            raise Mismatch(
                f"row {row}, token {step}: {int(rewritten.tokens[row, step])} instead of "
                f"{int(original.tokens[row, step])}, but the two best logits are {gap:.3g} apart, noise {noise:.2g}",
                figures,
            )
    return figures


def _ended(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Pick an end token that the original does produce, and see both stop and pad alike."""
    import torch

    pair = bench.pair(variant, bench.implementations()[0], "float32")
    batch = _batch(bench, variant, 3, "end")
    free = on_original(generate, pair.original, batch, 12, 0, do_sample=False)
    end = int(free.tokens[0, 5])
    arguments = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    original = on_original(generate, pair.original, batch, 12, 0, **arguments)
    rewritten = generate(pair.rewritten, batch, 12, 0, **arguments)
    if not torch.equal(original.tokens.cpu(), rewritten.tokens.cpu()):
        raise Mismatch(f"with end token {end}: {rewritten.tokens.tolist()} instead of {original.tokens.tolist()}")
    return {"rows": 3, "steps": int(original.tokens.shape[1])}


def _same(bench: Workbench, variant: Variant, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Figure]:
    """Equal tokens; where the logits are not bit-equal, a choice may rightly differ by rounding."""
    rows = 1 if "prompt_lookup_num_tokens" in arguments else 4
    batch = _batch(bench, variant, rows, name)
    return _equal(bench, variant, batch, lambda model: generate(model, batch, 16, 7, **arguments).tokens)


def _equal(bench: Workbench, variant: Variant, batch: Batch, run: Callable[[Any], Tensor]) -> Mapping[str, Figure]:
    import torch

    pair = bench.pair(variant, bench.implementations()[0], "float32")
    original, rewritten = on_original(run, pair.original), run(pair.rewritten)
    if not torch.equal(original, rewritten):
        first, second = (generate(model, batch, 4, 0, do_sample=False) for model in (pair.original, pair.rewritten))
        if not torch.equal(first.logits, second.logits):
            raise NotRun("the tokens differ, but so do the logits by rounding: nothing follows")
        raise Mismatch(f"{rewritten.tolist()} instead of {original.tolist()}")
    return {"tokens": int(original.numel())}


def _continued(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Generate, append a question, and generate again from the same cache."""
    import torch

    batch = _batch(bench, variant, 1, "first turn")
    question = _batch(bench, variant, 1, "second turn").input_ids[:, :5]

    def run(model: Any) -> Tensor:
        with torch.no_grad():
            settings = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 6}
            first = model.generate(batch.input_ids, attention_mask=torch.ones_like(batch.input_ids), **settings)
            turn = torch.cat([first.sequences, question], 1)
            mask = torch.ones_like(turn)
            again = model.generate(turn, attention_mask=mask, **{asked_with(model): given_back(first)}, **settings)
        sequences: Tensor = again.sequences
        return sequences

    return _equal(bench, variant, batch, run)


def _streamed(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    import torch

    batch = _batch(bench, variant, 1, "stream")

    def run(model: Any) -> Tensor:
        sink = Sink()
        tokens = generate(model, batch, 8, 0, do_sample=False, streamer=sink).tokens
        if not sink.ended or sink.tokens[-tokens.shape[1] :] != tokens[0].tolist():
            raise Mismatch(f"the streamer got {sink.tokens[-tokens.shape[1] :]}, generated were {tokens[0].tolist()}")
        return torch.tensor(sink.tokens)

    return _equal(bench, variant, batch, run)


class Sink:
    """Collects what a streamer is given, the prompt, then the tokens of each step, and acts whenever tokens arrive."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.tokens: list[int] = []
        self.act, self.times, self.ended = act, 0, False

    def put(self, value: Tensor) -> None:
        """Take tokens."""
        self.tokens += value.flatten().tolist()
        self.times += 1
        self.act()

    def end(self) -> None:
        """Remember that generation is over."""
        self.ended = True
