"""A profile from end to end on a CPU: a small model of the Llama family, both sides, and everything made of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from rewrite.benchmark.benchmark_models import lock_of
from rewrite.benchmark.benchmark_plan import plain
from rewrite.commands.bench import _package
from rewrite.console.console import Screen
from rewrite.measure import categories
from rewrite.profile import advice, measure, profile_tables
from rewrite.profile import profiled_calls as kinds
from rewrite.profile.kernel_work import held_by
from rewrite.profile.parts import part_of
from rewrite.profile.places import Places
from rewrite.profile.recording import fully as record_fully
from rewrite.profile.subject import NotProfiled, Plan, calls, load
from rewrite.redundant import redundancy_search

ROOT = Path(__file__).parents[2]
FILE = ROOT / "fixtures" / "models" / "modeling_tiny_llama.py"
PLOTS = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def plan() -> Iterator[Plan]:
    with _package(Screen(), str(FILE), {"trust_remote_code": False, "given": None}) as found:
        yield Plan(found.package, str(FILE), "decode", "tiny", tokens=16, rounds=(2, 2), seconds=0.1)


@pytest.fixture(scope="module")
def record(plan: Plan) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # fewer steps and recordings than a user gets
        patch.setitem(kinds.STEPS, "cpu", 4)
        patch.setattr(measure, "RECORDINGS", 1)
        made = measure.profile(plan)
    made["needless"] = redundancy_search.look(plan)
    made["advice"] = advice.derive(made, lock_of(plan.package))
    return made


@pytest.mark.parametrize("name", ["original", "ours"])
def test_the_parts_of_a_step(record: dict[str, Any], name: str) -> None:
    side = record["sides"][name]
    parts = sum(values["us"] for values in side["categories"].values()) + sum(side["waits"].values())
    assert parts == pytest.approx(side["sum_us"])
    assert sum(row["us"] for row in side["rows"]) == pytest.approx(parts - sum(side["waits"].values()))
    for by in ("lines", "modules"):
        assert sum(group["us"] for group in side[by]) == pytest.approx(sum(row["us"] for row in side["rows"]))
    assert side["categories"].keys() >= {categories.GEMM, categories.ATTENTION, categories.ELEMENTWISE}
    assert profile_tables.other_share(side) <= 0.01
    counts = {True: 0.0, False: 0.0}  # and not times: on a busy machine any one operator may take longer than the rest
    for row in side["rows"]:
        counts[row["line"] is not None] += row["count"]
    assert counts[True] > counts[False]
    assert side["off"] == pytest.approx(side["sum_us"] / side["wall_us"] - 1)
    said = "no part explains" in side["said"]
    assert said == (abs(side["off"]) > measure.AGREES)


def test_products_know_their_line_their_module_and_their_work(record: dict[str, Any]) -> None:
    source = FILE.read_text(encoding="utf-8").splitlines()
    rows = [row for row in record["sides"]["original"]["rows"] if row["name"] in ("aten::mm", "aten::addmm")]
    down = [row for row in rows if row["module"] == "model.layers.*.mlp.down_proj"]
    assert len(down) == 1
    assert "self.down_proj(" in source[int(down[0]["line"].rpartition(":")[2]) - 1]
    assert down[0]["where"] == "TinyLlamaMLP.forward"
    assert down[0]["count"] == pytest.approx(2)  # layers
    assert down[0]["operations"] == pytest.approx(2 * 2 * 64 * 96)
    assert down[0]["bytes"] == pytest.approx(2 * 4 * (64 * 96 + 64 + 96))
    assert down[0]["limit_us"] == pytest.approx(
        max(down[0]["bytes"] / record["card"]["read"], down[0]["operations"] / record["card"]["arithmetic"]) * 1e6
    )


def test_advice_compares_what_was_rewritten(record: dict[str, Any]) -> None:
    done = [each["text"] for each in record["advice"] if each["what"] == "done"]
    assert all(re.search(r"before, now (none|\d+ µs)", text) for text in done)
    assert all(each["most_us"] >= 0 for each in record["advice"])


def test_a_record_is_plain_json(record: dict[str, Any]) -> None:
    assert json.loads(json.dumps(plain(record)))["kind"] == "decode"


def test_the_change_has_the_time_of_each_line(record: dict[str, Any]) -> None:
    lines = [line for hunk in record["change"] for line in hunk]
    spent = {name: {each["line"].rpartition(":")[2]: each["us"] for each in side["lines"] if each["line"]}
             for name, side in record["sides"].items()}  # fmt: skip
    for line in lines:
        assert (line["before"] is None, line["now"] is None) == (line["sign"] == "+", line["sign"] == "-")
        assert line["before_us"] == spent["original"].get(str(line["before"]))
        assert line["now_us"] == spent["ours"].get(str(line["now"]))
    assert any(line["before_us"] for line in lines if line["sign"] == "-")
    assert any(line["now_us"] for line in lines if line["sign"] == "+")
    source = FILE.read_text(encoding="utf-8").splitlines()
    assert all(source[line["before"] - 1] == line["code"] for line in lines if line["sign"] == "-")


def test_markdown_is_a_table_that_github_renders(record: dict[str, Any]) -> None:
    text = profile_tables.markdown(record)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 10
    assert all(line.endswith("|") for line in lines)
    assert "<details>" in text
    assert "wall clock" in text
    assert text.splitlines()[2].startswith("On a CPU no gain is to be expected. ")
    assert "|" not in text[: text.index("**What would change it**")] or not record["advice"]


def test_what_cannot_be_profiled_is_said(plan: Plan) -> None:
    from dataclasses import replace

    with pytest.raises(NotProfiled, match="TinyLlamaForCausalLM"):
        load(replace(plan, class_name="Another"))
    models = load(replace(plan, class_name="TinyLlamaModel"))
    with pytest.raises(NotProfiled, match="--forward"):
        calls(replace(plan, kind="prompt"), models)


def test_a_rehearsal_runs_the_step_and_leaves_it_as_it_was(plan: Plan) -> None:
    """On a CPU the package's loop runs its step as plain calls, and a captured one is rehearsed in the same way."""
    models = load(plan)
    model = models.ours
    model._step_without_graph = True
    call = calls(plan, models)["ours"]
    prompt = dict(call.inputs)
    with torch.no_grad():
        before = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert held_by(model) is not None
    store = part_of(model, "decode/graph_cache").store_of(model)
    (graph,) = store.graphs.values()
    (program,), (read,) = graph._programs.values(), graph.prompts._graphs.values()
    logits, places = (program.logits, read._logits), Places(model, {models.files[1]})

    def rehearse() -> None:
        with torch.no_grad(), call.rehearsing(), places.noted():
            kinds._step(graph, program)
            kinds._prompt(read)

    trace = record_fully(call)(rehearse)
    assert program.logits is logits[0]
    assert read._logits is logits[1]
    assert any(place.function == "forward" for place in places.list)
    assert [operator for operator in trace.operators if operator.name == "aten::mm"]
    with torch.no_grad():
        assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), before)


class _Page(HTMLParser):
    """What a page refers to, and whether its elements are closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.refers += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        self.tables += tag == "table"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(record: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="a report needs matplotlib")
    pytest.importorskip("jinja2", reason="a report needs jinja2")
    from rewrite.profile import html_report

    hostile = {**record, "model": "<script>alert(1)</script>"}
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_report.html(hostile), encoding="utf-8")
    return path


def test_the_report_is_one_file_that_needs_no_other(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parser = _Page()
    parser.feed(text)
    assert parser.open == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert all(reference.startswith("#") for reference in parser.refers)
    assert {reference[1:] for reference in parser.refers} <= set(parser.ids)
    assert "url(http" not in text
    assert "<script>alert" not in text
    assert parser.tables >= 6  # one below each plot, and more
    assert text.count("<svg") == PLOTS
    assert '<p class="sentence">On a CPU no gain is to be expected. ' in text
    assert text.index("What would change it") < text.index("<svg")  # the findings first
    assert 'class="came"' in text
    assert 'class="went"' in text
    assert len(text) < 3e6
    assert not re.search(r"#(?:0067a5|d98200|1d2127)[^;]*\"", text)  # colours are the page's, dark or light


def test_the_report_in_a_browser(page: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api", reason="opening the report needs playwright")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        backgrounds = set()
        for scheme, width in (("light", 1200), ("dark", 1200), ("light", 390)):
            tab = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            problems: list[str] = []
            tab.on("console", lambda message, said=problems: said.append(message.text))
            tab.on(
                "request", lambda asked, said=problems: said.append(asked.url) if "file:" not in asked.url else None
            )
            tab.goto(page.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator(".plot svg").count() == PLOTS
            closed = tab.locator("details:not([open])").first
            closed.locator("summary").click()
            assert tab.locator("details[open]").count() >= 2
            colours = "getComputedStyle(document.body).backgroundColor"
            backgrounds.add((scheme, tab.evaluate(colours)))
            axis = tab.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")
            assert axis != tab.evaluate(colours)
            painted = tab.evaluate("performance.getEntriesByType('paint').map(each => each.name)")
            assert "first-contentful-paint" in painted
            assert problems == []
        chromium.close()
    assert len({colour for _, colour in backgrounds}) == 2
