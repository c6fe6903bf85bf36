"""Every tolerance of the verifier, each with its reason. None is typed anywhere else, none is loosened in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A bound, what it is a multiple of, and why it is this large and no larger."""

    value: float
    unit: str
    reason: str


TABLE: dict[str, Tolerance] = {
    "fp64 max": Tolerance(
        2e-6,
        "largest error / largest magnitude of the expected tensor",
        "norms, softmax and RoPE round to fp32 inside (2^-24 = 6e-8), so summing them in another order moves a logit "
        "by a few 1e-7 through two to four layers; dropping eps = 1e-3, a bias or a mask row makes 1e-4 or more. "
        "A model that multiplies such roundings may differ by as much as two runs of it, by 'fp64 roundings'",
    ),
    "fp64 rms": Tolerance(
        4e-7,
        "RMS error / RMS of the expected tensor",
        "fp32 roundings inside norms are independent, so their RMS stays near 1e-7; where it does not, the original "
        "without its roundings to fp32 is the truth, and 'fp64 roundings' holds",
    ),
    "fp64 roundings": Tolerance(
        2.0,
        "RMS error of the original from its own roundings to fp32, in that tensor: at most this, at least one by it; "
        "its largest error: at most this",
        "a norm's sum in another order moves a whole row by one factor, so one tensor is a sample of a few rows: the "
        "original itself came out between 3.8e-7 and 4.6e-7 as its memory lay, with the same sums in another order at "
        "5.8e-7",
    ),
    "roundings of a norm": Tolerance(
        1.15,
        "RMS error of the original's norm against fp64 in 16 bits, over 256 rows: at most this, at least one by it",
        "one rounding more or less changes the RMS error by a factor of 1.41, in another order of the sum the error "
        "of 16,384 values stays within 1%",
    ),
    "keys bit by bit": Tolerance(
        0.9,
        "share of the keys of a step in 16 bits on a CPU that are the original's: at least this",
        "all are, where one rounding of the rotation is left out 81%; sums in another order change one of a hundred "
        "at most",
    ),
    "gradient zero": Tolerance(
        1e-12,
        "largest gradient of the parameter / largest of the model",
        "a gradient that is zero in exact arithmetic (a router normalised over one expert) is what "
        "fp64 roundings leave, 1e-15; a relative error of it means nothing",
    ),
    "fp32 max": Tolerance(
        5e-5,
        "largest error / largest magnitude of the expected tensor",
        "used where the original's fp64 run is not finite (eager attention casts fp64's lowest value to fp32 for rows "
        "of padding): fp32 sums of 64 to 128 terms in another order are off by a few 1e-6",
    ),
    "gradient max": Tolerance(
        2e-5,
        "largest error / largest magnitude of that parameter's gradient",
        "gradients pass every fp32 rounding twice and cancel more than logits do: ten times the forward bound. "
        "Where the original's own roundings to fp32 make more, by 'fp64 roundings'",
    ),
    "gradient roundings": Tolerance(
        5e-4,
        "largest error / largest magnitude of that parameter's gradient",
        "no error beyond this is explained by the original's own: its roundings to fp32 made 6.3e-5 of a decay's "
        "gradient (Lara mini's A_log, where a rewritten gradient is 5.4e-5 from the truth and 2.6e-5 from the "
        "original's)",
    ),
    "yardstick max": Tolerance(
        2.0,
        "the original's own largest error against its fp64 run, over all outputs of one kind",
        "FlashAttention's rule: two correct roundings of one result differ by at most the sum of both errors",
    ),
    "yardstick rms": Tolerance(
        1.25,
        "the original's own RMS error against its fp64 run, over all outputs of one kind",
        "an independent rounding order has the same RMS error; a quarter covers samples of a few thousand values",
    ),
    "yardstick max floor": Tolerance(
        1.0,
        "eps of the dtype × largest magnitude of the expected tensor",
        "the output itself is rounded once, and the original may be exact by luck",
    ),
    "yardstick rms floor": Tolerance(
        0.25,
        "eps of the dtype × RMS of the expected tensor",
        "a uniform rounding error has RMS eps/sqrt(12) = 0.29 eps at the top of a binade",
    ),
    "plainly beyond": Tolerance(
        2.0,
        "the bounds of the yardstick, of the errors of the first four draws of inputs",
        "over four draws two equally good roundings of an attention whose weights are nearly one-hot came out between "
        "0.83 and 1.03 times each other: twice the bound is no chance, and the other draws are spared",
    ),
    "routed tokens": Tolerance(
        0.1,
        "share of the tokens left out at each side in low precision when the model routes tokens to experts",
        "a rounding flips the choice between two near-equal experts, which moves that token at once; fp64 keeps all",
    ),
    "near tie": Tolerance(
        2.0,
        "the original's largest logit error in that dtype",
        "both sides may move each of two logits by that noise, so a smaller gap can change the greedy token",
    ),
    "near ties taken": Tolerance(
        2.0,
        "tokens at which the original, fed the same tokens at once, would have chosen another",
        "where logits are flat a choice is a near-tie every few tokens; an independent rounding order flips as many "
        "of them as the original's own two orders do, twice that is a larger error than rounding",
    ),
    "slower": Tolerance(
        0.02,
        "share of the original's time",
        "the same file measured against itself comes out up to 2% apart, interleaved, on one GPU",
    ),
    "kl mean": Tolerance(
        1.0,
        "mean KL(fp32 original || low-precision original)",
        "the rewrite may move the model no more than the low precision already did",
    ),
    "kl 99.9%": Tolerance(2.0, "the same at the 99.9% quantile", "a tail quantile of few tokens is noisy"),
    "approximate kl": Tolerance(
        1.25,
        "mean KL(fp64 original || original rounded by plain torch)",
        "a package that rounds on request may move the model as far as the same rounding in plain torch does; the "
        "order of sums decides a few roundings to 8 bits differently, a quarter covers samples of a few hundred "
        "tokens; the products themselves are held to the bounds above, against the original rounded so",
    ),
    "approximate kl floor": Tolerance(
        1e-6, "nats", "where the rounding is exact by luck, what fp32 sums in another order leave"
    ),
    "top-1 agreement": Tolerance(
        0.001, "share of tokens", "8 of 8,000 tokens: near-ties that either rounding may break the other way"
    ),
    "perplexity": Tolerance(0.0005, "relative", "below what two runs of a bf16 model on two GPUs differ by"),
}


def bound(name: str) -> float:
    """The value of a tolerance by its name in the table."""
    return TABLE[name].value
