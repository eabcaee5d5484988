"""An export against the reference: differences of logits, and how much of each adapter arrived in the weights.

Shape suffixes: S sequence, V vocabulary, N sampled rows, I the rest of a weight's last dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Limit:
    """The largest `relative` difference and `kl` that an export of a kind may have."""

    relative: float
    kl: float

    def broken_by(self, difference: Difference) -> list[str]:
        """What is beyond the limit, in words. NaN is beyond any."""
        found = []
        if not difference.relative <= self.relative:
            found.append(f"relative difference {difference.relative:.2e}, limit {self.relative:.2e}")
        if not difference.kl <= self.kl:
            found.append(f"KL {difference.kl:.2e} nats, limit {self.kl:.2e}")
        return found


# What writing the weights in a format costs on models without an adapter (bench/export.py; docs/export.md has the measurements),
# doubled. The first two are for a reload in Transformers computing in that dtype, the others for libllama.
LIMITS = {
    "fp32": Limit(2.0e-2, 5e-3),
    "half": Limit(6.0e-2, 2e-2),
    "f32": Limit(2.0e-3, 1e-4),
    "f16": Limit(4.0e-3, 1e-3),
    "bf16": Limit(4.0e-2, 2e-2),
    "q8_0": Limit(8.0e-2, 5e-2),
}


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
    """How much of an adapter's change to one weight arrived: 1 is all of it.

    Attributes:
        share: projection of (exported - base) on the change.
        error: its standard error from the rounding of the exported weights.
    """

    target: str
    share: float
    error: float

    @property
    def fits(self) -> bool:
        return abs(self.share - 1.0) <= 0.02 + 6.0 * self.error


def arrivals(samples: Sequence[Sample], exported: Mapping[str, Tensor], *, rounding: float) -> list[Arrival]:
    """Compare the exported weights with base + change, for each weight and expert.

    Args:
        exported: parameters of the reloaded model by name, or those that were read back.
        rounding: half a unit in the last place of the export's dtype, relative (2**-9 for bf16).
    """
    found = []
    for sample in samples:
        name = sample.target if sample.expert is None else f"{sample.target}[{sample.expert}]"
        energy = float(sample.delta_NI.square().sum())
        weight = exported.get(sample.target)
        if energy == 0.0:
            continue  # nothing to arrive: B is zero before the first step
        if weight is None:
            found.append(Arrival(name, float("nan"), 0.0))
            continue
        weight = weight if sample.expert is None else weight[sample.expert]
        got_NI = weight[sample.rows].detach().float().cpu() - sample.base_NI
        if got_NI.shape != sample.delta_NI.shape:
            found.append(Arrival(name, float("nan"), 0.0))
            continue
        share = float((got_NI * sample.delta_NI).sum()) / energy
        noise = rounding * float(((sample.base_NI + sample.delta_NI).square() * sample.delta_NI.square()).sum()) ** 0.5
        found.append(Arrival(name, share, noise / energy))
    return found


def as_record(reference: Reference, diff: Difference, arrived: Sequence[Arrival]) -> dict[str, Any]:
    """For verification.json."""
    record: dict[str, Any] = {"logits": asdict(diff), "positions": sum(len(p.ids) for p in reference.probes)}
    if arrived:
        worst = max(arrived, key=lambda a: float("inf") if a.share != a.share else abs(a.share - 1.0) - 6.0 * a.error)
        record["adapter"] = {"weights": len(arrived), "worst": asdict(worst)}
    return record
