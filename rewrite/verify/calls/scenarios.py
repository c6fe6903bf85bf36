"""What a model is asked to compute: each scenario runs one model and returns the tensors to compare.

A scenario must not depend on which side runs it. Outputs at padded positions are left out: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..judging.compare import Mismatch, NotRun
from ..models.configs import WINDOW
from ..models.inputs import Batch, prefix_mask, prompt, tokens

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.subjects import Subject

Outputs = dict[str, "Tensor"]


@dataclass(frozen=True)
class Setting:
    """What a scenario may know: the class, the vocabulary, the device and a seed for its inputs."""

    subject: Subject
    vocab: int
    device: str
    seed: int

    def prompt(self, batch: int, length: int, padding: Any = "none") -> Batch:
        """A fresh prompt of this setting."""
        return prompt(self.seed, self.vocab, batch, length, padding, self.device)

    def tokens(self, salt: int, batch: int, length: int) -> Tensor:
        """Fresh tokens that continue a prompt."""
        return tokens(self.seed + salt, self.vocab, batch, length, self.device)


@dataclass(frozen=True)
class Scenario:
    """A named computation; `needs` are `forward` arguments, `eager_only` pins the attention implementation.

    `own_pair`: transformers leaves hooks on a model that was asked for hidden states, which sends fused code down its
    fallback ever after, so such a scenario gets models of its own.
    """

    name: str
    run: Callable[[Any, Setting], Outputs]
    needs: tuple[str, ...] = ()
    eager_only: bool = False
    causal_only: bool = False
    essential: bool = False
    own_pair: bool = False


def call(model: Any, setting: Setting, batch: Batch, **arguments: Any) -> Any:
    """Call a model on a prompt, and check that it left the prompt alone."""
    keep = batch.input_ids.clone()
    if batch.mask is not None:
        arguments["attention_mask"] = batch.mask
        if setting.subject.accepts("position_ids"):
            arguments["position_ids"] = batch.position_ids
    result = model(input_ids=batch.input_ids, **arguments)
    if not bool((keep == batch.input_ids).all()):
        raise Mismatch("input_ids were changed in place")
    return result


def main_output(result: Any) -> Tensor:
    """The logits, or the last hidden state of a model without a head."""
    for name in ("logits", "last_hidden_state", "prediction_logits", "start_logits"):
        tensor: Tensor | None = getattr(result, name, None)
        if tensor is not None:
            return tensor
    raise NotRun(f"{type(result).__name__} has neither logits nor a hidden state")


def real(output: Tensor, batch: Batch) -> Tensor:
    """The output rows [tokens, width] that are not padding, or all of an output that has no token axis."""
    return output[batch.real] if output.shape[:2] == batch.input_ids.shape else output


def _prefill(batch: int, length: int, padding: str) -> Callable[[Any, Setting], Outputs]:
    def run(model: Any, setting: Setting) -> Outputs:
        inputs = setting.prompt(batch, length, padding)
        return {"logits": real(main_output(call(model, setting, inputs)), inputs)}

    return run


def _positions(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(2, 9)
    shifted = inputs.position_ids * 2 + 5
    return {"logits": main_output(model(input_ids=inputs.input_ids, position_ids=shifted))}


def _embeddings(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(2, 9)
    embedded = model.get_input_embeddings()(inputs.input_ids).detach()
    keep = embedded.clone()
    output = main_output(model(inputs_embeds=embedded))
    if not bool((keep == embedded).all()):
        raise Mismatch("inputs_embeds were changed in place")
    return {"logits": output}


def _prefix(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(2, 12)
    mask = prefix_mask(2, 12, 5, model.dtype, setting.device)
    keep = mask.clone()
    output = main_output(model(input_ids=inputs.input_ids, attention_mask=mask))
    if not bool((keep == mask).all()):
        raise Mismatch("the attention mask was changed in place")
    return {"logits": output}


def _hidden_states(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(2, 3 * WINDOW, "left")
    result = call(model, setting, inputs, output_hidden_states=True)
    outputs = {f"hidden_states[{i}]": real(state, inputs) for i, state in enumerate(result.hidden_states or ())}
    return outputs | {"logits": real(main_output(result), inputs)}


def _attentions(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(2, 2 * WINDOW)
    result = call(model, setting, inputs, output_attentions=True)
    maps = [weights for weights in result.attentions or () if weights is not None]
    return {f"attentions[{i}]": weights for i, weights in enumerate(maps)} | {"logits": main_output(result)}


def _loss(model: Any, setting: Setting) -> Outputs:
    inputs = setting.prompt(3, 14, "right")
    labels = inputs.input_ids.masked_fill(~inputs.real, -100)
    result = call(model, setting, inputs, labels=labels)
    return {"loss": result.loss.reshape(1), "logits": real(main_output(result), inputs)}


def _last_logits(model: Any, setting: Setting) -> Outputs:
    return {"logits": call(model, setting, setting.prompt(2, 11), logits_to_keep=2).logits}


def _tuple(model: Any, setting: Setting) -> Outputs:
    import torch

    result = call(model, setting, setting.prompt(2, 7), return_dict=False)
    return {str(i): value for i, value in enumerate(result) if isinstance(value, torch.Tensor)}


def _held(model: Any, setting: Setting) -> Outputs:
    first = main_output(call(model, setting, setting.prompt(2, 9)))
    keep = first.clone()
    other = Batch(setting.tokens(1, 2, 9), None, setting.prompt(2, 9).position_ids)
    second = main_output(call(model, setting, other))
    if not bool(((first == keep) | keep.isnan()).all()):
        raise Mismatch("the first call's output was overwritten by the second call")
    return {"first": first, "second": second}


FORWARD: tuple[Scenario, ...] = (
    Scenario("prefill, batch 1", _prefill(1, 11, "none"), essential=True),
    Scenario("prefill, one token", _prefill(1, 1, "none")),
    Scenario("prefill, batch 3, beyond the window", _prefill(3, 3 * WINDOW, "none")),
    Scenario("prefill, left padding", _prefill(3, 2 * WINDOW + 1, "left"), needs=("attention_mask",)),
    Scenario("prefill, right padding", _prefill(3, 2 * WINDOW + 1, "right"), needs=("attention_mask",)),
    Scenario("prefill, 4-D prefix mask", _prefix, needs=("attention_mask",)),
    Scenario("explicit positions", _positions, needs=("position_ids",)),
    Scenario("inputs_embeds", _embeddings, needs=("inputs_embeds",)),
    Scenario("hidden states of every layer", _hidden_states, own_pair=True),
    Scenario("attention weights", _attentions, eager_only=True, own_pair=True),
    Scenario("labels and loss", _loss, needs=("labels", "attention_mask"), causal_only=True),
    Scenario("logits_to_keep", _last_logits, needs=("logits_to_keep",)),
    Scenario("tuple output", _tuple),
    Scenario("outputs survive the next call", _held),
)
