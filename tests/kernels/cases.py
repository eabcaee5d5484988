"""Every op on random inputs as one list of results, so that an implementation can be run in any dtype and compared.

A case is a function (device, dtype) -> list of tensors; the same seed gives the same values in every dtype, rounded to it.
Shape suffixes as in the ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longreach import kernels

Case = Callable[[str, torch.dtype], list[Tensor]]

HIDDEN = (64, 80, 2304, 2560, 3840)
HEAD_SIZES = ((64, 64), (80, 80), (80, 32), (96, 96), (128, 128), (128, 96), (256, 256), (256, 64))
# V, with a last block that is full, ragged, and a single token.
VOCABULARIES = (1000, 8192, 8193, 20011)


class Maker:
    """Normal numbers, drawn in fp32 and rounded to bf16 first, so that every dtype starts from the same values."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        x = (scale * torch.randn(*shape, generator=self.generator)).bfloat16()
        return x.to(self.device, dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        """A statistic: fp32, or fp64 beside fp64."""
        return self(*shape, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)


def norm(T: int, H: int, unit_offset: bool) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        x, dy, add, weight = make(T, H), make(T, H), make(T, H), make(H)
        y, rstd = kernels.rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
        dx, none = kernels.rms_norm_backward(dy, x, weight, rstd, unit_offset=unit_offset)
        assert none is None
        dx2, dweight = kernels.rms_norm_backward(
            dy, x, weight, rstd, unit_offset=unit_offset, add=add, need_dweight=True
        )
        assert dx2 is add and dweight is not None
        return [y, rstd, dx, dx2, dweight]

    return run


def rope(T: int, D: int, R: int, heads: tuple[int, int], norm: bool, unit_offset: bool = False) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        H, K = heads
        # Columns of one fused projection: rows lie (H + 2K) * D apart.
        qkv, dqkv = make(T, (H + 2 * K) * D).unflatten(1, (-1, D)), make(T, (H + 2 * K) * D).unflatten(1, (-1, D))
        q, k, dq, dk = qkv[:, :H], qkv[:, H : H + K], dqkv[:, :H], dqkv[:, H : H + K]
        cos, sin = make.wide(T, R), make.wide(T, R)
        weights = (make(D), make(D)) if norm else (None, None)
        q_rot, k_rot, stats = kernels.qk_norm_rope(q, k, cos, sin, *weights, unit_offset=unit_offset)
        inputs = (q, k) if norm else (None, None)
        dq_in, dk_in, dqw, dkw = kernels.qk_norm_rope_backward(
            dq, dk, *inputs, cos, sin, *weights, stats, unit_offset, need_dweight=norm
        )
        assert dq_in is dq and dk_in is dk
        return [x for x in (q_rot, k_rot, *(stats or ()), dq_in, dk_in, dqw, dkw) if x is not None]

    return run


def swiglu(T: int, F: int, activation: str) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        # The two halves of one projection.
        gate, up = make(T, 2 * F, scale=2.0).chunk(2, -1)
        dh = make(T, F)
        h = kernels.swiglu(gate, up, activation=activation)
        dgate, dup, again = kernels.swiglu_backward(dh, gate, up, activation=activation, return_h=True)
        assert dgate is gate and dup is up and again is dh
        return [h, dgate, dup, again]

    return run


def merge(C: int, H: int, D: int, half_partials: bool) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        a = make(C, H, D) if half_partials else make.wide(C, H, D)
        b = make(H, C, D).transpose(0, 1)
        lse_a, lse_b, sinks = make.wide(H, C), make.wide(H, C), make(H)
        # A row that block b doesn't see, one that a doesn't, and one that neither does: what they hold must not matter.
        lse_b[0, 0] = lse_a[1, C - 1] = lse_a[2, 0] = lse_b[2, 0] = -torch.inf
        b[0, 0] = torch.nan
        kernels.merge_blocks(a, lse_a, b, lse_b)
        out, lse = a.clone(), lse_a.clone()
        kernels.apply_sink(out, lse, sinks)
        return [a, lse_a.exp(), out, lse]

    return run


def experts(T: int, k: int, E: int, F: int, gating: kernels.Gating, bias: bool) -> Case:
    """The ops of a mixture of experts one after the other; two experts without a token, and at a small T one with one."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        free = torch.tensor([e for e in range(E) if e not in (0, E // 2)])
        scores = torch.rand(T, len(free), generator=torch.Generator().manual_seed(5))
        chosen = free[scores.topk(k).indices].to(device)
        routing = kernels.route(chosen, E)
        weight = make(T, k).abs()
        gate_up, dh = make(T * k, 2 * F, scale=4.0), make(T * k, F)
        biases = (routing.expert_S, make(E, 2 * F)) if bias else (None, None)
        h = kernels.expert_swiglu(gate_up, gating, *biases)
        weight_S = weight.flatten()[routing.place_Tk.flatten().argsort()]
        dx, again, dweight = kernels.expert_swiglu_backward(dh, gate_up, weight_S, gating, *biases)
        assert dx is gate_up and again is dh
        out_bias = {"expert_Tk": chosen, "bias_EM": make(E, F)} if bias else {}
        out = kernels.combine_rows(h, routing.place_Tk, weight, add=make(T, F), **out_bias)
        back = kernels.combine_rows(make(T * k, F), routing.place_Tk)
        rows = kernels.gather_rows(make(T, F + 8)[:, :F], routing.row_S)
        return [h, dx, again, dweight, out, back, rows]

    return run


def low_rank(T: int, E: int, width: int, rank: int) -> Case:
    """Rows of odd loads, an empty first and an empty last expert among them."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        cuts = torch.randint(T + 1, (E - 2,), generator=torch.Generator().manual_seed(5)).sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([T])]).int().to(device)
        offsets[-2] = T
        y, t, b = make(T, width), make(T, rank), make(E, rank, width)
        assert kernels.add_low_rank(y, t, b, offsets, 0.5) is y
        return [y]

    return run


def logprob(C: int, V: int, temperature: float, softcap: float | None, entropy: bool) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        logits = make(C, V, scale=4.0)
        logits[:, V // 2] = -torch.inf  # a token that a processor has ruled out
        labels = torch.arange(C, device=device) * 7919 % V
        labels[-1] = V - 1
        values = kernels.row_logprob(logits, labels, temperature, softcap, entropy)
        logprob, lse, H = values
        dlogprob, dentropy = make.wide(C), make.wide(C) if entropy else None
        dlogits = kernels.row_logprob_backward(logits, labels, lse, dlogprob, dentropy, H, temperature, softcap)
        assert dlogits is logits
        return [x for x in (logprob, lse, H, dlogits) if x is not None]

    return run


def small() -> dict[str, Case]:
    """Cases small enough for Triton's interpreter: odd sizes, one row, ragged last blocks."""
    cases: dict[str, Case] = {}
    for H in HIDDEN:
        cases[f"norm-{H}"] = norm(5 if H < 1000 else 2, H, False)
    cases["norm-2304-gemma"] = norm(1, 2304, True)
    for D, R in HEAD_SIZES:
        cases[f"rope-{D}-{R}"] = rope(3, D, R, (4, 2), False)
        cases[f"norm-rope-{D}-{R}"] = rope(2, D, R, (5, 1), True)
    cases["norm-rope-gemma"] = rope(1, 256, 256, (3, 3), True, unit_offset=True)
    for activation in ("silu", "gelu_tanh"):
        cases[f"swiglu-{activation}"] = swiglu(3, 2500, activation)
    cases["swiglu-narrow"] = swiglu(1, 40, "silu")
    cases["experts-gpt-oss"] = experts(9, 3, 6, 40, kernels.Gating(True, 7.0, 1.702), True)
    cases["experts-silu"] = experts(5, 2, 5, 1100, kernels.Gating(), False)
    cases["experts-one-token"] = experts(1, 2, 4, 24, kernels.Gating(True, 1.5, 1.702), True)
    cases["low-rank"] = low_rank(150, 5, 136, 32)
    cases["low-rank-16"] = low_rank(3, 4, 40, 16)
    for D in (64, 80, 96, 128, 256):
        cases[f"merge-{D}"] = merge(37, 3, D, False)
    cases["merge-half"] = merge(2, 4, 128, True)
    for V in VOCABULARIES:
        cases[f"logprob-{V}"] = logprob(3, V, 0.7, None, True)
    cases["logprob-no-entropy"] = logprob(1, 1000, 1.0, None, False)
    cases["logprob-softcap"] = logprob(2, 8200, 1.3, 30.0, True)
    return cases


ODD = ("norm-80", "rope-80-32", "norm-rope-96-96", "norm-rope-128-96", "swiglu-narrow", "merge-80", "merge-half",
       "experts-gpt-oss", "low-rank", "logprob-8193", "logprob-softcap")  # fmt: skip


def odd() -> dict[str, Case]:
    """The small cases with the least regular sizes, for a GPU in every dtype."""
    cases = small()
    return {f"{name}-small": cases[name] for name in ODD}


def large() -> dict[str, Case]:
    """Real shapes, for a GPU."""
    cases: dict[str, Case] = {}
    for H in (2304, 2560, 3840, 4096):
        cases[f"norm-{H}"] = norm(1021, H, H in (2304, 3840))
    cases["rope-qwen3-4b"] = rope(1021, 128, 128, (32, 8), True)
    cases["rope-llama"] = rope(1021, 128, 128, (32, 8), False)
    cases["rope-gemma3-12b"] = rope(1021, 256, 256, (16, 8), True, unit_offset=True)
    cases["rope-gpt-oss"] = rope(1021, 64, 64, (64, 8), False)
    cases["swiglu-qwen3-4b"] = swiglu(1021, 9728, "silu")
    cases["swiglu-gemma3-12b"] = swiglu(1021, 15360, "gelu_tanh")
    cases["experts-gpt-oss-20b"] = experts(1021, 4, 32, 2880, kernels.Gating(True, 7.0, 1.702), True)
    cases["experts-qwen3-30b"] = experts(509, 8, 128, 768, kernels.Gating(), False)
    cases["low-rank-gpt-oss-20b"] = low_rank(4093, 32, 5760, 32)
    cases["merge-qwen3-4b"] = merge(1021, 32, 128, False)
    cases["logprob-qwen3"] = logprob(257, 151_936, 0.9, None, True)
    cases["logprob-gemma2"] = logprob(67, 256_000, 1.0, 30.0, True)
    cases["logprob-gemma3"] = logprob(67, 262_144, 1.0, None, False)
    cases["logprob-odd-vocabulary"] = logprob(67, 151_669, 1.0, None, True)
    return cases


def dequant(name: str, shape: tuple[int, ...]) -> Case:
    from longreach.quant import FORMATS

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, torch.float32)
        return [FORMATS[name].quantize(make(*shape, scale=0.03)).dequantize(dtype)]

    return run
