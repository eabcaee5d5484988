"""Counter-based random numbers: the number of a (seed, count, token) triple does not depend on anything else.

A completion's draws are then the same whoever shares its batch, on a CPU and on a GPU. Philox4x32-10: Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011; Triton's `tl.philox` gives the same words.

Shape suffixes: B rows, V vocabulary, Q its quarters.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of the two halves
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments
_ROUNDS = 10


def philox(seed: Tensor, count: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10, int64 in [0, 2**32).

    Args:
        seed: int64, the 64-bit key.
        count, index: int64 in [0, 2**32): words 1 and 0 of the counter; words 2 and 3 are zero. All three broadcast.
    """
    c0, c1, seed = torch.broadcast_tensors(index, count, seed)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def gumbel(seed_B: Tensor, count_B: Tensor, vocabulary: int) -> Tensor:
    """[B, V] standard Gumbel noise, fp32: argmax(z + gumbel) is a draw from softmax(z).

    Token v takes word v % 4 of the counter v // 4. -log(-log(1 - x)) with x uniform: the largest values, which decide, come from
    the smallest x, where fp32 is finest.
    """
    index_Q = torch.arange(-(-vocabulary // 4), device=seed_B.device)
    words_BQ4 = torch.stack(philox(seed_B[:, None], count_B[:, None], index_Q[None]), -1)
    x_BV = (words_BQ4.flatten(1)[:, :vocabulary].float() + 0.5) * 2.0**-32
    return x_BV.neg_().log1p_().neg_().log_().neg_()


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of x * constant, both of 32 bits, in int64 arithmetic that never overflows."""
    low_half, high_half = constant & 0xFFFF, constant >> 16
    a = x * low_half  # < 2**48
    b = x * high_half + (a >> 16)  # < 2**48 + 2**32
    return b >> 16, ((b & 0xFFFF) << 16) | (a & 0xFFFF)
