"""Rewrites and verifies models of the installed transformers and writes the table in docs/models.md.

    python bench/models.py [MODEL …] [--jobs N] [--write docs/models.md]

Each model runs through the command line in a process of its own, on the CPU with a tiny config and random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "starcoder2",
    "cohere2", "glm4", "stablelm", "gpt_neox",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def rewritten(model):
    with tempfile.TemporaryDirectory() as folder:
        out, report = Path(folder, model), Path(folder, "report.json")
        command = [sys.executable, "-m", "rewrite.cli", model, "--out", out, "--json", report, "--diff", "none"]
        run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=folder)
        if not report.exists():
            return {"model": model, "error": run.stderr.strip().splitlines()[-1]}
        return {"model": model, **json.loads(report.read_text())}


def checks(verdict):
    return [check for gate in verdict["gates"] for check in gate["checks"]]


def low_precision(verdict):
    """The largest error of any bf16 output as a multiple of the original's own."""
    found = [check["figures"] for check in checks(verdict) if check["name"].startswith("bfloat16")]
    ratios = [float(figures[name]) for figures in found for name in ("rms ratio", "max ratio") if name in figures]
    return f"{max(ratios):.2f}×" if ratios else "–"


def round_trips(verdict):
    found = [check["status"] for check in checks(verdict) if check["name"].startswith("checkpoint round trip")]
    return "identical" if found and set(found) == {"passed"} else "NOT identical"


def row(result):
    if "error" in result:
        return f"| {result['model']} | – | – | {result['error']} | – | – |"
    verdict, transforms = result["verify"], result["transforms"].values()
    counts = ", ".join(f"{t['name']} {len(t['rewritten'])}" for t in transforms if t["rewritten"])
    skipped = "<br>".join(f"`{s['site']}`: {s['reason']}" for t in transforms for s in t["skipped"]) or "none"
    done = [check["status"] for check in checks(verdict)]
    outcome = "pass" if verdict["passed"] else f"**FAIL** {verdict['reason']}"
    parity = f"{outcome}, {done.count('passed')} of {len(done)} checks"
    return (
        f"| {result['model']} | {counts} | {skipped} | {parity} | {low_precision(verdict)} | {round_trips(verdict)} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(rewritten, options.models or MODELS))
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    lines = [
        "# Models, rewritten and verified",
        "",
        f"Made by `python bench/models.py --write docs/models.md` with {versions},",
        "on a CPU, with tiny configs and random weights. A site is code that a transform may rewrite.",
        "The bf16 column is the largest error of any output against an fp64 run, as a multiple of the original's own",
        "error in bf16. A checkpoint is saved by the original, loaded into the rewritten class, run, saved again, and",
        "compared byte for byte.",
        "",
        "| model | rewritten sites | skipped sites and reasons | parity | bf16 error | checkpoint |",
        "|---|---|---|---|---|---|",
        *map(row, results),
    ]
    text = "\n".join(lines) + "\n"
    if options.write:
        options.write.write_text(text)
    print(text)
    return 0 if all(r.get("verify", {}).get("passed") for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
