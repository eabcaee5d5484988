"""Audits our rewards, three naive ones and those of well-known libraries; writes a result card for each.

    python bench/audit.py [name ...] [--out bench/results]

A grader whose library is not installed is skipped with a line that says so. The summary keeps the commit and the
versions the cards were made with; run with names, it replaces only their rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path

from longreach.audit import Card, audit

HERE = Path(__file__).parent
NAIVE, LIBRARIES = HERE.parent / "examples" / "naive_graders", HERE / "graders" / "libraries.py"
WORDS = ("maths", "format", "text", "tool")
GRADERS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "own_code": ("longreach.audit.own:code_reward", ("function", "program"), None),
    "own_speed": ("longreach.audit.own:speed_reward", ("speed",), None),
    "own_maths": ("longreach.audit.own:math_reward", WORDS, None),
    "naive_code": (f"{NAIVE}/code.py:reward", ("function",), None),
    "naive_speed": (f"{NAIVE}/speed.py:reward", ("speed",), None),
    "naive_maths": (f"{NAIVE}/maths.py:reward", WORDS, None),
    "math_verify": (f"{LIBRARIES}:math_verify_default", ("maths",), "math_verify"),
    "trl_accuracy": (f"{LIBRARIES}:trl_accuracy", ("maths",), "trl"),
    "verifiers_math_rubric": (f"{LIBRARIES}:verifiers_math_rubric", ("maths",), "verifiers"),
    "inspect_match": (f"{LIBRARIES}:inspect_math", ("maths",), "inspect_ai"),
}


def row(name: str, card: Card, library: str | None) -> dict[str, object]:
    """A card in one line of the summary."""
    version = (
        importlib.metadata.version(library.replace("_", "-")) if library else importlib.metadata.version("longreach")
    )
    return {
        "name": name,
        "version": version,
        "ear": [card.ear.hits, card.ear.n],
        "har": [card.har.hits, card.har.n],
        "blast": [card.blast.hits, card.blast.n],
        "exploit_advantage": card.exploit_advantage,
        "isolation": card.isolation.model_dump(),
        "worst": [f"{f.id} {f.title}" for f in card.holes()[:5]],
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
        ).stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"among {', '.join(GRADERS)}; all if none is given")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(GRADERS))
    if unknown:
        parser.error(f"names: got {unknown}; there are {', '.join(GRADERS)}")
    summary = arguments.out / "audit_summary.json"
    rows = {r["name"]: r for r in json.loads(summary.read_text("utf-8"))} if summary.is_file() else {}
    for name in arguments.names or GRADERS:
        target, kinds, library = GRADERS[name]
        if library and (importlib.util.find_spec(library) is None):
            print(f"{name}: skipped, {library} is not installed")
            continue
        card = audit(target, kinds=kinds, time_limit=120.0)
        card.grader = name
        card.save(arguments.out / f"audit_{name}.json")
        rows[name] = row(name, card, library)
        print(f"{name}: EAR {card.ear.hits}/{card.ear.n}, HAR {card.har.hits}/{card.har.n}, blast {card.blast.hits}")
        summary.write_text(json.dumps([rows[n] for n in GRADERS if n in rows], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
