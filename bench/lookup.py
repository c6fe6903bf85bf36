"""Time `generate(prompt_lookup_num_tokens=K)` of a rewritten Llama beside plain `generate()`, and print it.

    rewrite llama --out optimized_llama --no-verify
    python bench/lookup.py optimized_llama --shape 8b --rows 1 4 8

Random weights of real shapes, but for what makes the text: the residual stream is hardly more than the last token's
embedding, and the head holds the embeddings in another order, so that each token has one successor, far from any tie.
The text is then known before it is generated, and a prompt can hold parts of it: `summary` has spans of it with gaps
between, `chance` has its tokens alone, each followed by something else, and `nothing` none of it. The work of a step
does not depend on the weights; how much is accepted depends on `--span` and `--gap`, and is printed. Each row of a
batch has a text of its own, whose spans begin elsewhere, and 3 tokens of padding more than the row before.

Both sides alternate and the median is kept; the tokens are compared. Last come the steps by themselves: replays of the
graph of one token, of that of K + 1, and of what brings rows into line where each moves by a slot.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from hf_rewrite_runtime.decode import graph_cache
from hf_rewrite_runtime.decode.step_graph import Program
from hf_rewrite_runtime.speculative.left_pad_rows import Alignment
from hf_rewrite_runtime.speculative.verify_step import RaggedWindow, Window

SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "tiny": (64, 96, 2, 4, 2, 16, 4099),
}
REPLAYS = 50


def model_of(package, shape, device):
    """Return the model, and the successor of every token `[V]`."""
    hidden, inner, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary, max_position_embeddings=131072,
        tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = package.LlamaForCausalLM(config).eval()
    model._step_without_graph = device == "cpu"
    follows = (torch.arange(vocabulary, device=device) * 2053 + 17) % vocabulary
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[follows] = model.model.embed_tokens.weight
    return model, follows.cpu()


def batches_of(follows, rows, length, new, span, gap):
    """Return inputs of `rows` rows by name, left-padded."""
    each = [prompts_of(follows, length, new, span, gap, row) for row in range(rows)]
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    ids = {name: torch.cat([prompts[name] for prompts in each]).masked_fill(mask == 0, 0) for name in each[0]}
    return {name: {"input_ids": found, "attention_mask": mask} for name, found in ids.items()}


def prompts_of(follows, length, new, span, gap, row=0):
    """Return prompts `[1, length]` of a row by name; the text behind each is `path`."""
    path = [1000 + 10 * row]
    while len(path) <= new:
        path.append(int(follows[path[-1]]))
    known = set(path)
    generator = torch.Generator().manual_seed(1 + row)
    others = [t for t in torch.randint(len(follows), (4 * length,), generator=generator).tolist() if t not in known]
    first = 1 + 5 * row % (span + gap)
    spans = [path[1:first][-span:], *(path[at : at + span] for at in range(first, new, span + gap))]
    order = torch.randperm(len(spans), generator=generator).tolist()
    summary, chance = [], []
    for index in order:
        summary += [*spans[index], others[index]]
    for index, token in enumerate(path[1:]):
        chance += [token, others[index]]
    made = {"summary": summary, "chance": chance, "nothing": []}
    return {
        name: torch.tensor([(others[-length:] + tokens)[-length + 1 :] + path[:1]]) for name, tokens in made.items()
    }


def seconds(run):
    """Return how long a call takes, and what it returns."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


def counting(program, *others):
    """Count the replays of each kind of step."""
    counts = dict.fromkeys((program, *others), 0)
    replay = program.replay

    def counted(self):
        counts[type(self)] += 1
        replay(self)

    program.replay = counted
    return counts


def compared(counts, model, follows, inputs, ways, new, rounds):
    """Time calls side by side; return ms a token, steps of one and of several tokens, and whether tokens are right."""
    times, texts, steps = {way: [] for way in ways}, {}, {}
    for number in range(rounds + 1):
        for way, given in ways.items():
            counts.update(dict.fromkeys(counts, 0))
            took, texts[way] = seconds(
                lambda given=given: model.generate(**inputs, max_new_tokens=new, do_sample=False, **given)
            )
            steps[way] = counts[Program], counts[Window] + counts[RaggedWindow]
            if number:  # the first captures
                times[way].append(took)
    ms = {way: statistics.median(took) / new * 1e3 for way, took in times.items()}
    first, *others = texts.values()
    same = all(torch.equal(first, other) for other in others)
    text = first[:, -new:].cpu()
    right = torch.equal(text[:, 1:], follows[text[:, :-1]])
    verdict = f"tokens {'equal' if same else 'DIFFER'}, text {'as planned' if right else 'NOT as planned'}"
    return ms, steps, verdict


def replays(model, rows, length, rounds):
    """Return ms a replay of each graph that drafts, by its name."""
    each = {}
    graphs = [graph for (batch, _), graph in graph_cache.store_of(model).graphs.items() if batch == rows]
    for graph in graphs:
        for program in graph._programs.values():
            if program.sampling is not None and program.sampling.lookup is not None:

                def several(graph=graph, program=program):
                    for number in range(REPLAYS):
                        graph.state.position.fill_(length + 1)
                        graph.state.position_ids.fill_(length + 1)
                        graph.state.finished.zero_()
                        graph.cache.starts.fill_(1)
                        graph.state.shift.fill_(1 - 2 * (number % 2))
                        program.replay()

                several()
                took = [seconds(several)[0] for _ in range(rounds)]
                each[type(program).__name__] = statistics.median(took) / REPLAYS * 1e3
    return each


def main():
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="batch sizes, of at most 8")
    parser.add_argument("--tokens", type=int, default=10, help="K, at most 15")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--span", type=int, default=12, help="tokens of the text that the prompt has in one piece")
    parser.add_argument("--gap", type=int, default=4, help="tokens between two such pieces that it does not have")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", nargs="+", default=["summary", "chance", "nothing"])
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.path.insert(0, str(asked.package.resolve().parent))
    package = importlib.import_module(asked.package.name)
    counts = counting(Program, Window, RaggedWindow, Alignment)
    model, follows = model_of(package, asked.shape, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {asked}")
    ways = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": asked.tokens}}
    for rows in asked.rows:
        for name, inputs in batches_of(follows, rows, asked.prompt, asked.new, asked.span, asked.gap).items():
            if name not in asked.prompts:
                continue
            given = {key: tensor.to(device) for key, tensor in inputs.items()}
            ms, steps, verdict = compared(counts, model, follows, given, ways, asked.new, asked.rounds)
            print(
                f"{rows} rows, {name:8} plain {ms['plain']:.3f} ms a token, lookup {ms['lookup']:.3f}, "
                f"{ms['plain'] / ms['lookup']:.2f}x; "
                f"steps of one {steps['lookup'][0]}, of {asked.tokens + 1}: {steps['lookup'][1]}; {verdict}",
                flush=True,
            )
        each = replays(model, rows, asked.prompt, asked.rounds)
        print(", ".join(f"{name}: {ms:.3f} ms a replay" for name, ms in sorted(each.items())), flush=True)
    for line in graph_cache.describe(model):
        print(line)


if __name__ == "__main__":
    main()
