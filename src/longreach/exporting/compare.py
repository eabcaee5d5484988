"""An export against the reference: differences of logits, and how much of each adapter arrived in the weights.

Shape suffixes: S sequence, V vocabulary, N sampled rows, I the rest of a weight's last dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .limits import Limit
from .probe import Reference, Sample


@dataclass(frozen=True)
class Difference:
    """How far logits are from the reference's.

    Attributes:
        largest, mean: absolute difference, logits.
        relative: median over positions of |difference| / |logits|, both about their mean over the vocabulary (a shift of all
            logits changes no probability). Does not depend on the model's scale, and not on a few positions where a router
            chose another expert.
        agreement: share of positions with the same most likely token.
        kl: mean KL divergence from the reference's next-token distribution, nats.
    """

    largest: float
    mean: float
    relative: float
    agreement: float
    kl: float


def beyond(limit: Limit, found: Difference) -> list[str]:
    """What is beyond the limit, in words. NaN is beyond any."""
    faults = []
    if not found.relative <= limit.relative:
        faults.append(f"relative difference {found.relative:.2e}, limit {limit.relative:.2e}")
    if not found.kl <= limit.kl:
        faults.append(f"KL {found.kl:.2e} nats, limit {limit.kl:.2e}")
    return faults


def difference(reference: Sequence[Tensor], other: Sequence[Tensor]) -> Difference:
    """Compare two lists of logits, [S, V] each; columns that only the other has (padding of the vocabulary) are left out."""
    largest, total, count = 0.0, 0.0, 0
    relative, agreement, kl = [], [], []
    for r_SV, o_SV in zip(reference, other, strict=True):
        o_SV = o_SV[:, : r_SV.shape[1]]
        if o_SV.shape != r_SV.shape:
            raise ValueError(f"logits of shape {tuple(o_SV.shape)}, expected {tuple(r_SV.shape)}")
        d_SV = o_SV - r_SV
        largest = max(largest, float(d_SV.abs().max())) if torch.isfinite(d_SV).all() else float("nan")
        total += float(d_SV.abs().sum())
        count += d_SV.numel()
        centred_r, centred_d = r_SV - r_SV.mean(-1, keepdim=True), d_SV - d_SV.mean(-1, keepdim=True)
        relative.append(centred_d.norm(dim=-1) / centred_r.norm(dim=-1).clamp_min(1e-30))
        agreement.append((r_SV.argmax(-1) == o_SV.argmax(-1)).float())
        logp, logq = r_SV.double().log_softmax(-1), o_SV.double().log_softmax(-1)
        kl.append((logp.exp() * (logp - logq)).sum(-1))
    return Difference(
        largest,
        total / count,
        float(torch.cat(relative).median()),
        float(torch.cat(agreement).mean()),
        float(torch.cat(kl).mean()),
    )


@dataclass(frozen=True)
class Arrival:
    """How much of an adapter's change to one weight arrived.

    Attributes:
        share: projection of (exported - base) on (base + change, rounded, - base): 1 is all that rounding leaves of it.
        error: its standard error, from elements that round either way.
        kept: what rounding leaves of the change: a change smaller than half a unit in the last place is lost.
    """

    target: str
    share: float
    error: float
    kept: float

    @property
    def fits(self) -> bool:
        return abs(self.share - 1.0) <= 0.05 + 3.0 * self.error


def arrivals(samples: Sequence[Sample], exported: Mapping[str, Tensor], *, dtype: torch.dtype) -> list[Arrival]:
    """Compare the exported weights with base + change, for each weight and expert.

    Args:
        exported: parameters of the reloaded model by name, or those that were read back.
        dtype: of the exported weights.
    """
    found = []
    for sample in samples:
        name = sample.target if sample.expert is None else f"{sample.target}[{sample.expert}]"
        wanted_NI = (sample.base_NI + sample.delta_NI).to(dtype).float() - sample.base_NI
        energy, whole = float(wanted_NI.square().sum()), float(sample.delta_NI.square().sum())
        if whole == 0.0:
            continue  # nothing to arrive: B is zero before the first step
        weight = exported.get(sample.target)
        if weight is not None and sample.expert is not None:
            weight = weight[sample.expert]
        got = None if weight is None else weight[sample.rows].detach().float().cpu()
        if got is None or got.shape != sample.base_NI.shape:
            found.append(Arrival(name, float("nan"), 0.0, 0.0))
            continue
        kept = float((wanted_NI * sample.delta_NI).sum()) / whole
        if energy == 0.0:
            found.append(Arrival(name, float(torch.equal(got, sample.base_NI)), 0.0, 0.0))
            continue
        share = float(((got - sample.base_NI) * wanted_NI).sum()) / energy
        step_NI = torch.finfo(dtype).eps / 2 * (sample.base_NI + sample.delta_NI)
        noise = 0.5 * float((step_NI * wanted_NI).norm())
        found.append(Arrival(name, share, noise / energy, kept))
    return found


def as_record(reference: Reference, diff: Difference, arrived: Sequence[Arrival]) -> dict[str, Any]:
    """For verification.json."""
    record: dict[str, Any] = {"logits": asdict(diff), "positions": sum(len(p.ids) for p in reference.probes)}
    if arrived:
        record["adapter"] = arrival_record(arrived)
    return record


def arrival_record(arrived: Sequence[Arrival]) -> dict[str, Any]:
    """How many weights, the one that fits worst, and the mean of what rounding leaves."""
    worst = max(arrived, key=lambda a: float("inf") if a.share != a.share else abs(a.share - 1.0) - 3.0 * a.error)
    kept = sum(a.kept for a in arrived) / len(arrived)
    return {"weights": len(arrived), "kept": kept, "worst": asdict(worst)}


KEPT_ENOUGH = 0.9


def rounding_notes(arrived: Sequence[Arrival], dtype: torch.dtype) -> list[str]:
    """What the user should know if rounding loses much of the adapter."""
    kept = sum(a.kept for a in arrived) / len(arrived) if arrived else 1.0
    if kept >= KEPT_ENOUGH:
        return []
    name = str(dtype).removeprefix("torch.")
    other = "quantization='fp16' keeps more, " if dtype == torch.bfloat16 else ""
    return [f"rounding to {name} leaves {kept:.0%} of the adapter's change; {other}format='adapter' keeps all"]
