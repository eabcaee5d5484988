"""The page of a run: complete, self-contained, and safe whatever a completion says."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longreach.report import read_log, render, write_page
from longreach.report.page import duration, number, spread
from longreach.report.plots import MAX_POINTS, plots, running_mean, series, thin

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028"


def step(number: int, **more: object) -> dict:
    return {
        "type": "step",
        "step": number,
        "total_steps": 32,
        "seconds": 2.0 * number,
        "loss": 0.01,
        "grad_norm": 0.4,
        "learning_rate": 1e-4,
        "reward": number / 100,
        "rewards": {"exact": number / 100, "format": 1.0},
        "groups_without_signal": 0.25,
        "length": {"mean": 12.0, "min": 8.0, "max": 20.0, "clipped": 0.1},
        "entropy": 0.5,
        "tokens": 1000 * number,
        "tokens_per_second": 500.0,
        "memory": {"host": 900_000_000},
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    sample = {
        "prompt": EVIL,
        "completion": [{"role": "assistant", "content": EVIL}],
        "rewards": {EVIL: 1.0},
        "tokens": 3,
    }
    records = [
        {"type": "header", "format": 1, "run": EVIL, "method": "grpo", "model": EVIL, "config": {"a": {"b": EVIL}}},
        {"type": "eval", "step": 0, "reward": 0.3, "completions": [sample]},
        *[step(number) for number in range(1, 31)],
        step(31, completions=[sample], rewards={EVIL: 0.2, "exact": 0.1}),
        step(32, alarms=[{"step": 32, "kind": EVIL, "message": EVIL, "value": 2.0}]),
        {"type": "eval", "step": 32, "reward": 0.9},
        {"type": "footer", "status": "failed", "error": EVIL, "seconds": 70, "steps": 32, "checkpoint": None},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return tmp_path


class Tags(HTMLParser):
    """Collects tags, attributes that load something, and text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href") or name.startswith("on")
        ]
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.text += data


def without_plotly(page: str) -> str:
    """The page without the embedded library, which holds any string there is."""
    return re.sub(r"<script>/\*\*?.*?</script>", "<script></script>", page, count=1, flags=re.DOTALL)


def test_what_a_run_says_is_text_and_never_markup(run: Path) -> None:
    page = render(read_log(run))
    tags = Tags()
    tags.feed(page)
    assert tags.tags.count("script") == 2 and "img" not in tags.tags and tags.loads == []
    assert tags.text.count("onerror=alert(2)") >= 6  # name, model, error, alarm, completion, prompt: shown, not run
    assert EVIL not in page
    figures = page[page.index("const figures = ") :].splitlines()[0]
    assert "\\u003cextra>" in figures and "<" not in figures


def test_the_page_loads_nothing_and_is_small(run: Path) -> None:
    page = write_page(run)
    text = page.read_text(encoding="utf-8")
    assert page == run / "report.html" and page.stat().st_size < 6_000_000
    assert "plotly.js v" in text[:2_000_000]
    own = without_plotly(text)
    assert len(own) < 500_000 and not re.search(r"(?:https?:)?//[\w-]+\.\w+", own)


def test_every_plot_has_its_place_and_its_data(run: Path) -> None:
    log = read_log(run)
    names = [plot.name for plot in plots(log)]
    assert names == [
        "reward",
        "components",
        "length",
        "loss",
        "grad_norm",
        "signal",
        "entropy",
        "speed",
        "memory",
        "learning_rate",
    ]
    page = render(log)
    assert [name for name in names if f'id="plot-{name}"' not in page] == []
    reward = json.loads(plots(log)[0].figure)
    held_out = reward["data"][-1]
    assert held_out["name"] == "held-out" and held_out["x"] == [0, 32] and held_out["y"] == [0.3, 0.9]


def test_a_run_without_steps_or_rewards_has_a_page(tmp_path: Path) -> None:
    header = {"type": "header", "format": 1, "run": "r", "method": "sft"}
    (tmp_path / "log.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    assert "No step was logged yet" in render(read_log(tmp_path))
    rows = [{"type": "step", "step": 1, "loss": 2.0}, {"type": "step", "step": 2, "loss": None}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]), encoding="utf-8")
    log = read_log(tmp_path)
    assert [plot.name for plot in plots(log)] == ["loss"] and "Cross-entropy" in render(log)


def test_long_runs_are_thinned_by_means() -> None:
    random.seed(0)
    xs, ys = list(range(10_007)), [random.random() for _ in range(10_007)]
    few_x, few_y = thin(xs, ys)
    assert len(few_x) == len(few_y) == MAX_POINTS and few_x == sorted(few_x)
    assert sum(few_y) / len(few_y) == pytest.approx(sum(ys) / len(ys), abs=2e-3)
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_the_running_mean_has_no_bias_at_its_start() -> None:
    assert running_mean([2.0] * 40) == pytest.approx([2.0] * 40)
    assert running_mean([]) == []
    rising = running_mean([0.0, 1.0, 2.0])
    assert rising[0] == 0.0 and 0 < rising[1] < 1 < rising[2] < 2


def test_series_leaves_out_what_is_no_number() -> None:
    rows = [
        {"step": 1, "a": {"b": 1}},
        {"step": 2, "a": {"b": None}},
        {"step": 3},
        {"step": 4, "a": {"b": float("nan")}},
    ]
    assert series(rows, "a", "b") == ([1], [1])


def test_numbers_and_times_are_for_reading() -> None:
    assert [number(x) for x in (0.8123, 1234, 3.2e-5, None, True, "a")] == [
        "0.812",
        "1,234",
        "3.2e-05",
        "–",
        "True",
        "a",
    ]
    assert [duration(s) for s in (9, 250, 7380)] == ["9 s", "4 min 10 s", "2 h 03 min"]


def test_spread_keeps_both_ends() -> None:
    items = [{"i": i} for i in range(100)]
    assert [item["i"] for item in spread(items, 4)] == [0, 33, 66, 99] and spread(items[:2], 4) == items[:2]
