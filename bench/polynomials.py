"""Which families are the same polynomials as their originals: the first check of `rewrite verify`, alone.

    python bench/polynomials.py [MODEL ...] [--full] [--jobs 2] [--limit-seconds S] [--rows DIR]

Without `--full` with the small configurations and all fields of the configuration at once, as in a quick verification.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

from trials import Row, Tell, Trial, arguments_of, original, packages, results

from rewrite.verify import Options
from rewrite.verify.judging.checks import run_check
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.ring_equality import ring_checks
from rewrite.verify.runner import settled

MODELS = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2",
    "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba",
    "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3n", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "jetmoe", "lfm2", "lfm2_moe", "llama", "llama4", "mamba", "mamba2",
    "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nemotron", "nemotron_h", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm",
    "starcoder2", "vaultgemma", "xglm", "youtu", "zamba", "zamba2",
)  # fmt: skip
"""Causal language models of transformers."""


def compared(model: str, package: Path, options: Options, tell: Tell) -> Row:
    """Compare a package with its original, and say how that ended."""
    tell(model)
    with settled(options):
        modules = [loaded_sides.load(loaded_sides.locate(side)) for side in (original(model), package)]
        main = find_subjects(modules[0], modules[1]).main
        variants = small_variants(main.original, main.causal, options.config)
        bench = Workbench(main, variants, options)
        checks = [run_check(check) for check in ring_checks(bench)]
    if not checks:
        return {"status": "not run", "detail": "its smallest model is too large", "figures": {}, "check seconds": 0.0}
    return {
        "status": {"passed": "equal", "failed": "differs"}.get(checks[0].status, checks[0].status),
        "detail": checks[0].detail,
        "figures": dict(checks[0].figures),
        "check seconds": round(checks[0].seconds, 1),
    }


def table(rows: list[Row]) -> str:
    """What each family came to, and how many are equal."""
    lines = ["| family | outcome | configurations | s | why not |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: str(row["model"])):
        figures = row.get("figures", {})
        cells = [row["model"], row["status"], figures.get("configurations", "–"), row.get("check seconds", "–")]
        why = row.get("detail") or row.get("by") or figures.get("first", "")
        lines.append(f"| {' | '.join(map(str, cells))} | {why} |")
    equal = sum(row["status"] == "equal" for row in rows)
    return "\n".join([*lines, "", f"{equal} of {len(rows)} families are equal as polynomials."])


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--full", action="store_true", help="every value of every field of the configuration")
    given = arguments_of(parser)
    deadline = time.monotonic() + given.limit_seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.rows or Path(temporary)
        made = packages(given.models, folder / "packages", given.jobs)
        options = Options(quick=not given.full)
        trials = [
            Trial(model, partial(compared, model, package, options), {"model": model})
            for model, package in made.items()
        ]
        rows = []
        for row in results(trials, folder / ("full" if given.full else "quick"), given.jobs, deadline):
            rows.append(row)
            print(f"{row['status']:<9} {row['model']}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
