"""Kernel tasks: what to compute, on which secret inputs, and how exactly. Sources, because they run in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelRecipe:
    """A function of tensors to make faster.

    function   its name; it takes the input tensors and returns one tensor
    inputs     source of ``make_inputs(generator, device, **sizes) -> tuple of tensors``, random through ``generator`` alone
    baseline   source of a right implementation with the wanted dtypes: what a speed-up is measured against
    truth      source of the same function in higher precision: what errors are measured against
    idle       source of a function that returns an empty tensor of the right shape and dtype
    sizes      of the timed calls; ``edge_sizes`` of the untimed checks (odd shapes)
    calls      calls in one timed batch; their outputs are mixed into one before they are sent back
    error_factor   a candidate's error may be this many times the baseline's own
    max_speedup    more is implausible (below the roofline's time): quarantined
    """

    name: str
    function: str
    inputs: str
    baseline: str
    truth: str
    idle: str
    sizes: Mapping[str, int]
    edge_sizes: tuple[Mapping[str, int], ...] = ()
    calls: int = 32
    error_factor: float = 2.0
    max_speedup: float = 20.0
    modules: tuple[str, ...] = field(default=("torch", "triton"))

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise ValueError(f"function is {self.function!r}; it must be a name")
        if self.calls < 2:
            raise ValueError(f"calls is {self.calls}; a batch needs at least 2, or remembering one answer would pay")


_SOFTMAX_INPUTS = """
import torch
def make_inputs(generator, device, rows, columns):
    return (torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32) * 3,)
"""

ROW_SOFTMAX = KernelRecipe(
    name="row_softmax",
    function="softmax",
    inputs=_SOFTMAX_INPUTS,
    baseline="""
import torch
def softmax(x):
    shifted = x - x.amax(dim=1, keepdim=True)
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(dim=1, keepdim=True)
""",
    truth="import torch\ndef softmax(x):\n    return torch.softmax(x.double(), dim=1)\n",
    idle="import torch\ndef softmax(x):\n    return torch.empty_like(x)\n",
    sizes={"rows": 4096, "columns": 4096},
    edge_sizes=({"rows": 1, "columns": 1}, {"rows": 7, "columns": 1000}, {"rows": 33, "columns": 4097}),
)

_MATMUL_INPUTS = """
import torch
def make_inputs(generator, device, m, n, k):
    options = dict(generator=generator, device=device, dtype=torch.float32)
    a, b = torch.randn(m, k, **options), torch.randn(k, n, **options)
    kind = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return a.to(kind), b.to(kind)
"""

MATMUL = KernelRecipe(
    name="matmul_bf16",
    function="matmul",
    inputs=_MATMUL_INPUTS,
    baseline="import torch\ndef matmul(a, b):\n    return a @ b\n",
    truth="import torch\ndef matmul(a, b):\n    return a.double() @ b.double()\n",
    idle="import torch\ndef matmul(a, b):\n    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)\n",
    sizes={"m": 4096, "n": 4096, "k": 4096},
    edge_sizes=({"m": 1, "n": 1, "k": 1}, {"m": 65, "n": 33, "k": 129}),
    max_speedup=4.0,
)

KERNEL_RECIPES = {recipe.name: recipe for recipe in (ROW_SOFTMAX, MATMUL)}
