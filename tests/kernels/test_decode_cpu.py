"""Attention of a decoding step on a CPU against the reference: windows, sinks, softcaps, idle rows, empty prefixes."""

import pytest
import torch

from longreach.kernels import decode_cpu, decode_reference
from longreach.kernels.decode_attention import DecodePlan
from longreach.kernels.decode_reference import AttentionCall

H, K, D, W, P, N = 6, 2, 12, 10, 16, 60


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7, 30, 45])
def test_it_is_the_references_function(window, softcap, sink):
    torch.manual_seed(0)
    k, v = torch.randn(N, P, K, D), torch.randn(N, P, K, W)
    own_length = torch.tensor([1, 0, 17, 40, 3, 33, 5], dtype=torch.int32)
    pages = torch.randperm(N).int()
    plan = DecodePlan(
        pages[:21].view(7, 3).contiguous(), own_length, torch.tensor([0, -1, 0, 1, 1, -1, 2], dtype=torch.int32),
        pages[21:33].view(3, 4).contiguous(), torch.tensor([50, 5, 0], dtype=torch.int32),
        torch.tensor([[0, 2, -1], [3, 4, -1], [6, -1, -1]], dtype=torch.int32),
        heads=H, kv_heads=K, head_dim=W, page=P, window=window,
    )  # fmt: skip
    q, sinks = torch.randn(7, H, D), torch.randn(H) if sink else None
    got, want = torch.full((7, H, W), torch.nan), torch.full((7, H, W), torch.nan)
    for implementation, out in ((decode_cpu, got), (decode_reference, want)):
        implementation.decode_attention(AttentionCall(q, k, v, k, v, plan, out, 0.3, softcap, sinks))
    assert torch.allclose(got, want, atol=2e-6) and bool((got[1] == 0).all())
