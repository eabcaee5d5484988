"""Every op in plain torch: the specification the Triton kernels are tested against, and what CPU tensors run.

Arithmetic is fp32 (fp64 for fp64 inputs); results are rounded to the input's dtype where the docstring of the public op
says so. Shape suffixes: T tokens, H hidden size or query heads, K key heads, D head size, R rotary width, F MLP width,
C rows of a slice, V vocabulary; for experts k choices of a token, S slots, R rows, E experts, M hidden size, F width of
an expert, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .experts import Gating


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and of sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _put(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


# --- norm ---------------------------------------------------------------------------------------------------------


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, *, unit_offset: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dtype = x_TH.dtype if out is None else out.dtype
    x = wide(x_TH)
    rstd_T = torch.rsqrt(x.square().mean(-1) + eps)
    xhat = x * rstd_T[:, None]
    if unit_offset:
        y = xhat * (1 + wide(weight_H))
    else:
        y = wide(xhat.to(dtype)) * wide(weight_H)
    return _put(out, y.to(dtype)), rstd_T


def rms_norm_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    rstd_T: Tensor,
    *,
    unit_offset: bool = False,
    add: Tensor | None = None,
    need_dweight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    rstd = rstd_T[:, None]
    dy, xhat = wide(dy_TH), wide(x_TH) * rstd
    dweight_H = (dy * xhat).sum(0).to(weight_H.dtype) if need_dweight else None
    g = dy * (wide(weight_H) + (1 if unit_offset else 0))
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if add is not None:
        dx = dx + wide(add)
    target = out if out is not None else add
    return _put(target, dx if target is not None else dx.to(x_TH.dtype)), dweight_H


# --- rope ---------------------------------------------------------------------------------------------------------


def qk_norm_rope(
    q_THD: Tensor,
    k_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    *,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    outs, stats = [], []
    for x, weight, out in ((q_THD, q_weight_D, q_out), (k_TKD, k_weight_D, k_out)):
        y = wide(x)
        if weight is not None:
            rstd = torch.rsqrt(y.square().mean(-1) + eps)
            y = y * rstd[..., None] * (wide(weight) + (1 if unit_offset else 0))
            stats.append(rstd)
        outs.append(_put(out, _rotate(y, wide(cos_TR), wide(sin_TR)).to(x.dtype)))
    return outs[0], outs[1], (stats[0], stats[1]) if stats else None


def _rotate(x: Tensor, cos_TR: Tensor, sin_TR: Tensor, transposed: bool = False) -> Tensor:
    """x * cos + rotate_half(x) * sin on the first R columns; `transposed` applies the transpose of that map."""
    width = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None].to(x.dtype), sin_TR[:, None].to(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    if transposed:
        a, b = (turned * sin).chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([b, -a], -1), rest], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def qk_norm_rope_backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    q_THD: Tensor | None,
    k_TKD: Tensor | None,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    stats: tuple[Tensor, Tensor] | None = None,
    unit_offset: bool = False,
    *,
    need_dweight: bool = False,
    dq_out: Tensor | None = None,
    dk_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    grads: list[Tensor] = []
    dweights: list[Tensor | None] = []
    for i, (dy, x, weight, out) in enumerate(
        ((dq_THD, q_THD, q_weight_D, dq_out), (dk_TKD, k_TKD, k_weight_D, dk_out))
    ):
        g = _rotate(wide(dy), wide(cos_TR), wide(sin_TR), transposed=True)
        dweight = None
        if weight is not None:
            assert x is not None and stats is not None
            rstd = stats[i][..., None]
            xhat = wide(x) * rstd
            if need_dweight:
                dweight = (g * xhat).sum((0, 1)).to(weight.dtype)
            g = g * (wide(weight) + (1 if unit_offset else 0))
            g = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
        grads.append(_put(dy if out is None else out, g.to(dy.dtype if out is None else out.dtype)))
        dweights.append(dweight)
    return grads[0], grads[1], dweights[0], dweights[1]


# --- swiglu -------------------------------------------------------------------------------------------------------

# tanh's form of GELU is g * sigmoid(2u) with u = sqrt(2/pi) * (g + 0.044715 g^3), so both activations are g * sigmoid(z(g)).
TWO_ROOT = 2 * (2 / torch.pi) ** 0.5
CUBIC = 0.044715


def _gated(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation and its derivative."""
    if activation == "silu":
        z, slope = gate, torch.ones_like(gate)
    else:
        z = TWO_ROOT * (gate + CUBIC * gate**3)
        slope = TWO_ROOT * (1 + 3 * CUBIC * gate.square())
    s = torch.sigmoid(z)
    return gate * s, s + gate * s * (1 - s) * slope


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    return _put(out, (_gated(wide(gate_TF), activation)[0] * wide(up_TF)).to(gate_TF.dtype))


def swiglu_backward(
    dh_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", return_h: bool = False
) -> tuple[Tensor, ...]:
    act, slope = _gated(wide(gate_TF), activation)
    dh, up = wide(dh_TF), wide(up_TF)
    dgate, dup, h = dh * up * slope, dh * act, act * up
    gate_TF.copy_(dgate)
    up_TF.copy_(dup)
    if not return_h:
        return gate_TF, up_TF
    return gate_TF, up_TF, dh_TF.copy_(h)


# --- merge --------------------------------------------------------------------------------------------------------


def merge_blocks(out_a_CHD: Tensor, lse_a_HC: Tensor, out_b_CHD: Tensor, lse_b_HC: Tensor) -> None:
    merged_HC = torch.logaddexp(lse_a_HC, lse_b_HC)
    weight_a, weight_b = _weight(lse_a_HC, merged_HC), _weight(lse_b_HC, merged_HC)
    a = torch.where(weight_a > 0, wide(out_a_CHD) * weight_a, 0)
    b = torch.where(weight_b > 0, wide(out_b_CHD) * weight_b, 0)
    out_a_CHD.copy_(a + b)
    lse_a_HC.copy_(merged_HC)


def apply_sink(out_CHD: Tensor, lse_HC: Tensor, sinks_H: Tensor) -> None:
    merged_HC = torch.logaddexp(lse_HC, sinks_H.to(lse_HC.dtype)[:, None])
    weight = _weight(lse_HC, merged_HC)
    out_CHD.copy_(torch.where(weight > 0, wide(out_CHD) * weight, 0))
    lse_HC.copy_(merged_HC)


def _weight(lse_HC: Tensor, merged_HC: Tensor) -> Tensor:
    """exp(lse - merged) as [C, H, 1]. Where both are -inf, no key at all seen, it is NaN, which `> 0` takes out as well."""
    return torch.exp(lse_HC - merged_HC).transpose(0, 1)[..., None]


# --- logprob ------------------------------------------------------------------------------------------------------


def row_logprob(
    logits_CV: Tensor,
    labels_C: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    z_CV, _ = _scaled(logits_CV, temperature, softcap)
    lse_C = torch.logsumexp(z_CV, -1)
    logprob_C = z_CV.gather(1, labels_C[:, None].long())[:, 0] - lse_C
    entropy_C = None
    if want_entropy:
        logp_CV = z_CV - lse_C[:, None]
        p_CV = logp_CV.exp()
        entropy_C = -torch.where(p_CV > 0, p_CV * logp_CV, 0).sum(-1)
    return logprob_C, lse_C, entropy_C


def row_logprob_backward(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    dlogprob_C: Tensor,
    dentropy_C: Tensor | None = None,
    entropy_C: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    z_CV, slope = _scaled(logits_CV, temperature, softcap)
    logp_CV = z_CV - lse_C[:, None]
    p_CV = logp_CV.exp()
    dlogprob = dlogprob_C.to(z_CV.dtype)[:, None]
    dz_CV = -p_CV * dlogprob
    if dentropy_C is not None:
        assert entropy_C is not None
        term = torch.where(p_CV > 0, p_CV * (logp_CV + entropy_C[:, None]), 0)
        dz_CV -= dentropy_C.to(z_CV.dtype)[:, None] * term
    dz_CV.scatter_add_(1, labels_C[:, None].long(), dlogprob)
    return logits_CV.copy_(dz_CV * slope)


def _scaled(logits_CV: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """z = softcap(logits) / temperature and dz/dlogits."""
    x = wide(logits_CV)
    if softcap is None:
        return x / temperature, 1 / temperature
    t = torch.tanh(x / softcap)
    return softcap * t / temperature, (1 - t * t) / temperature


# --- dequant ------------------------------------------------------------------------------------------------------

# The 16 quantiles of a normal distribution, scaled to [-1, 1], of QLoRA (arXiv 2305.14314, appendix E), and the values of
# the float format e2m1 (OCP Microscaling Formats 1.0, section 5.3.3), both by code.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


NESTED_BLOCK = 256  # scales that share a scale of their own
SLICE = 2**22  # weights that are worked on at once


def dequantize_nf4(
    codes: Tensor, absmax: Tensor, out: Tensor, *, block: int = 64, nested: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    codes, flat = codes.reshape(-1), out.view(-1)
    if nested is not None:
        outer, table, offset = nested
        absmax = table[absmax.long()] * outer.repeat_interleave(NESTED_BLOCK)[: len(absmax)] + offset
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=codes.device)
    # Some blocks at a time: indices take eight bytes a code.
    step = block * max(1, SLICE // block)
    for start in range(0, len(flat), step):
        part = codes[start // 2 : (start + step) // 2].long()
        value = values[torch.stack((part >> 4, part & 15), -1).view(-1)][: len(flat) - start]
        scale = absmax[start // block : (start + step) // block].repeat_interleave(block)[: len(value)]
        flat[start : start + step] = value * scale
    return out


def dequantize_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    dtype = wide_dtype(out.dtype)
    values = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
    codes, scales, flat = codes.reshape(-1, 16), scales.reshape(-1, 1), out.view(-1, 32)
    rows = SLICE // 32
    for start in range(0, len(flat), rows):
        part = codes[start : start + rows].long()
        value = values[torch.stack((part & 15, part >> 4), -1).view(-1, 32)]
        flat[start : start + rows] = value * torch.exp2(scales[start : start + rows].to(dtype) - 127)
    return out


# --- experts ------------------------------------------------------------------------------------------------------


def gather_rows(x_TM: Tensor, row_R: Tensor) -> Tensor:
    return x_TM[row_R]


def combine_rows(
    y_SM: Tensor,
    place_Tk: Tensor,
    weight_Tk: Tensor | None = None,
    *,
    expert_Tk: Tensor | None = None,
    bias_EM: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    total = torch.zeros((), dtype=wide(y_SM).dtype, device=y_SM.device)
    for j in range(place_Tk.shape[1]):
        value = wide(y_SM[place_Tk[:, j]])
        if bias_EM is not None and expert_Tk is not None:
            value = value + wide(bias_EM)[expert_Tk[:, j]]
        total = total + (value if weight_Tk is None else value * wide(weight_Tk[:, j, None]))
    if add is not None:
        total = total + wide(add)
    return _put(out, total.to(y_SM.dtype if add is None else add.dtype))


def _gate_up(x_RG: Tensor, gating: Gating, expert_R: Tensor | None, bias_EG: Tensor | None) -> tuple[Tensor, Tensor]:
    x = wide(x_RG)
    if bias_EG is not None and expert_R is not None:
        x = x + wide(bias_EG)[expert_R]
    return (x[:, ::2], x[:, 1::2]) if gating.interleaved else x.chunk(2, -1)  # type: ignore[return-value]


def expert_swiglu(
    x_RG: Tensor, gating: Gating, expert_R: Tensor | None = None, bias_EG: Tensor | None = None
) -> Tensor:
    gate, up = _gate_up(x_RG, gating, expert_R, bias_EG)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit) + 1
    return (gate * torch.sigmoid(gating.alpha * gate) * up).to(x_RG.dtype)


def expert_swiglu_backward(
    dh_RF: Tensor,
    x_RG: Tensor,
    weight_R: Tensor,
    gating: Gating,
    expert_R: Tensor | None = None,
    bias_EG: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _gate_up(x_RG, gating, expert_R, bias_EG)
    gate_open = up_open = torch.ones_like(gate)
    if gating.limit is not None:
        gate_open, up_open = (gate <= gating.limit).to(gate), (up.abs() <= gating.limit).to(up)
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit) + 1
    s = torch.sigmoid(gating.alpha * gate)
    h, dh = gate * s * up, wide(dh_RF)
    dweight_R = (dh * h).sum(-1)
    dh = dh * wide(weight_R)[:, None]
    dgate = dh * up * (s + gating.alpha * gate * s * (1 - s)) * gate_open
    dup = dh * gate * s * up_open
    if gating.interleaved:
        x_RG.copy_(torch.stack([dgate, dup], -1).flatten(1))
    else:
        x_RG.copy_(torch.cat([dgate, dup], -1))
    return x_RG, dh_RF.copy_(h), dweight_R


def add_low_rank(y_RO: Tensor, t_Rr: Tensor, b_ErO: Tensor, offsets_E: Tensor, scale: float = 1.0) -> Tensor:
    stops = offsets_E.tolist()
    for e, (start, stop) in enumerate(zip([0, *stops], stops)):
        if stop > start:
            rows = y_RO[start:stop]
            rows.copy_(wide(rows) + scale * (wide(t_Rr[start:stop]) @ wide(b_ErO[e])))
    return y_RO
