"""Static rules about code: a signal of its own, never a defence. What must not be possible is the sandbox's
business.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.rewards.extraction import Blocks, extract_code
from longreach.rewards.result import completion_text


@dataclass(frozen=True)
class Policy:
    """What code should not contain.

    banned_imports  top-level modules (``"numpy"`` covers ``numpy.linalg``)
    banned_names    names and attributes (``"eval"``, ``"__builtins__"``)
    max_lines       of the program; None for no limit
    """

    banned_imports: Sequence[str] = ()
    banned_names: Sequence[str] = ()
    max_lines: int | None = None

    def findings(self, source: str) -> list[str]:
        """One line for each breach; a program that does not parse has one finding."""
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return [f"does not parse: {type(error).__name__}"]
        found = sorted({f"imports {name}" for name in imported_modules(tree) if name in set(self.banned_imports)})
        banned = set(self.banned_names)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found += sorted(f"uses {name}" for name in used & banned)
        lines = source.count("\n") + 1
        if self.max_lines is not None and lines > self.max_lines:
            found.append(f"has {lines} lines; at most {self.max_lines} are asked for")
        return found


def imported_modules(tree: ast.AST) -> set[str]:
    """Top-level names of the modules that a program imports by statement."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@dataclass
class PolicyReward:
    """A reward function with TRL's signature: ``kept`` when the program keeps the policy, else ``broken``."""

    policy: Policy
    kept: float = 0.0
    broken: float = -1.0
    blocks: Blocks = "one"
    __name__: str = "policy_reward"

    def __call__(self, prompts: Any = None, completions: Any = (), **columns: Any) -> list[float | None]:
        return [self._one(completion_text(completion)) for completion in completions]

    def _one(self, text: str) -> float:
        code = extract_code(text, blocks=self.blocks)
        return self.kept if not code.problem and not self.policy.findings(code.text) else self.broken


def policy_reward(
    policy: Policy, *, kept: float = 0.0, broken: float = -1.0, blocks: Blocks = "one"
) -> Callable[..., list[float | None]]:
    """A separate reward for keeping to ``policy``; add it beside a `code_reward`, with a weight of its own."""
    return PolicyReward(policy, kept, broken, blocks)
