"""The card: data, schema, table, page, command."""

import json
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from longreach.audit import Card, audit, load_corpus
from longreach.audit.card import json_schema
from longreach.cli.audit import audit as command

GRADER = '''
import re

def reward(prompts, completions, answer, **_):
    """<script>alert(1)</script>"""
    return [float(a in c[-1]["content"]) for c, a in zip(completions, answer)]
'''


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    path = tmp_path_factory.mktemp("grader") / "lenient.py"
    path.write_text(GRADER, "utf-8")
    return path


@pytest.fixture(scope="module")
def card(grader):
    return audit(f"{grader}:reward", load_corpus().select(tasks={"roots", "linear-arithmetic"}), kinds=["maths"])


def test_it_survives_json_and_states_what_was_run(card, tmp_path):
    card.save(tmp_path / "card.json")
    again = Card.load(tmp_path / "card.json")
    assert again == card
    raw = json.loads((tmp_path / "card.json").read_text("utf-8"))
    assert raw["corpus_digest"] == load_corpus().digest and raw["machine"]["kernel"]
    assert {"ear", "har", "war", "blast", "not_measured", "isolation", "settings"} <= raw.keys()
    assert "class" in raw["findings"][0]
    with pytest.raises(ValueError, match="har"):
        Card.model_validate({k: v for k, v in raw.items() if k != "har"})


def test_the_schema_describes_the_card(card):
    schema = json_schema()
    assert set(schema["required"]) <= json.loads(card.to_json()).keys()
    published = Path(__file__).parents[2] / "docs" / "audit_card.schema.json"
    assert json.loads(published.read_text("utf-8")) == schema
    assert "exploit acceptance" in schema["$defs"]["ClassResult"]["properties"]["ear"]["description"]


def test_the_table_names_the_holes(card):
    console = Console(width=200, record=True)
    console.print(card.table())
    shown = console.export_text()
    assert "denies the answer" in shown and "100.0% (5/5" in shown and "not measured" in shown


def test_the_page_needs_nothing_else(card):
    hostile = card.model_copy(deep=True)
    hostile.findings[0].detail = "<script>alert(1)</script>"
    page = hostile.page()
    assert page.startswith("<!doctype html>") and "denies the answer" in page
    assert not re.search(r"(src|href)=|https?://|<script", page)
    clean = card.model_copy(update={"findings": []})
    assert "no exploit was paid" in clean.page()


def test_the_command(grader, tmp_path):
    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    paths = ["--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")]
    result = run(app, [f"{grader}:reward", "--kind", "maths", "--private-seed", "5", *paths])
    assert result.exit_code == 0, result.output
    assert Card.load(tmp_path / "c.json").corpus_seed == 5 and (tmp_path / "c.html").stat().st_size > 5000
    assert run(app, [f"{grader}:reward", "--kind", "tool", "--max-ear", "0.1"]).exit_code == 1
    for arguments, message in (
        (["missing.py:reward"], "there is no file"),
        ([f"{grader}:reward", "--column", "truth"], "must be REWARD=CORPUS"),
        ([f"{grader}:reward", "--kind", "poems"], "poems"),
    ):
        failed = run(app, arguments)
        assert failed.exit_code == 2 and message in failed.output.replace("\n", " "), failed.output
