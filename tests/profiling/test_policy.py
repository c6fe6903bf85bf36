"""The worked example of docs/forwards.md: a flow-matching policy, its loop, its prefix, and its captured forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rewrite.benchmark.benchmark_models import lock_of
from rewrite.commands.bench import _package
from rewrite.console.console import Screen
from rewrite.profile import subject
from rewrite.profile.parts import part_of
from rewrite.profile.subject import Models, Plan
from rewrite.redundant import redundancy_search
from rewrite.verify.generation.latency import latency_checks
from rewrite.verify.judging.compare import near_exact
from rewrite.verify.models import model_inputs
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Options, Workbench

FILE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_policy.py"
KIND = ("input_ids", "pixel_values", "state", "noise")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    config = tmp_path_factory.mktemp("policy") / "config.json"
    config.write_text('{"num_inference_steps": 3}', encoding="utf-8")
    with _package(Screen(), str(FILE), {"trust_remote_code": False, "given": None}) as found:
        yield Plan(found.package, str(FILE), None, "tiny", config=config, dtype="float64")


@pytest.fixture(scope="module")
def models(plan: Plan) -> Models:
    return subject.load(plan)


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(FILE.read_text(encoding="utf-8").splitlines(), 1) if text in line)


def inputs(models: Models, seed: int) -> dict[str, Any]:
    return model_inputs.make(KIND, models.theirs.config, 2, seed, torch.float64)


def test_the_loop_has_a_number_of_turns_that_is_known(plan: Plan) -> None:
    loops = lock_of(plan.package)["transforms"]["fixed_count_loops"]
    assert loops == {"rewritten": ["TinyPolicyModel.sample_actions: while time >= -dt / 2"], "skipped": []}
    assert "for _ in range(num_steps):" in (plan.package / FILE.name).read_text(encoding="utf-8")


def test_the_prefix_repeats_where_image_and_text_stay(plan: Plan) -> None:
    found = redundancy_search.look(plan)["findings"]
    (prefix,) = [each for each in found if each["kind"] == "repeated"]
    assert "if input_ids and pixel_values stay the same" in prefix["text"]
    assert "noise and state" in prefix["proof"]
    assert prefix["line"] == line_of("key_values = self.prefix(")
    unread = {each["line"] for each in found if each["kind"] == "unread"}
    assert unread >= {line_of("self.down_proj(self.act_fn"), line_of("return self.o_proj(attended)")}


def test_a_captured_call_has_the_whole_loop(models: Models) -> None:
    ours = models.ours
    ours._forward_without_graph = True
    switch, store = (part_of(ours, f"forward/{name}") for name in ("forward_settings", "forward_cache"))
    assert switch is not None
    assert store is not None
    with torch.no_grad(), switch.use_forward_graphs("always"):
        for seed in range(3):
            given = inputs(models, seed)
            near_exact({"": models.theirs(**given).actions}, {"": ours(**given).actions}, "fp64 max")
    assert store.store_of(ours).replays == 2


def test_its_latency_is_that_of_a_call(models: Models) -> None:
    subject = models.subject
    variants = small_variants(subject.original, subject.causal, {})[:1]
    (check,) = latency_checks(Workbench(subject, variants, Options(seeds=1)))
    assert check.name == "forward, tiny"
    assert check.run()["outcome"] == "not claimed on a CPU"
