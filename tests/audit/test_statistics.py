"""Intervals and group statistics against values worked out elsewhere."""

import random
import statistics

import pytest

from longreach.audit.statistics import advantages, cluster_bootstrap, group_harm, quantile, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (1, 29, 0.0061, 0.1718), (0, 0, 0.0, 1.0)],
)
def test_wilson(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers_the_truth_about_95_times_in_100():
    rng, covered = random.Random(0), 0
    for _ in range(2000):
        low, high = wilson(sum(rng.random() < 0.3 for _ in range(40)), 40)
        covered += low <= 0.3 <= high
    assert 0.93 <= covered / 2000 <= 0.97


def test_the_bootstrap_over_tasks_is_wider_when_tasks_agree_within():
    clustered = {str(i): [i % 2 == 0] * 10 for i in range(10)}
    mixed = {str(i): [True, False] * 5 for i in range(10)}
    low, high = cluster_bootstrap(clustered)
    assert high - low > 0.4
    assert cluster_bootstrap(mixed) == (0.5, 0.5)
    assert cluster_bootstrap({"one": [True, False]}) == (0.0, 1.0)
    assert cluster_bootstrap(clustered) == cluster_bootstrap(clustered)


def test_advantages_are_grpos():
    rewards = [1.0, 0.0, 0.0, 0.5]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert advantages(rewards) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards])
    assert advantages([2.0, 2.0]) == [0.0, 0.0]
    masked = advantages([1.0, None, 0.0])
    assert masked[1] == 0.0 and masked[0] == -masked[2] > 0
    assert advantages([1.0]) == [0.0]


def test_group_harm():
    paid, unpaid = group_harm(1.0, [1.0], [0.0]), group_harm(0.0, [1.0], [0.0])
    assert paid.advantage > 0.5 and paid.beats_best_honest == 1.0
    assert unpaid.advantage < -0.5 and unpaid.beats_best_honest == 0.0
    assert group_harm(5.0, [1.0], [0.0]).honest_advantage < 0 < unpaid.honest_advantage
    assert group_harm(None, [1.0], [0.0]).advantage == 0.0


def test_quantile():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.99) == pytest.approx(0.99)
