"""Names and sizes of files, and what must not stand in any of them."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED_FOR_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc"}
SOURCE_LINES = 450
EXAMPLE_LINES = 80
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".html", ".svg", ".json", ".jinja", ""}

# Put together from parts, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a package registry's host": re.compile(
        "|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "npm" + r"js\.(?:com|org)"])
    ),
    "an index option": re.compile("--(?:extra-)?" + "index-url"),
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:" + "wo" + r"rk|ro" + r"ot|ho" + r"me/\w+)/"),
    "an environment variable of our own": re.compile(r"\bLONG" + r"REACH_[A-Z]"),
}


def tracked() -> list[Path]:
    """Files of the repository; all files on disk where git is not at hand, as in a source archive."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git to know which files belong to the project")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_files_are_named_for_what_they_hold() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked() if path.stem.lower() in NAMED_FOR_NOTHING] == []


def test_source_files_stay_short() -> None:
    source = [path for path in tracked() if path.suffix == ".py" and ROOT / "src" in path.parents]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in source}
    assert lengths and {name: lines for name, lines in lengths.items() if lines > SOURCE_LINES} == {}


def test_examples_stay_short() -> None:
    examples = [path for path in tracked() if ROOT / "examples" in path.parents and path.suffix in (".py", ".yaml")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in examples}
    assert lengths and {name: lines for name, lines in lengths.items() if lines > EXAMPLE_LINES} == {}


def test_nothing_that_ties_the_project_to_one_place() -> None:
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path.stat().st_size > 2_000_000:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for what, pattern in FORBIDDEN.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {match.group(0)}")
    assert found == []


def test_large_files_are_not_committed() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > 8_000_000] == []
