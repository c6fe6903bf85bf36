"""Which causal LMs decode inside a captured graph, before and after rewriting: the table in bench/results/capture.md.

    python bench/capture.py [CLASS …] [--jobs N] [--write]           on a CPU, under the rules of a stream capture
    python bench/capture.py --generate DIR                           write the packages and configs for a GPU machine
    python bench/capture.py --packages DIR --device cuda             capture and replay the steps for real

Every causal LM of the installed transformers is built tiny, with random weights. It prefills two prompts, one of them
left-padded, into a `PreallocatedCache`, warms up a step and decodes the next ones as a capture would; the logits are
compared with the original's over the whole sequence. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import json
import multiprocessing
import pickle
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import torch
import transformers  # the children are forks: they start with it loaded

from hf_rewrite_runtime.cache.names import argument_of

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))
BATCH, PROMPT, STEPS, WARM, CAPACITY, PADDING = 2, 6, 5, 2, 16, 2
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}
COLUMNS = ("class", "before", "after", "before (experts=eager)", "after (experts=eager)", "skip", "error")
PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
FIELDS = {
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}, "tie_word_embeddings": False
    },
    "DeepseekV2ForCausalLM": {
        "head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4
    },
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, **PER_LAYER},
    "Gemma4ForCausalLM": PER_LAYER,
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "ReformerModelWithLMHead": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "is_decoder": True},
    "XLMWithLMHeadModel": {"n_words": 128, "emb_dim": 64},
    "XmodForCausalLM": {"default_language": "en_XX"},
}  # fmt: skip
"""Sizes beside the verifier's own small ones, where these do not make a model that runs."""


def causal_classes():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(name if isinstance(name, str) else name[0], model_type)
    return found


def original_class(name):
    return getattr(transformers, name)


def small_config(cls):
    from rewrite.verify.models.configs import small_variants

    return small_variants(cls, True, FIELDS.get(cls.__name__, {}))[0].config


def write_package(cls, folder):
    """Write the package of a class's file and return what was skipped of `static_cache` for this class."""
    from rewrite.engine.build import build
    from rewrite.package.assemble import assemble
    from rewrite.package.lock import Options
    from rewrite.transforms import select
    from rewrite.upstream.source import resolve

    transforms = select()
    built = build(resolve(inspect.getsourcefile(cls)), transforms)
    folder.mkdir(parents=True)
    for path, content in assemble(built, transforms, Options((), ()), folder).files.items():
        if not path.startswith("."):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    report = next(report for report in built.rewritten.transforms if report.name == "static_cache")
    skipped = {skip.site: f"{skip.reason}" + f" ({skip.detail})" * bool(skip.detail) for skip in report.skipped}
    return skipped.get(cls.__name__)


def generate(name, folder):
    """Write package and configuration of one class, and say what there is none of, and why."""
    from rewrite.errors import NothingToRewrite

    cls, entry = original_class(name), {"class": name}
    try:
        entry["skip"] = write_package(cls, folder / f"rewritten_{name}")
    except NothingToRewrite as error:
        entry["skip"] = str(error).split(": ", 1)[1].split(". Nothing")[0]
    try:
        config = small_config(cls)
    except Exception as error:  # configurations raise what they like
        entry["error"] = str(error).split(", so there")[0].splitlines()[0]
        return entry
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / f"{name}.pkl").write_bytes(pickle.dumps(config))
    return entry


def build_model(cls, config, weights, device, experts):
    pinned = {"attn_implementation": "sdpa" if cls._supports_sdpa else "eager", "dtype": torch.float32}
    if experts is not None:
        pinned["experts_implementation"] = experts
    model = cls._from_config(copy.deepcopy(config), **pinned).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(device)


def batch_of(model, config, padding, device):
    generator = torch.Generator().manual_seed(0)
    vocab = getattr(config.get_text_config(decoder=True), "vocab_size", 128)
    ids = torch.randint(4, vocab, (BATCH, PROMPT + STEPS), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes = inspect.signature(type(model).forward).parameters
    return ids, mask, positions, "position_ids" in takes


def arguments(batch, start, stop, mask):
    ids, _, positions, takes_positions = batch
    given = {"input_ids": ids[:, start:stop], "attention_mask": mask}
    return given | ({"position_ids": positions[:, start:stop]} if takes_positions else {})


def layer_count(config):
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "decoder_layers", "n_layer", "num_layers")
    return max(getattr(text, name, 0) or 0 for name in names)


def layers_of(config):
    """Return the layers of a growing cache where they keep a slot for each token; None for keys and values alone."""
    growing = transformers.DynamicCache(config=config.get_text_config(decoder=True)).layers
    keep = len(growing) == layer_count(config) and all(hasattr(layer, "keys") for layer in growing)
    return growing if keep else None


def prefilled(model, config, batch, cache_class, device):
    cache = cache_class(layer_count(config), BATCH, CAPACITY, device, layers_of(config))
    mask = torch.ones(BATCH, CAPACITY, dtype=torch.int64, device=device)
    mask[:, :PROMPT] = batch[1][:, :PROMPT]
    cache.pad(PROMPT - batch[1][:, :PROMPT].sum(1))
    model(**arguments(batch, 0, PROMPT, batch[1][:, :PROMPT]), **{argument_of(model): cache}, use_cache=True)
    cache.position.fill_(PROMPT)
    return cache, mask


def steps_by_rule(model, config, batch, cache_class, device):
    """Decode with the host watched; the first steps warm up."""
    from stream_rules import stream_rules

    cache, mask = prefilled(model, config, batch, cache_class, device)
    logits = []
    for number in range(STEPS):
        inputs = arguments(batch, PROMPT + number, PROMPT + number + 1, mask)
        with cache.step(), stream_rules() if number >= WARM else nullcontext():
            logits.append(model(**inputs, **{argument_of(model): cache}, use_cache=True).logits[:, -1])
        cache.position.add_(1)
    return torch.stack(logits, 1), cache.refusal


def steps_by_graph(model, config, batch, cache_class, device):
    """Warm up on a side stream, capture one step with synchronisation forbidden, replay it."""
    cache, mask = prefilled(model, config, batch, cache_class, device)
    inputs = {name: value.clone() for name, value in arguments(batch, PROMPT, PROMPT + 1, mask).items()}
    step = {argument_of(model): cache, "use_cache": True}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), cache.step():
        for _ in range(WARM):
            model(**inputs, **step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), cache.step():
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = model(**inputs, **step).logits[:, -1]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    logits = []
    for number in range(STEPS):
        for name, value in arguments(batch, PROMPT + number, PROMPT + number + 1, mask).items():
            inputs[name].copy_(value)
        graph.replay()
        logits.append(output.clone())
        cache.position.add_(1)
    return torch.stack(logits, 1), cache.refusal


def outcome(model, config, expected, padding, cache_class, device):
    """Return `clean`, or what stopped the steps."""
    run = steps_by_graph if device == "cuda" else steps_by_rule
    try:
        with torch.no_grad():
            batch = batch_of(model, config, padding, device)
            logits, refusal = run(model, config, batch, cache_class, device)
    except Exception as error:  # model code raises what it likes; the type tells a refusal from a failure
        kind = "refused" if type(error).__name__ == "Refused" or "captur" in str(error) else "fails"
        if "synchronizing CUDA operation" in str(error):
            kind = "refused"
        where = "" if kind == "refused" and device == "cpu" else f" at {_line(error)}"
        return f"{kind}: {str(error).splitlines()[0][:140]}{where}"
    if refusal is not None:
        return f"refused: {refusal}"
    error = float((logits.float() - expected).abs().max() / expected.abs().max())
    return "clean" if error <= TOLERANCE[device] else f"other logits: {error:.1e}"


def _line(error):
    lines, trace = [], error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "/torch/" not in path:
            lines.append(f"{path.rsplit('/', 1)[-1]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return next((line for line in reversed(lines) if line.startswith("modeling_")), lines[-1])


def check(name, device, packages):
    """Run one class: the original's steps and the rewritten one's, with and without the experts' interface."""
    from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
    from rewrite.verify.models.workbench import randomise

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    cls, entry = original_class(name), {"class": name}
    saved, package = packages / "configs" / f"{name}.pkl", packages / f"rewritten_{name}"
    if not saved.exists():
        return entry
    try:
        config = pickle.loads(saved.read_bytes())
        torch.manual_seed(0)
        model = build_model(cls, config, None, "cpu", None)
        randomise(model, 1)
        weights = model.state_dict()
        sys.path.insert(0, str(packages))
        ours = importlib.import_module(package.name) if package.exists() else None
    except Exception as error:  # model code and configurations raise what they like
        return entry | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    sides = {"before": (cls, PreallocatedCache)}
    if ours is not None:
        # On a GPU a capture that fails may spoil what comes after it in the process: the original goes last.
        sides = {"after": (getattr(ours, name), PreallocatedCache), **sides}
    routed = getattr(cls, "_can_set_experts_implementation", lambda: False)()
    for side, (side_class, cache_class) in sides.items():
        for experts in ("batched_mm", "eager") if routed else (None,):
            models = [functools.partial(build_model, c, config, weights, device, experts) for c in (cls, side_class)]
            key = f"{side} (experts=eager)" if experts == "eager" else side
            entry[key] = found = compared(*models, config, PADDING, cache_class, device)
            if found.startswith(("other logits", "cannot run")):
                found = compared(*models, config, 0, cache_class, device)
                entry[key] = "clean without padding" if found == "clean" else found
    return dict(sorted(entry.items(), key=lambda item: COLUMNS.index(item[0])))


def compared(original, tested, config, padding, cache_class, device):
    """Return the outcome of the steps of one model against the whole sequence in the other; both are made here."""
    try:
        reference = original()
        batch = batch_of(reference, config, padding, device)
        with torch.no_grad():
            whole = reference(**arguments(batch, 0, PROMPT + STEPS, batch[1]), use_cache=False).logits
        return outcome(tested(), config, whole[:, PROMPT:].float(), padding, cache_class, device)
    except Exception as error:  # the original cannot do this, or the rewritten file cannot be built
        return f"cannot run: {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def in_processes(function, tasks, jobs, limit=150):
    """Run each task in a fork of its own; one that fails, dies or takes too long is an entry, not the end."""
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        running = [(task[0], pool.apply_async(_entry, (function, task))) for task in tasks]
        for name, result in running:
            try:
                yield result.get(limit)
            except multiprocessing.TimeoutError:
                yield {"class": name, "error": "took too long, or its process died"}


def _entry(function, task):
    """Return what the function returns, or what it raised as text: not every exception can be sent by a process."""
    try:
        return function(*task)
    except Exception as error:  # a bug of a transform is an entry of the table too
        return {"class": task[0], "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--generate", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.classes or sorted(causal_classes())
    with tempfile.TemporaryDirectory() as temporary:
        packages = options.generate or options.packages or Path(temporary)
        skips = {}
        if options.packages is None:
            for entry in in_processes(generate, [(name, packages) for name in names], options.jobs):
                skips[entry["class"]] = entry
            (packages / "packages.json").write_text(json.dumps(skips, indent=1))
        else:
            skips = json.loads((packages / "packages.json").read_text())
        if options.generate:
            return
        entries = []
        for entry in in_processes(check, [(name, options.device, packages) for name in names], options.jobs):
            known = skips.get(entry["class"], {})
            entries.append(entry | {key: known[key] for key in ("skip", "error") if known.get(key)})
            print(json.dumps(entries[-1]), flush=True)
    summary = {"transformers": version("transformers"), "torch": torch.__version__, "device": options.device}
    if options.device == "cuda":
        summary["gpu"] = torch.cuda.get_device_name()
    result = summary | {"models": entries}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.write:
        from capture_table import table

        (ROOT / "bench" / "results" / "capture.json").write_text(json.dumps(result, indent=1) + "\n")
        (ROOT / "bench" / "results" / "capture.md").write_text(table(result))


if __name__ == "__main__":
    main()
