"""The documents tell the truth where a machine can check it: links, commands, architectures, files they name."""

import re
from pathlib import Path

import pytest

from longreach.cli import COMMANDS
from longreach.context.support import TESTED

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in target]
    assert [target for target in targets if not (document.parent / target).exists()] == []
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line[:1] == "#"
    }
    assert [anchor for anchor in re.findall(r"\]\(#([^)]+)\)", text) if anchor not in headings] == []


def test_the_readme_lists_the_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folder = ROOT / "src" / "longreach" / "cli"
    assert set(re.findall(r"`longreach (\w+)", text)) == {
        name for name in COMMANDS if (folder / f"{name}.py").is_file()
    }


def test_the_readme_lists_the_tested_architectures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Supported architectures")[1].split("Refused")[0]
    assert [name for name in TESTED if name.removesuffix("_text") not in section] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_folders_named_in_tables_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|bench|examples|docs|src)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
