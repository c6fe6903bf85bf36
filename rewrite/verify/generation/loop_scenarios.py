"""Gate 4, the decode loop of every class that has one: texts, states, an encoder's output, images.

Each side is asked the same, one call after another on one model: tokens, the logits of every step and what the cache
holds afterwards are compared. In fp64; in fp32 where the original does not generate in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import asked_with, given_back

from ..calls.caches import own_cache_class
from ..calls.observed import everything
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, Observations, about, near_exact
from ..judging.fp32_free_reference import Roundings, roundings, unrounded
from ..judging.low_precision_bound import FEW_DRAWS
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import seed_all
from ..models.model_pair import Pair, Workbench, on_original
from .loop_checks import SWITCH, Package, loop_pair, needless
from .prompts import Arguments, Ask, asked, in_prompts, pictured, with_image_tokens
from .texts import Generated, Sink, near_tie

if TYPE_CHECKING:
    from torch import Tensor

NEW, MORE, END = 11, 6, 5
"""Tokens of a generation, of one that goes on with a cache, and where a row ends by itself: inside of a chunk."""
FLAT = 30.0
"""A temperature at which a model says something else at every token, however sure it is."""


def talk_checks(bench: Workbench, of: str = "") -> Iterator[CheckRun]:
    """The checks of a class that has a decode loop, none for one that has not; `of` goes into their names."""
    if not hasattr(bench.subject.rewritten, SWITCH):
        return
    talk = Session(bench, bench.base)
    for name, run in SCENARIOS.items():
        yield CheckRun(f"decode loop{of}, {name}", partial(talk.about, run))
    for variant in bench.variants[1:] if not (of or bench.options.quick) else ():
        other = Session(bench, variant)
        yield CheckRun(f"decode loop, a cache that came back, {variant.name}", partial(other.about, _continued))
    encodes = bench.subject.accepts("decoder_input_ids")
    if bench.goes_on:
        yield CheckRun(f"decode loop{of}, a new cache of the caller's", partial(talk.about, _own_cache))
    if encodes:
        yield CheckRun(f"decode loop{of}, a text behind an encoder that has begun", partial(talk.about, _begun))
    bench.record.prompted(bench.subject.name, "text" if not encodes else "an encoder's input", False)
    kinds = in_prompts(bench.subject.original)
    for kind in kinds:
        bench.record.prompted(bench.subject.name, kind, False)
    if "images" in kinds:
        pictures = Session(bench, with_image_tokens(bench.base))
        yield CheckRun(f"decode loop{of}, images in the prompt", partial(pictures.about, _pictured))


def talk_alone(bench: Workbench) -> dict[str, Figure]:
    """All of them as one check, with what was not run among the figures.

    Raises:
        Mismatch: one of them differs.
    """
    figures: dict[str, Figure] = {}
    for check in talk_checks(bench):
        try:
            with about(check.name):
                figures[check.name] = int(check.run().get("calls", 1))
        except NotRun as reason:
            figures[check.name] = f"not run: {reason}"
    return figures


@dataclass(frozen=True)
class Reply:
    """What a side answered.

    `sequences` `[B, n]` with the prompt, `logits` and `scores` `[B, new, V]` of every new token, the cache that came
    back, the names of all that came, and where the random generator stands.
    """

    sequences: Tensor
    logits: Tensor
    scores: Tensor
    cache: Any
    names: str
    random: Tensor

    @property
    def new(self) -> Tensor:
        """The tokens that were generated, `[B, new]`."""
        return self.sequences[:, self.sequences.shape[1] - self.logits.shape[1] :]


def say(model: Any, arguments: Mapping[str, Any], new: int, **settings: Any) -> Reply:
    """Generate from copies of the arguments; a cache among them is used as it is."""
    import torch

    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    seed_all(11)
    asked_for = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
        "pad_token_id": 0,
        "do_sample": False,
        "use_cache": True,
    }
    with torch.no_grad():
        out = model.generate(**given, max_new_tokens=new, disable_compile=True, **{**asked_for, **settings})
    cache = given_back(out)
    random = torch.cuda.get_rng_state() if out.sequences.is_cuda else torch.get_rng_state()
    names = f"{type(out).__name__} of {', '.join(out)}"
    return Reply(out.sequences, torch.stack(out.logits, 1), torch.stack(out.scores, 1), cache, names, random)


@dataclass
class Session:
    """One pair of models of a class, asked one thing after another."""

    bench: Workbench
    variant: Variant
    dtype: str = ""
    calls: int = 0
    _pair: Pair | None = None
    _package: Package | None = None
    _figures: dict[str, Figure] = field(default_factory=dict)
    _draw: int = 0
    """The number of the prompts: those after the first are asked only where roundings have to be told from faults."""
    _compared: list[tuple[Observations, Observations]] = field(default_factory=list)
    """What the original and the rewritten model answered in a check so far, each time that they were compared."""

    @property
    def pair(self) -> Pair:
        """The models, in the largest precision in which the original generates.

        Raises:
            NotRun: in none.
        """
        if self._pair is None:
            self.dtype, self._pair = self._first_that_talks()
        return self._pair

    def _first_that_talks(self) -> tuple[str, Pair]:
        problem: NotRun | None = None
        for dtype in ("float64", "float32"):
            pair = loop_pair(self.bench, self.variant, dtype)
            first = self.ask(Ask("first", 2, 9, padded=True), pair)
            try:
                heard = on_original(say, pair.original, first, 3)
            except NotRun as reason:
                problem = problem or reason
                continue
            if bool(heard.logits.isfinite().all()):
                # BigBird makes other layers in its first call, which draws numbers: now both sides have. One token
                # alone is left to transformers' loop.
                say(pair.rewritten, first, 1)
                return dtype, pair
        raise problem or NotRun("the original's logits are not finite")

    def ask(self, ask: Ask, pair: Pair | None = None) -> Arguments:
        """The arguments of a prompt without images."""
        if self._draw:
            ask = replace(ask, name=f"{ask.name}, draw {self._draw}")
        return asked(self.bench, self.variant, (pair or self.pair).original, ask)

    def answers(
        self, first: Mapping[str, Any], second: Mapping[str, Any] | None = None, new: int = NEW, **settings: Any
    ) -> tuple[Reply, Reply]:
        """What both sides answer, which has to be the same; `second` is asked of the rewritten one.

        Raises:
            NotRun: the original cannot, or the package's loop was not taken.
            Mismatch: they differ in a token, in logits, or in what the cache holds.
        """
        pair = self.pair
        self._package = self._package or Package.of(self.bench.subject.rewritten)
        original = on_original(say, pair.original, first, new, **settings)
        try:
            with self._package.taken(pair.rewritten):
                rewritten = say(pair.rewritten, first if second is None else second, new, **settings)
        except NotRun as reason:
            if second is None:
                needless(self.bench, pair.original, lambda model: say(model, first, new, **settings), reason)
            raise
        self.calls += 1
        self.judge(original, rewritten, bool(settings.get("do_sample")))
        return original, rewritten

    def judge(self, original: Reply, rewritten: Reply, drawn: bool = False) -> None:
        """Raise `Mismatch` unless both answered the same."""
        import torch

        maximum = "fp64 max" if self.dtype == "float64" else "fp32 max"
        if original.names != rewritten.names:
            raise Mismatch(f"{rewritten.names} came back, not {original.names}")
        if drawn and not torch.equal(original.sequences, rewritten.sequences):
            raise Mismatch(f"drew {rewritten.new.tolist()} instead of {original.new.tolist()}")
        noise = float(original.logits.abs().max()) * bound(maximum)
        found = near_tie(Generated(original.new, original.logits), Generated(rewritten.new, rewritten.logits), noise)
        if found["rows that diverge"]:  # a tie: what follows is another text
            self._figures["near ties"] = int(self._figures.get("near ties", 0)) + 1
            return
        if not torch.equal(original.random, rewritten.random):
            raise Mismatch("the random generator stands elsewhere after the call")
        expected, got = (
            {"logits": side.logits, "scores": side.scores} | everything(side.cache, "cache")
            for side in (original, rewritten)
        )
        self._compared.append((_kept(expected), _kept(got)))
        if self._draw:
            return
        found = near_exact(expected, got, maximum)
        self._figures["max"] = max(float(self._figures.get("max", 0.0)), float(found["max"]))
        self._figures["bound"] = bound(maximum)

    def about(self, run: Callable[[Session], None]) -> Mapping[str, Figure]:
        """The figures of all calls of a check.

        A model that computes in fp32 in every dtype (GPT-Neo's attention) is asked anew without that where it differs
        by no more than its own roundings make.
        """
        self._begin({})
        try:
            run(self)
        except Mismatch as mismatch:
            if self.dtype != "float64" or "rms" not in mismatch.figures:
                raise
            self._without_roundings(run, mismatch)
        self.bench.record.prompted(self.bench.subject.name, self._kind, True)
        return {"calls": self.calls, "in": self.dtype, **self._figures}

    def _begin(self, figures: dict[str, Figure]) -> None:
        self.calls, self._figures, self._compared = 0, figures, []

    def _without_roundings(self, run: Callable[[Session], None], mismatch: Mismatch) -> None:
        """Run a check that failed without roundings to fp32, in which both sides have to agree in every call.

        What it failed by is judged by the comparison that failed, of these prompts and, where that is more than the
        original's own roundings make, of others: one text is a sample of a few tokens. Each run has new models, since
        graphs replay what was captured with them.

        Raises:
            Mismatch: there is more than roundings between the two sides.
        """
        number = len(self._compared) - 1
        expected, found = self._compared[number]
        truth = self._unrounded(run, number)
        errors = roundings(expected, found, truth) if truth is not None else None
        figures = self._figures
        while errors is not None and not errors.alone and self._draw + 1 < FEW_DRAWS:
            self._draw += 1
            try:
                errors += self._drawn(run, number, errors.names)
            except NotRun:
                continue
        self._draw, self._figures, self._pair = 0, figures, None
        if errors is None or not errors.alone:
            raise Mismatch(f"{mismatch}; {errors or 'no roundings make that'}", mismatch.figures) from mismatch

    def _unrounded(self, run: Callable[[Session], None], number: int) -> Observations | None:
        """What the original answers without roundings to fp32 in the comparison of that number, if it comes to it."""
        self._pair = None
        self._begin({"without roundings to fp32": 1})
        with unrounded():
            run(self)
        self._pair = None
        return self._compared[number][0] if number < len(self._compared) else None

    def _drawn(self, run: Callable[[Session], None], number: int, names: Collection[str]) -> Roundings:
        """The errors of some outputs in the comparison of that number, on other prompts.

        Raises:
            NotRun: there is none with them, or one side says another text.
        """
        self._pair = None
        self._begin({})
        run(self)
        compared = self._compared[number] if number < len(self._compared) else None
        truth = self._unrounded(run, number)
        errors = roundings(*compared, truth, names) if compared is not None and truth is not None else None
        if errors is None:
            raise NotRun("other prompts lead to another text")
        return errors

    @property
    def _kind(self) -> str:
        if self.variant.name.endswith(", images"):
            return "images"
        return "an encoder's input" if self.bench.subject.accepts("decoder_input_ids") else "text"


def _kept(outputs: Observations) -> Observations:
    """Outputs as they are now: a conversation that goes on writes into its cache."""
    return {name: tensor.clone() for name, tensor in outputs.items()}


def _one(talk: Session) -> None:
    """One row without padding, for several chunks."""
    talk.answers(talk.ask(Ask("one", 1, 9)))


def _padded(talk: Session) -> None:
    """Rows of unequal length, of which one ends by itself inside of a chunk, or at once."""
    arguments = talk.ask(Ask("padded", 3, 13, padded=True))
    settings = ending(talk, arguments)
    heard, _ = talk.answers(arguments, **settings)
    first = heard.new[:, 0].tolist()
    if first[0] not in first[1:]:
        talk.answers(arguments, **{**settings, "eos_token_id": first[0]})


def ending(talk: Session, arguments: Arguments) -> dict[str, Any]:
    """How to generate so that the first row ends by itself inside of a chunk; by draws where it repeats itself.

    Raises:
        NotRun: the row says the same all the time.
    """
    for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": FLAT}):
        free, _ = talk.answers(arguments, **settings)
        said = free.new[0].tolist()
        found = next((place for place in (END, END + 1, END + 2, 2, 3) if said.index(said[place]) == place), None)
        if found is not None:
            return {**settings, "eos_token_id": int(said[found])}
    raise NotRun("no token comes up for the first time inside of a chunk")


def _sampled(talk: Session) -> None:
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    if not talk.pair.original.config.is_encoder_decoder:
        settings["top_p"] = 0.95
    talk.answers(talk.ask(Ask("sampled", 3, 10, padded=True)), **settings)


def _again(talk: Session) -> None:
    """A text, another one of its shape, a longer one, and the first again; rows with padding between."""
    asks = [Ask("again", 2, 9), Ask("other", 2, 9), Ask("longer", 2, 14), Ask("padding", 2, 9, padded=True)]
    for number in (0, 1, 2, 0, 3, 1):
        talk.answers(talk.ask(asks[number]))


def _continued(talk: Session) -> None:
    """A conversation: the cache that came back is handed over with more text, twice."""
    arguments = talk.ask(Ask("continued", 2, 9, padded=True))
    heard = talk.answers(arguments, new=MORE)
    for turn in range(2):
        arguments, heard = go_on(talk, arguments, heard, turn)


def _ended(talk: Session) -> None:
    """A conversation that goes on where a text ended by itself, inside of a chunk."""
    arguments = talk.ask(Ask("ended", 1, 9))
    heard = talk.answers(arguments, **ending(talk, arguments))
    go_on(talk, arguments, heard, 0)


def go_on(talk: Session, arguments: Arguments, heard: tuple[Reply, Reply], turn: int) -> tuple[Arguments, Any]:
    """Say something more to what came back."""
    import torch

    if any(side.cache is None for side in heard):
        raise NotRun("no cache comes back")
    more = talk.ask(Ask(f"turn {turn}", len(heard[0].sequences), 5))
    encodes = talk.pair.original.config.is_encoder_decoder
    given = dict(arguments)
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"):
        given.pop(name, None) if not encodes else None
    question = more.get("input_ids", heard[0].sequences[:, -1:])[:, -3:]
    ids = torch.cat([heard[0].sequences, question.clamp(min=4)], 1)
    given["decoder_input_ids" if encodes else "input_ids"] = ids
    if "attention_mask" in given and not encodes:
        mask = given["attention_mask"]
        given["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    takes = asked_with(talk.pair.original)
    first, second = ({**given, takes: side.cache} for side in heard)
    return given, talk.answers(first, second, new=MORE)


def _own_cache(talk: Session) -> None:
    """An empty cache that was made without the configuration: it keeps every token, whatever the layers look at."""
    from transformers import DynamicCache

    arguments = talk.ask(Ask("own cache", 2, 13, padded=True))
    models = talk.pair.original, talk.pair.rewritten
    made = [(own_cache_class(model) or DynamicCache)() for model in models]
    first, second = ({**arguments, asked_with(talk.pair.original): cache} for cache in made)
    talk.answers(first, second, new=MORE)


def _streamed(talk: Session) -> None:
    """A streamer gets every token of a row that ends by itself, and the end."""
    arguments = talk.ask(Ask("streamed", 1, 10))
    settings = ending(talk, arguments)
    sinks = Sink(), Sink()
    original = on_original(say, talk.pair.original, arguments, NEW, **settings, streamer=sinks[0])
    package = Package.of(talk.bench.subject.rewritten)
    with package.taken(talk.pair.rewritten):
        rewritten = say(talk.pair.rewritten, arguments, NEW, **settings, streamer=sinks[1])
    if sinks[0].tokens != sinks[1].tokens or not sinks[1].ended:
        raise Mismatch(f"the streamer got {sinks[1].tokens}, not {sinks[0].tokens}")
    talk.judge(original, rewritten)


def _by_the_host(talk: Session) -> None:
    """Tokens that a processor and a criterion of the caller's choose, and a single one."""
    arguments = talk.ask(Ask("by the host", 2, 9, padded=True))
    talk.answers(arguments, logits_processor=[_others], stopping_criteria=[_no_end])
    talk.answers(arguments, new=1)


def _beams(talk: Session) -> None:
    """A search with beams."""
    arguments = talk.ask(Ask("beams", 2, 9, padded=True))
    beams: dict[str, Any] = {"num_beams": 3, "output_logits": False, "output_scores": True}
    package = Package.of(talk.bench.subject.rewritten)
    original = on_original(_searched, talk.pair.original, arguments, beams)
    with package.taken(talk.pair.rewritten):
        rewritten = _searched(talk.pair.rewritten, arguments, beams)
    if not rewritten[0].equal(original[0]):
        allowed = bound("fp64 max" if talk.dtype == "float64" else "fp32 max") * float(original[1].abs().max())
        if not rewritten[0].shape == original[0].shape or float((rewritten[1] - original[1]).abs().max()) > allowed:
            raise Mismatch(f"beams found {rewritten[0].tolist()}, not {original[0].tolist()}")


def _others(ids: Tensor, scores: Tensor) -> Tensor:
    """Make the last token of each row unlikely."""
    return scores.scatter_add(1, ids[:, -1:], scores.new_full((len(ids), 1), -FLAT))


def _no_end(ids: Tensor, _: Any, **__: Any) -> Tensor:
    """End no row."""
    return ids[:, 0] < 0


def _searched(model: Any, arguments: Arguments, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the texts that a search with beams finds, and their scores."""
    import torch

    seed_all(11)
    asked_for = {"return_dict_in_generate": True, "pad_token_id": 0, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        out = model.generate(**arguments, max_new_tokens=MORE, disable_compile=True, **asked_for, **settings)
    return out.sequences, out.sequences_scores


def _begun(talk: Session) -> None:
    """The text behind an encoder begins with tokens of the caller's, once with fewer and once with more."""
    for decoder in (3, 5, 3):
        talk.answers(talk.ask(Ask(f"begun {decoder}", 2, 9, padded=True, decoder=decoder)))


def _pictured(talk: Session) -> None:
    """Images: of one shape, others of that shape, of another, of several; and text that goes on behind one."""
    bench, model = talk.bench, talk.pair.original
    shapes = {"a": ((2, 2),), "b": ((2, 2),), "c": ((1, 3),), "d": ((2, 1), (2, 2), (2, 1))}
    kinds = {
        name: pictured(bench, talk.variant, model, Ask(f"image {name}", 2, 8, name != "b"), sides)
        for name, sides in shapes.items()
    }
    for name in shapes:
        heard = talk.answers(kinds[name])
    talk.answers(talk.ask(Ask("text between", 2, 9)))
    heard = talk.answers(kinds["a"], new=MORE)
    go_on(talk, kinds["a"], heard, 0)


SCENARIOS: dict[str, Callable[[Session], None]] = {
    "a row": _one,
    "rows with padding, one ends": _padded,
    "draws": _sampled,
    "calls one after another": _again,
    "a cache that came back": _continued,
    "a cache of a text that ended": _ended,
    "tokens streamed": _streamed,
    "tokens that the host chooses": _by_the_host,
    "beams": _beams,
}
