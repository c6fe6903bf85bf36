"""The page bench/results/capture.md from the result of bench/capture.py."""

from __future__ import annotations

from collections import Counter

EAGER = " (experts=eager)"
INTRODUCTION = """\
# Which causal LMs decode inside a captured graph

Made by `python bench/capture.py --write` with transformers {transformers}, torch {torch}, on {device}, for {count}
classes.

Every class is built tiny, with random weights. It prefills two prompts, one left-padded, into a `PreallocatedCache`,
and decodes {how}.
"clean" means that nothing made the host wait and that the logits are those of the original over the whole sequence.
"refused" names what made the host wait and the line that asked for it, "fails" what else went wrong. Lines count in
the file that ran: the original's before, the generated one's after.

The mixin with the captured loop goes into the classes without an entry under "keeps transformers' loop".
"""
ON_CPU = "under the rules of a stream capture (`bench/stream_rules.py`)"
ON_GPU = 'by a captured and replayed graph, with `torch.cuda.set_sync_debug_mode("error")`'


def table(result):
    """Return the page: a summary, the classes with something to say, the names of those that are clean throughout."""
    models = result["models"]
    device = f"an {result['gpu']}" if "gpu" in result else "a CPU"
    lines = [
        INTRODUCTION.format(
            transformers=result["transformers"],
            torch=result["torch"],
            device=device,
            count=len(models),
            how=ON_GPU if "gpu" in result else ON_CPU,
        ),
        *_summary(models),
        "",
        "| class | before | after | experts=eager, before | after | keeps transformers' loop |",
        "|---|---|---|---|---|---|",
        *(_row(model) for model in models if not _plain(model)),
        "",
        "Clean before and after: " + ", ".join(model["class"] for model in models if _plain(model)) + ".",
    ]
    return "\n".join(lines) + "\n"


def _plain(model):
    said = {key: value for key, value in model.items() if key != "class"}
    return set(said) == {"before", "after"} and set(said.values()) == {"clean"}


def _kind(outcome):
    return outcome.split(":")[0].replace("clean without padding", "clean")


def _summary(models):
    taken = [model for model in models if not model.get("skip") and "after" in model]
    kept = [model for model in models if model.get("skip")]
    none = [model for model in models if not model.get("skip") and "after" not in model]
    lines = [
        "| | clean | refused | fails or other logits |",
        "|---|---|---|---|",
    ]
    for title, suffix in (("with the mixin", ""), ("of these, experts=eager", EAGER)):
        for side in ("before", "after"):
            counts = Counter(_kind(model[side + suffix]) for model in taken if side + suffix in model)
            clean, refused = counts.pop("clean", 0), counts.pop("refused", 0)
            lines.append(f"| {title}, {side} | {clean} | {refused} | {sum(counts.values())} |")
    lines.append("")
    lines.append(f"{len(kept)} classes keep transformers' loop. {len(none)} could not be built small enough to run.")
    return lines


def _row(model):
    cells = [model.get(key, "") for key in ("before", "after", "before" + EAGER, "after" + EAGER, "skip")]
    if "error" in model:
        cells[0] = cells[0] or f"not run: {model['error']}"
    return f"| {model['class']} | " + " | ".join(_cell(cell or "") for cell in cells) + " |"


def _cell(text):
    return text.replace("|", "\\|").replace("rewritten_", "").strip()
