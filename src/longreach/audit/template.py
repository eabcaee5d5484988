"""Placeholders of corpus files, so that one file gives the public text and any number of private variants.

``<<name>>`` is a parameter or derived value, ``<<answer + 1>>`` integer arithmetic on them (``+ - * // % **``, ``gcd``,
comparison-free), and ``<<id:buffer>>`` an identifier: ``buffer`` in the public split, a fresh name in a private one.
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Value = int | str

_PLACEHOLDER = re.compile(r"<<([^<>]+)>>")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SYLLABLES = (
    "ba",
    "co",
    "di",
    "fe",
    "gu",
    "ha",
    "jo",
    "ki",
    "lu",
    "me",
    "no",
    "pi",
    "ra",
    "so",
    "tu",
    "ve",
    "wa",
    "zi",
)


def evaluate(expression: str, values: Mapping[str, Value]) -> Value:
    """The value of a placeholder's expression. Raises ValueError for anything but names, integers and the operators."""

    def walk(node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](_integer(walk(left)), _integer(walk(right)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -_integer(walk(operand))
            case ast.Call(func=ast.Name(id="gcd"), args=[left, right]):
                return math.gcd(_integer(walk(left)), _integer(walk(right)))
        raise ValueError(
            f"placeholder {expression!r}: {ast.unparse(node)!r} is neither a known name nor integer arithmetic"
        )

    return walk(ast.parse(expression.strip(), mode="eval").body)


def _integer(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError(f"placeholder arithmetic on {value!r}; only integers can be computed with")
    return value


@dataclass
class Renderer:
    """Fills placeholders with ``values``; ``rng`` is given for a private split and then renames ``<<id:...>>``."""

    values: dict[str, Value]
    rng: random.Random | None = None
    identifiers: dict[str, str] = field(default_factory=dict)

    def __call__(self, text: str) -> str:
        return _PLACEHOLDER.sub(lambda match: self._fill(match[1]), text)

    def _fill(self, expression: str) -> str:
        if expression.startswith("id:"):
            return self._identifier(expression[3:].strip())
        return str(evaluate(expression, self.values))

    def _identifier(self, name: str) -> str:
        if self.rng is None:
            return name
        if name not in self.identifiers:
            fresh = fresh_identifier(self.rng)
            self.identifiers[name] = fresh.capitalize() if name[:1].isupper() else fresh
        return self.identifiers[name]


def fresh_identifier(rng: random.Random) -> str:
    """A pronounceable Python identifier that is no keyword or builtin."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(4)) + str(rng.randrange(10, 100))
