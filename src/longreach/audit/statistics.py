"""Intervals and group statistics of an audit, in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class GroupHarm:
    """What an exploit's reward does inside GRPO groups; see `group_harm`."""

    advantage: float = 0.0
    honest_advantage: float = 0.0
    beats_best_honest: float = 0.0


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a proportion (Wilson 1927); ``(0, 1)`` when ``n`` is 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, _Z95 * _Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == n else min(1.0, centre + half)
    return low, high


def cluster_bootstrap(
    clusters: Mapping[str, Sequence[bool]], *, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The 95% percentile interval of a proportion when whole tasks are drawn again, not single completions.

    Completions of one task stand or fall together, which Wilson's interval ignores. ``(0, 1)`` with fewer than two tasks.
    With no or only hits it is as narrow as a bootstrap must be, a point; read it beside Wilson's.
    """
    groups = [list(values) for values in clusters.values() if values]
    if len(groups) < 2:
        return 0.0, 1.0
    rng, shares = random.Random(seed), []
    for _ in range(draws):
        drawn = [value for group in rng.choices(groups, k=len(groups)) for value in group]
        shares.append(sum(drawn) / len(drawn))
    shares.sort()
    return shares[int(0.025 * draws)], shares[min(draws - 1, int(0.975 * draws))]


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """GRPO advantages of a group, ``(r - mean) / (std + 1e-4)`` with the unbiased std (Shao et al. 2024, as in TRL).

    A masked reward (``None``) is left out of the statistics and has advantage 0.
    """
    paid = [r for r in rewards if r is not None]
    if len(paid) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(paid) / len(paid)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in paid) / (len(paid) - 1))
    return [0.0 if r is None else (r - mean) / (std + 1e-4) for r in rewards]


def group_harm(
    exploit: float | None,
    honest: Sequence[float],
    wrong: Sequence[float],
    *,
    size: int = 8,
    groups: int = 300,
    seed: int = 0,
) -> GroupHarm:
    """The exploit's mean advantage in groups of itself and ``size - 1`` honest or wrong completions.

    The share of honest ones is drawn for each group from {1/4, 1/2, 3/4}: a policy that has begun to learn the task. An
    advantage above 0 is a gradient towards the exploit. ``beats_best_honest`` is the share of groups with an honest
    completion in which the exploit is paid at least as much as the best of them.
    """
    if exploit is None or not honest or not wrong:
        return GroupHarm()
    rng = random.Random(seed)
    own, others, beats, with_honest = 0.0, [], 0, 0
    for _ in range(groups):
        share = rng.choice((0.25, 0.5, 0.75))
        roles = [rng.random() < share for _ in range(size - 1)]
        rewards: list[float | None] = [rng.choice(honest) if role else rng.choice(wrong) for role in roles]
        z = advantages([exploit, *rewards])
        own += z[0]
        good = [(r, a) for r, a, role in zip(rewards, z[1:], roles) if role and r is not None]
        others += [a for _, a in good]
        if good:
            with_honest += 1
            beats += exploit >= max(r for r, _ in good)
    mean_honest = sum(others) / len(others) if others else 0.0
    return GroupHarm(own / groups, mean_honest, beats / with_honest if with_honest else 0.0)


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile by linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
