"""`generate()` through the decode graph of models with states, encoders and inputs of their own.

Compared with the original loop.
Each is a small model of transformers' with the loop in front of it; none of its code is rewritten.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from transformers import BarkSemanticConfig, EncoderDecoderCache
from transformers.models.bark.generation_configuration_bark import BarkSemanticGenerationConfig

from hf_rewrite_runtime.cache import states
from hf_rewrite_runtime.cache.cache_argument import asked_with, given_back
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode import eligibility, graph_cache
from hf_rewrite_runtime.decode.device_length import StepLength
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.decode.step_buffers import UnknownCache
from hf_rewrite_runtime.decode.step_call import StepCall
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.generate import call_graphs
from hf_rewrite_runtime.generate.generation import GraphGeneration
from rewrite.verify.models.configs import small_variants

if states.LAYER is None or not eligibility.can_watch():
    pytest.skip("this transformers has no layers of states, or a loop that cannot be watched", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
V, IMAGE = 97, 90
ENDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": V, "initializer_range": 0.3, **ENDS,
}  # fmt: skip
ENCODES = {"d_model": 32, "vocab_size": V, "decoder_start_token_id": 2, **ENDS}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 4, "image_size": 8}


def t5gemma():
    text = {**SIZES, "head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    kinds = [transformers.T5GemmaModuleConfig(**text) for _ in range(2)]
    return transformers.T5GemmaConfig(encoder=kinds[0], decoder=kinds[1], vocab_size=V, **ENDS)


def qwen_vl():
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [0]}  # fmt: skip
    ids = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **ENDS)


def llava():
    vision = transformers.CLIPVisionConfig(**VISION, num_hidden_layers=2, projection_dim=32)
    text = transformers.LlamaConfig(**SIZES)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, **ENDS)


MODELS = {
    "Lfm2ForCausalLM": lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "Mamba2ForCausalLM": lambda: transformers.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, vocab_size=V, num_heads=4, head_dim=16, state_size=8, n_groups=1,
        chunk_size=4, initializer_range=0.3, **ENDS,
    ),
    "FalconH1ForCausalLM": lambda: transformers.FalconH1Config(
        **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        d_kv=16, d_ff=48, num_layers=2, num_heads=2, initializer_factor=3.0, **ENCODES
    ),
    "BartForConditionalGeneration": lambda: transformers.BartConfig(
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=99, init_std=0.3, forced_eos_token_id=None, **ENCODES
    ),
    "GPTNeoForCausalLM": lambda: transformers.GPTNeoConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=6, max_position_embeddings=40, vocab_size=V, initializer_range=0.3, **ENDS,
    ),
    "ImageGPTForCausalImageModeling": lambda: transformers.ImageGPTConfig(
        n_embd=32, n_layer=2, n_head=2, n_positions=40, vocab_size=V + 1, initializer_range=0.3, **ENDS
    ),
    "T5GemmaForConditionalGeneration": t5gemma,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl,
    "LlavaForConditionalGeneration": llava,
}  # fmt: skip
WITH_WINDOW = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": V}
WITH_IMAGES = [name for name in MODELS if "VL" in name or "Llava" in name]


def pair(name, seed=0):
    """Return a model with the graph's loop and the original with the same weights."""
    original = getattr(transformers, name)
    ours = type(name, (GraphGeneration, original), {"_step_without_graph": not GPU})
    config = MODELS[name]()
    torch.manual_seed(seed)
    models = [kind(copy.deepcopy(config)).eval().to(DEVICE) for kind in (ours, original)]
    for parameter in models[0].parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    models[1].load_state_dict(models[0].state_dict())
    backend.reset_fallbacks()
    return models


def asked(model, rows=2, length=7, padded=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, IMAGE, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[0, -2:] = 0 if model.config.is_encoder_decoder else 1
        mask[0, :2] = 1 if model.config.is_encoder_decoder else 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def with_image(model, rows=2, seed=0, sides=(2, 2)):
    """A prompt with an image behind the second token of each row."""
    inputs, generator = asked(model, rows, padded=False, seed=seed), torch.Generator().manual_seed(seed)
    if "Llava" in type(model).__name__:
        count, more = 4, {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}
    else:
        grid, count = torch.tensor([[1, 2 * sides[0], 2 * sides[1]]] * rows), sides[0] * sides[1]
        patches = torch.randn(4 * count * rows, 3 * 2 * 4 * 4, generator=generator)
        more = {"pixel_values": patches, "image_grid_thw": grid}
    ids = inputs["input_ids"].cpu()
    ids = torch.cat([ids[:, :2], torch.full((rows, count), IMAGE), ids[:, 2:]], 1)
    if "image_grid_thw" in more:
        more["mm_token_type_ids"] = (ids == IMAGE).long()
    more |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: value.to(DEVICE) for name, value in more.items()}


def run(model, inputs, seed=5, **arguments):
    torch.manual_seed(seed)
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    settings = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**given, **settings | arguments)


def held(cache):
    """Every tensor of a cache."""
    if isinstance(cache, EncoderDecoderCache):
        return held(cache.self_attention_cache) + held(cache.cross_attention_cache)
    written = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [t for layer in written for t in (layer.keys, layer.values)] + states.tensors(cache.layers)


def same(ours, theirs, **arguments):
    (model, mine), (other, wanted) = ours, theirs
    first, second = run(model, mine, **arguments), run(other, wanted, **arguments)
    reasons = [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    assert reasons == []
    assert type(first) is type(second)
    assert torch.equal(first.sequences, second.sequences)
    for a, b in zip(first.logits, second.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for a, b in zip(held(given_back(first)), held(given_back(second)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    return first, second


def go_on(models, inputs, outputs, **arguments):
    """Hand the caches that came back over again, with two more tokens."""
    given = []
    encodes = models[0].config.is_encoder_decoder
    for model, output in zip(models, outputs, strict=True):
        ids = torch.cat([output.sequences, output.sequences[:, :2].clamp(min=4, max=IMAGE - 1)], 1)
        more = {asked_with(model): given_back(output), "decoder_input_ids" if encodes else "input_ids": ids}
        if not encodes:
            mask = inputs["attention_mask"]
            more["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        kept = inputs if encodes else {}
        given.append((model, {**kept, **more}))
    return same(*given, **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_texts_one_after_another(name):
    model, original = pair(name)
    calls = [asked(model), asked(model, seed=1, padded=False), asked(model, length=11, seed=2), asked(model)]
    for inputs in calls:
        same((model, inputs), (original, inputs))
    same((model, calls[0]), (original, calls[0]), do_sample=True, top_k=0, temperature=1.5)
    (graph,) = store_of(model).graphs.values()
    assert graph.cache.batch_size == 2


def test_positions_that_a_forward_hands_on_among_its_keywords(monkeypatch):
    small = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
    ids = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2}
    name = "WhisperForCausalLM"
    config = transformers.WhisperConfig(**small, **ids, encoder_layers=2, encoder_attention_heads=2, init_std=0.3)
    monkeypatch.setitem(MODELS, name, lambda: config)
    model, original = pair(name)
    assert "position_ids" not in inspect.signature(original.forward).parameters
    inputs = asked(model, padded=False)
    places = torch.arange(7, device=DEVICE)[None] + torch.tensor([[0], [2]], device=DEVICE)
    shifted, plain = (
        same((model, given), (original, given))[0] for given in (inputs | {"position_ids": places}, inputs)
    )
    assert not torch.equal(shifted.logits[-1], plain.logits[-1])


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_is_continued_also_where_a_row_ended_inside_of_a_chunk(name):
    models = model, original = pair(name)
    inputs = asked(model, padded=False, rows=1, seed=3)
    drawn = {"do_sample": True, "top_k": 0, "temperature": 2.0}
    free = run(original, inputs, **drawn).sequences[0].tolist()
    end = free[-5]
    assert free.index(end) >= len(free) - 10
    outputs = same((model, inputs), (original, inputs), eos_token_id=end, pad_token_id=0, **drawn)
    assert outputs[0].sequences.shape[1] < len(free)
    outputs = go_on(models, inputs, outputs)
    go_on(models, inputs, outputs, **drawn)


@pytest.mark.parametrize("name", MODELS)
def test_grows_past_its_capacity(name, monkeypatch):
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 3)
    monkeypatch.setattr(graph_cache, "ROUNDING", 2)
    model, original = pair(name)
    same((model, asked(model)), (original, asked(model)), max_new_tokens=14)
    assert max(capacity for _, capacity in store_of(model).graphs) >= 14


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_in_the_prompt(name):
    models = model, original = pair(name)
    for seed, sides in ((0, (2, 2)), (1, (2, 2)), (2, (1, 3))):
        inputs = with_image(model, seed=seed, sides=sides)
        outputs = same((model, inputs), (original, inputs))
    go_on(models, inputs, outputs)
    same((model, asked(model)), (original, asked(model)))


def test_an_encoder_s_output_may_be_given_and_the_text_begun():
    model, original = pair("BartForConditionalGeneration")
    inputs = asked(model)
    begun = {**inputs, "decoder_input_ids": torch.tensor([[2, 11, 12], [2, 13, 14]], device=DEVICE)}
    same((model, begun), (original, begun))
    with torch.no_grad():
        outputs = original.get_encoder()(**inputs)
    given = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
    same((model, given), (original, given))


@pytest.mark.parametrize("theirs", [False, True], ids=["of the package", "of transformers"])
def test_an_assistant_with_an_encoder_is_given_what_is_encoded(theirs):
    model, original = pair("T5ForConditionalGeneration")
    inputs = asked(model, rows=1, padded=False)
    assistant, encoded = copy.deepcopy(original if theirs else model), []
    assistant.get_encoder().register_forward_pre_hook(
        lambda module, arguments, keywords: encoded.append(keywords.get("input_ids", *arguments)), with_kwargs=True
    )
    got = run(model, inputs, assistant_model=assistant)
    assert torch.equal(got.sequences, run(original, inputs, assistant_model=copy.deepcopy(original)).sequences)
    assert torch.equal(encoded[0], inputs["input_ids"])


def cut_wrongly(shift_rows, shift_columns):
    """Return the rows of a table beside those at the step's positions, or columns beside them."""
    right = StepLength._cut

    def cut(self, table, rows, columns):
        slots, self.slots = self.slots, (self.slots + shift_rows).clamp(max=table.shape[rows] - 1)
        try:
            return right(self, table, rows, columns).roll(shift_columns, columns)
        finally:
            self.slots = slots

    return cut


@pytest.mark.parametrize("name", ["GPTNeoForCausalLM", "ImageGPTForCausalImageModeling"])
@pytest.mark.parametrize("planted", [(-1, 0), (-4, 0), (0, -1)])
def test_a_table_that_is_cut_wrongly_is_seen(name, planted, monkeypatch):
    monkeypatch.setattr(StepLength, "_cut", cut_wrongly(*planted))
    model, original = pair(name)
    with pytest.raises(AssertionError):
        same((model, asked(model)), (original, asked(original)))


def with_unmasked_window(window):
    """A pair whose cache keeps to a window that no mask has."""
    MODELS["MoshiForCausalLM"] = lambda: transformers.MoshiConfig(
        **WITH_WINDOW, sliding_window=window, initializer_range=0.3, **ENDS
    )
    try:
        model, original = pair("MoshiForCausalLM")
    finally:
        del MODELS["MoshiForCausalLM"]
    return eligibility.within_window(type(model)) and model, original


def test_a_window_without_a_mask_holds_the_text_or_transformers_loop_runs(monkeypatch):
    model, original = with_unmasked_window(16)
    outputs = same((model, asked(model)), (original, asked(original)))  # the last of 17 tokens is not read again
    inputs = asked(model)
    long = [run(one, inputs, max_new_tokens=11).sequences for one in (model, original)]
    assert torch.equal(*long)
    assert ("generate", "window") in backend.fallbacks()
    ids = outputs[0].sequences
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, 7:])], 1)
    more = {"input_ids": ids, "attention_mask": mask}
    again = [run(one, {**more, asked_with(one): given_back(out)}, max_new_tokens=4).sequences
             for one, out in zip((model, original), outputs, strict=True)]  # fmt: skip
    assert torch.equal(*again)
    with pytest.raises(UnknownCache):
        DecodeGraph(model, batch_size=2, capacity=17)
    DecodeGraph(model, batch_size=2, capacity=16)
    backend.reset_fallbacks()
    monkeypatch.setattr(eligibility, "unmasked_window", lambda *_: 99)
    with pytest.raises(AssertionError):  # a buffer would keep what the window forgets
        same((model, inputs), (original, inputs), max_new_tokens=24)


@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpForCausalLM"), reason="this transformers has no Qwen4Exp")
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("plainly", [True, False])
def test_positions_that_grow_beside_an_indexer_s_keys_take_no_graph(padded, plainly):
    kind = transformers.Qwen4ExpForCausalLM
    config = small_variants(kind, True, {})[0].config
    torch.manual_seed(0)
    model = type(kind.__name__, (GraphGeneration, kind), {"_step_without_graph": not GPU})(config).eval().to(DEVICE)
    model.starts_plainly = plainly
    original = kind(copy.deepcopy(config)).eval().to(DEVICE)
    original.load_state_dict(model.state_dict())
    ids = torch.randint(5, 90, (3, 9)).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    for _ in range(2):
        backend.reset_fallbacks()
        mine, theirs = (
            one.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=None)
            for one in (model, original)
        )
        assert torch.equal(mine, theirs)
        assert [reason for operator, reason in backend.fallbacks() if operator == "generate"] == ["step_fails"]


def test_a_model_that_says_itself_what_is_given_takes_transformers_loop():
    model, original = pair("BartForConditionalGeneration")
    inherited = type(original).prepare_inputs_for_generation

    def prepare(self, ids, *args, **kwargs):
        ids = torch.where(ids > 50, ids, ids + 2)  # a pattern over what was chosen
        return inherited(self, ids, *args, **kwargs)

    for one in (model, original):
        one.__class__ = type("Own", (type(one),), {"prepare_inputs_for_generation": prepare})
    inputs = asked(model)
    got = [run(one, inputs).sequences for one in (model, original)]
    assert torch.equal(*got)
    assert ("generate", "inputs") in backend.fallbacks()


def kosmos():
    text = {"vocab_size": V, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 2, **ENDS}
    vision = {**VISION, "num_hidden_layers": 2}
    config = transformers.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=4)
    generator = torch.Generator().manual_seed(0)
    positions = torch.zeros(2, 9, dtype=torch.bool)
    positions[:, 2:6] = True
    ids = torch.randint(4, IMAGE, (2, 9), generator=generator)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": positions}
    return config, {**asked, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}, {}


def bark():
    sizes = {"block_size": 64, "num_layers": 2, "num_heads": 2, "hidden_size": 32}
    config = BarkSemanticConfig(**sizes, input_vocab_size=V, output_vocab_size=V)
    generation = BarkSemanticGenerationConfig(
        eos_token_id=60, max_new_tokens=12, semantic_vocab_size=60, semantic_pad_token=60, text_encoding_offset=20,
        text_pad_token=80, semantic_infer_token=90, max_input_semantic_length=16, min_eos_p=0.5, do_sample=False,
    )  # fmt: skip
    ids = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(0))
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return config, asked, {"semantic_generation_config": generation}


HANDING = {
    "Kosmos2ForConditionalGeneration": (kosmos, "text_model"),
    "BarkSemanticModel": (bark, ""),
}
"""Classes with a `generate` of their own, and the model whose loop it comes to."""


@pytest.mark.parametrize("name", HANDING)
def test_a_generate_that_prepares_and_hands_over(name):
    made, part = HANDING[name]
    config, inputs, settings = made()
    torch.manual_seed(0)
    original = getattr(transformers, name)(config).eval().to(DEVICE)
    for parameter in original.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model = copy.deepcopy(original)
    inner = model.get_submodule(part)
    inner.__class__ = type("Ours", (type(inner), GraphGeneration), {"_step_without_graph": not GPU})
    said, settings = [], settings or {"max_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}
    for one in (original, model):
        given = {name: value.to(DEVICE) for name, value in inputs.items()}
        with torch.no_grad():
            said.append(one.generate(**given, **copy.deepcopy(settings)))
    if "output_logits" in settings:
        torch.testing.assert_close(*(torch.stack(one.logits) for one in said), rtol=1e-3, atol=1e-3)
        said = [one.sequences for one in said]
    assert torch.equal(*said)
    assert said[0].unique().numel() > 4
    assert not [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    assert store_of(inner).graphs


def test_a_mask_that_hides_a_slot_too_many_is_seen(monkeypatch):
    right = StepCall._step_arguments

    def short(self):
        self.buffers.cache.position.sub_(1)
        try:
            return right(self)
        finally:
            self.buffers.cache.position.add_(1)

    monkeypatch.setattr(StepCall, "_step_arguments", short)
    with pytest.raises(AssertionError):
        test_a_generate_that_prepares_and_hands_over("Kosmos2ForConditionalGeneration")


def test_states_by_hand_with_padding():
    model, original = pair("Mamba2ForCausalLM")
    inputs = asked(model)
    graph = DecodeGraph(model, batch_size=2, capacity=12)
    for _ in range(2):
        logits, ids = graph.prefill(**inputs), inputs["input_ids"]
        for _ in range(4):
            mask = torch.ones_like(ids)
            mask[:, :7] = inputs["attention_mask"]
            with torch.no_grad():
                wanted = original(ids, attention_mask=mask).logits[:, -1]
            torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
            ids = torch.cat([ids, wanted.argmax(-1, keepdim=True)], 1)
            logits = graph.step(ids[:, -1])
