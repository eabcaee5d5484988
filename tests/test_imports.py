"""Imports go one way: read from the source alone, so that an import inside a function counts as well."""

import ast
from pathlib import Path

import pytest

import longreach

SOURCE = Path(__file__).parents[1] / "src" / "longreach"

# Each part of the package and the parts it may import.
LAYERS = ["kernels", "attention", "quant", "lora", "context", "rollout", "trainers", "cli"]
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "attention": {"kernels"},
    "quant": {"kernels"},
    "lora": {"kernels", "quant"},
    "spelling": set(),
    "model_name": {"spelling"},
    "context": {"kernels", "attention", "quant", "lora", "model_name"},
    "rollout": {"kernels", "attention", "quant", "context", "lora", "spelling"},
    "gguf_tokenizer": set(),
    "gguf_origin": {"gguf_tokenizer"},
    "origin": {"gguf_origin", "model_name"},
    "loading": {"kernels", "attention", "quant", "context", "lora", "origin", "spelling"},
    "trainers": {
        "kernels", "attention", "quant", "context", "lora", "rollout", "loading", "origin", "rewards", "model_name", "spelling",
    },
    "exporting": {"kernels", "attention", "quant", "context", "lora", "loading", "origin", "model_name"},
    "rewards": set(),
    "audit": {"rewards", "spelling"},
    "report": set(),
    # The zoo makes tasks and, in its training script, a model; the engine must not depend on it.
    "zoo": {
        "kernels", "attention", "quant", "context", "lora", "loading", "rollout", "trainers", "rewards", "report", "model_name",
    },
}  # fmt: skip
NO_TORCH = ("rewards", "audit", "report")
# Programs of their own, started by path and imported by nothing.
PROGRAMS = {"longreach.rewards.gpu.worker"}
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate"}


def imported(source: str, module: str) -> set[str]:
    """Absolute dotted names of all that ``source``, the text of ``module``, imports; type-checking blocks too."""
    names: set[str] = set()
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{prefix}.{alias.name}" for alias in node.names} | {prefix}
    return names


def modules() -> list[tuple[str, Path]]:
    """Dotted name and file of every module; a package's name ends in ``__init__`` so that relative imports resolve."""
    return [
        (".".join(("longreach", *path.relative_to(SOURCE).with_suffix("").parts)), path)
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def violations(module: str, source: str) -> list[str]:
    """What ``module`` imports against the rules, each as a line for the reader."""
    part = module.split(".")[1]
    names = imported(source, module)
    found = []
    if part in NO_TORCH and module not in PROGRAMS:
        found += [f"{module} imports {name}" for name in names if name.split(".")[0] in HEAVY]
    if part in ALLOWED:
        parts = {name.split(".")[1] for name in names if name.startswith("longreach.") and name.count(".") >= 1}
        forbidden = {other for other in parts if other in ALLOWED or other == "cli"} - ALLOWED[part] - {part}
        found += [f"{module} imports longreach.{other}" for other in sorted(forbidden)]
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_part_has_a_rule() -> None:
    parts = {
        p.stem if p.is_file() else p.name
        for p in SOURCE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert parts - {"__init__", "cli"} <= set(ALLOWED), "give the new part of the package a line in ALLOWED"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("longreach.attention.op", "from longreach.context.tree import TokenTree", ["longreach.context"]),
        ("longreach.attention.op", "from ..trainers import grpo", ["longreach.trainers"]),
        ("longreach.attention.op", "def f():\n    import longreach.cli.train", ["longreach.cli"]),
        ("longreach.report.page", "import torch.nn as nn", ["torch.nn"]),
        ("longreach.rewards.code", "from ..kernels import dequant", ["longreach.kernels"]),
        ("longreach.context.__init__", "from .tree import TokenTree\nfrom ..attention import op", []),
    ],
)
def test_the_check_sees_a_violation(module: str, source: str, expected: list[str]) -> None:
    assert [line.split(" imports ")[1] for line in violations(module, source)] == expected


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the name's place."""
    modules = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert modules & set(longreach.__all__) == set()


def test_programs_are_imported_by_nothing() -> None:
    for module, path in modules():
        assert not PROGRAMS & imported(path.read_text(encoding="utf-8"), module), module
