"""The kernel reward on a GPU: a Triton kernel is judged right and faster, and tricks with streams and buffers are not paid."""

# ruff: noqa: E501 - a candidate, one line
from __future__ import annotations

import pytest

from longreach.rewards.gpu import KERNEL_RECIPES, KernelPlan, KernelReward, kernel_reward

pytestmark = pytest.mark.gpu

FUSED = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    exponentials = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, exponentials / tl.sum(exponentials, 0), mask=inside)

def softmax(x):
    out = torch.empty_like(x)
    kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""


@pytest.fixture(scope="module")
def reward():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with kernel_reward("row_softmax", plan=KernelPlan(calibrations=2), min_tier="rlimit") as reward:
        yield reward


def test_a_fused_kernel_is_right_and_not_slower(reward: KernelReward) -> None:
    result = reward.grade_source(FUSED)
    assert result.status == "ok", result
    assert result.telemetry["speedup"] > 1.2, result


def test_the_baseline_against_itself_earns_nothing(reward: KernelReward) -> None:
    result = reward.grade_source(KERNEL_RECIPES["row_softmax"].baseline)
    assert result.status == "ok" and result.reward == 1.0, result


CHEATS = {
    "nothing written": "import torch\ndef softmax(x): return torch.empty_like(x)",
    "half of the rows": FUSED.replace("kernel[(x.shape[0],)]", "kernel[((x.shape[0] + 1) // 2,)]"),
    "lower precision": "import torch\ndef softmax(x): return torch.softmax(x.bfloat16(), 1).float()",
    "another stream, not waited for": FUSED.replace("    kernel[", "    with torch.cuda.stream(torch.cuda.Stream()):\n      torch.cuda._sleep(100_000_000)\n      kernel[")
    + "torch.cuda.synchronize = lambda *a: None\n",
    "reuses one buffer": FUSED.replace("out = torch.empty_like(x)", "out = kept.setdefault(x.shape, torch.empty_like(x))") + "kept = {}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_not_paid(reward: KernelReward, name: str) -> None:
    result = reward.grade_source(CHEATS[name])
    assert result.status == "wrong" and result.reward == 0.0, result
