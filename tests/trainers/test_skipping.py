"""Rows without gradient are skipped before any forward, and change nothing; quarantined completions are masked out."""

from __future__ import annotations

import pytest
import torch

from . import tiny

ALL_ZERO, SOME_ZERO = "all", "some"


def tie(which):
    """Equal rewards within groups: in every group, or in those of even prompts."""

    def reward(completions, number, **kwargs):
        base = tiny.reward(completions)
        return [0.5 if which == ALL_ZERO or n % 2 == 0 else b for n, b in zip(number, base)]

    return reward


@pytest.fixture
def scored(monkeypatch):
    """Tokens of every tree that was scored."""
    from longreach.trainers import tree_loss

    seen, honest = [], tree_loss.score

    def score(model, tree, **kwargs):
        seen.append(tree.tokens)
        return honest(model, tree, **kwargs)

    monkeypatch.setattr(tree_loss, "score", score)
    return seen


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "vespo"])
def test_groups_with_equal_rewards_are_skipped_exactly(loss_type, tmp_path, scored):
    settings = dict(
        rewards=tie(SOME_ZERO), loss_type=loss_type, num_iterations=2, per_device_train_batch_size=4, max_steps=4
    )
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    tiny.assert_same_run(stock, own, ("loss", "grad_norm", "reward", "clip_ratio/region_mean", "num_tokens"))
    skipped = [h["skipped/groups"] for h in tiny.history(own)]
    assert 0 < sum(skipped) < len(skipped) and skipped == [h["skipped/rows"] for h in tiny.history(own)]


def test_nothing_to_learn_runs_no_forward_and_still_moves_by_momentum_and_decay(tmp_path, scored):
    def first_step_only(completions, trainer_state, **kwargs):
        return tiny.reward(completions) if trainer_state.global_step == 0 else [1.0] * len(completions)

    settings = dict(rewards=first_step_only, weight_decay=0.1)
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    assert len(scored) == 2  # the two micro-batches of the first step
    tiny.assert_same_run(stock, own)
    assert [h["skipped/rows"] for h in tiny.history(own)] == [0.0, 1.0, 1.0]
    assert [h["entropy"] is None for h in tiny.history(own)] == [False, True, True]


@pytest.mark.parametrize(
    "term", [dict(beta=0.04, peft=tiny.lora()), dict(entropy_coef=0.1), dict(top_entropy_quantile=0.5)]
)
def test_rows_on_which_another_term_depends_are_not_skipped(term, tmp_path):
    settings = dict(rewards=tie(ALL_ZERO), loss_type="grpo") | term
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    tiny.assert_same_run(stock, own, ("loss", "grad_norm", "entropy"))
    assert all(h["skipped/rows"] == 0 for h in tiny.history(own))


def test_entropy_metric_is_that_of_the_rows_computed(tmp_path):
    settings = dict(rewards=tie(SOME_ZERO), per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=1)
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    (a,), (b,) = tiny.history(stock, "entropy", "loss"), tiny.history(own, "entropy", "loss", "skipped/rows")
    assert b["skipped/rows"] == 0.5 and a["entropy"] != b["entropy"]
    assert b["entropy"] == pytest.approx(a["entropy"], rel=0.05)


def test_one_completion_without_reward_leaves_the_loss_and_the_statistics(tmp_path, scored):
    def strict(completions, **kwargs):
        rewards = tiny.reward(completions)
        rewards[1] = None
        return rewards

    own = tiny.grpo(True, tmp_path, rewards=strict, train=False, per_device_train_batch_size=8)
    own.model.train()
    rows = [{"prompt": p, "number": 0} for p in tiny.prompts(4)["prompt"] for _ in range(4)]
    batch = own._generate_and_score_completions(rows)
    mask = batch["completion_mask"]
    assert mask[1].sum() == 0 and (mask.sum(1) > 0).sum() == 15
    assert batch["num_items_in_batch"] == mask.sum()
    kept = torch.tensor([float(r) for r in (batch["advantages"][i] for i in (0, 2, 3))])
    assert batch["advantages"][1] == 0 and abs(kept.sum()) < 1e-5
    assert own._metrics["train"]["quarantined"] == [1 / 16]


def test_quarantine_leaves_the_kl_term_too(tmp_path):
    """Like a truncated completion under `mask_truncated_completions`, with TRL's own masking as the reference."""

    def strict(completion_ids, **kwargs):
        return [float(len(c) % 3) if len(c) > 4 else None for c in completion_ids]

    class Masked(tiny.StockGRPO):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batch["completion_mask"] = batch["completion_mask"] * (batch["completion_mask"].sum(1, keepdim=True) > 4)
            batch["num_items_in_batch"] = batch["completion_mask"].sum()
            return batch

    settings = dict(rewards=strict, beta=0.04, peft=tiny.lora(), loss_type="dapo")
    stock = tiny.grpo(False, tmp_path, trainer=Masked, **settings)
    tiny.assert_same_run(stock, tiny.grpo(True, tmp_path, **settings), ("loss", "grad_norm", "kl"))
