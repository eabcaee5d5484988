"""Ready speed tasks: a baseline, secret inputs for it, and a bound that every answer must keep."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.rewards.tasks import Arguments

Matrix = list[list[float]]
EPSILON = 2.0**-52


@dataclass(frozen=True)
class SpeedRecipe:
    """A function to make faster.

    function     its name
    baseline     source of a right, plain implementation: what a speed-up is measured against
    idle         source of a function that takes the same arguments and returns an answer of the same shape without
    working:
                 it tells what receiving and answering cost
    generate     (rng) -> arguments for the timed calls; the baseline should take 2 ms or more
    edge         (rng) -> arguments for untimed checks: odd sizes, extreme scales
    verify       (args, baseline's value, value) -> "" or what is wrong; must bound the error relative to the
    inputs' scale max_speedup  more is implausible in this language on one CPU: quarantined, not paid packages
    that the candidate may import; by default no library, so that none can be called instead
    """

    name: str
    function: str
    baseline: str
    idle: str
    generate: Callable[[random.Random], Arguments]
    edge: Callable[[random.Random], Arguments]
    verify: Callable[[Arguments, Any, Any], str]
    max_speedup: float = 10.0
    packages: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise ValueError(f"function is {self.function!r}; it must be a name")
        if not self.max_speedup > 1:
            raise ValueError(f"max_speedup is {self.max_speedup}; it must be above 1")


def matrix_problem(value: Any, rows: int, columns: int) -> str:
    """ "" for a list of ``rows`` lists of ``columns`` finite floats (integers pass too), else what it is instead."""
    if type(value) is not list or len(value) != rows:
        return f"not a list of {rows} rows"
    for row in value:
        if type(row) is not list or len(row) != columns:
            return f"a row is not a list of {columns} numbers"
        for item in row:
            if type(item) is not float and type(item) is not int:
                return f"an element is a {type(item).__name__}"
            if not -math.inf < item < math.inf:
                return "an element is not finite"
    return ""


def _norms(vectors: Sequence[Sequence[float]]) -> list[float]:
    return [math.sqrt(sum(item * item for item in vector)) for vector in vectors]


def _within(expected: Matrix, got: Matrix, bound: Callable[[int, int], float]) -> str:
    for i, (ours, theirs) in enumerate(zip(expected, got)):
        for j, (want, have) in enumerate(zip(ours, theirs)):
            if not abs(want - have) <= bound(i, j):
                return f"element ({i}, {j}) is off by more than rounding can explain"
    return ""


def _random_matrix(rng: random.Random, rows: int, columns: int, scale: float = 10.0) -> Matrix:
    return [[rng.uniform(-scale, scale) for _ in range(columns)] for _ in range(rows)]


# -- matrix multiplication in plain Python ----------------------------------------------------------------------------

_MATMUL = """
def matmul(A, B):
    n, k, m = len(A), len(B), len(B[0])
    C = [[0.0] * m for _ in range(n)]
    for i in range(n):
        for j in range(m):
            total = 0.0
            for t in range(k):
                total += A[i][t] * B[t][j]
            C[i][j] = total
    return C
"""
_MATMUL_IDLE = "def matmul(A, B):\n    row = [0.0] * len(B[0])\n    return [row for _ in A]\n"


def _matmul_inputs(rng: random.Random) -> Arguments:
    return _random_matrix(rng, 44, 44), _random_matrix(rng, 44, 44)


def _matmul_edge(rng: random.Random) -> Arguments:
    n, k, m = (rng.choice((1, 2, 3, 5, 8, 13, 21)) for _ in range(3))
    scale = 10.0 ** rng.choice((-100, -3, 0, 3, 100))
    return _random_matrix(rng, n, k, scale), _random_matrix(rng, k, m, scale)


def verify_matmul(args: Arguments, expected: Matrix, value: Any) -> str:
    """Elementwise |C - AB| <= 4 k eps ‖a_i‖‖b_j‖, which any order of summation keeps (Higham, section 3.5)."""
    a, b = args
    problem = matrix_problem(value, len(a), len(b[0]))
    if problem:
        return problem
    rows, columns = _norms(a), _norms(list(zip(*b)))
    factor = 4 * len(b) * EPSILON
    return _within(expected, value, lambda i, j: factor * rows[i] * columns[j] + 1e-300)


PYTHON_MATMUL = SpeedRecipe(
    name="python_matmul",
    function="matmul",
    baseline=_MATMUL,
    idle=_MATMUL_IDLE,
    generate=_matmul_inputs,
    edge=_matmul_edge,
    verify=verify_matmul,
)

# -- vector code without NumPy: squared distances between two sets of points
# ---------------------------------------------

_DISTANCES = """
def distances(X, Y):
    result = []
    for x in X:
        row = []
        for y in Y:
            total = 0.0
            for t in range(len(x)):
                difference = x[t] - y[t]
                total += difference * difference
            row.append(total)
        result.append(row)
    return result
"""
_DISTANCES_IDLE = "def distances(X, Y):\n    row = [0.0] * len(Y)\n    return [row for _ in X]\n"


def _distances_inputs(rng: random.Random) -> Arguments:
    return _random_matrix(rng, 60, 24), _random_matrix(rng, 60, 24)


def _distances_edge(rng: random.Random) -> Arguments:
    n, m, size = (rng.choice((1, 2, 3, 5, 8, 13, 21)) for _ in range(3))
    scale = 10.0 ** rng.choice((-100, -3, 0, 3, 100))
    return _random_matrix(rng, n, size, scale), _random_matrix(rng, m, size, scale)


def verify_distances(args: Arguments, expected: Matrix, value: Any) -> str:
    """|D - d| <= 8 (k + 2) eps (‖x‖ + ‖y‖)², which the expanded form ‖x‖² + ‖y‖² - 2xy keeps as well."""
    x, y = args
    problem = matrix_problem(value, len(x), len(y))
    if problem:
        return problem
    left, right = _norms(x), _norms(y)
    factor = 8 * (len(x[0]) + 2) * EPSILON
    return _within(expected, value, lambda i, j: factor * (left[i] + right[j]) ** 2 + 1e-300)


VECTOR_DISTANCES = SpeedRecipe(
    name="vector_distances",
    function="distances",
    baseline=_DISTANCES,
    idle=_DISTANCES_IDLE,
    generate=_distances_inputs,
    edge=_distances_edge,
    verify=verify_distances,
)

RECIPES = {recipe.name: recipe for recipe in (PYTHON_MATMUL, VECTOR_DISTANCES)}
