"""Stock TRL's GRPOTrainer and ours: the same completions give the same loss, gradient norm and parameters (fp32)."""

from __future__ import annotations

import pytest
import torch

from . import tiny

SPLIT = dict(per_device_train_batch_size=2, gradient_accumulation_steps=8)  # splits groups of 4
USUAL = [
    dict(loss_type="dapo"),
    dict(loss_type="grpo", importance_sampling_level="sequence"),
    dict(loss_type="bnpo"),
    dict(loss_type="dr_grpo"),
    dict(loss_type="cispo", epsilon_high=0.3),
]
OTHERS = [
    dict(loss_type="sapo"),
    dict(loss_type="luspo", importance_sampling_level="sequence"),
    dict(loss_type="vespo"),
]


def name_of(settings: dict) -> str:
    return "-".join(str(v) for v in settings.values())


@pytest.mark.parametrize("settings", USUAL + OTHERS, ids=name_of)
def test_every_loss(settings, tmp_path):
    tiny.assert_same_run(tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings))


@pytest.mark.parametrize("settings", USUAL + [pytest.param(s, marks=pytest.mark.slow) for s in OTHERS], ids=name_of)
def test_every_loss_keeps_its_normalizer_when_micro_batches_are_joined(settings, tmp_path):
    settings = settings | SPLIT
    own = tiny.grpo(True, tmp_path, **settings)
    assert own.args.per_device_train_batch_size == 4 and own.args.gradient_accumulation_steps == 4
    tiny.assert_same_run(tiny.grpo(False, tmp_path, **settings), own)


def test_steps_proportional_to_the_gradient(tmp_path):
    """Adam divides by the gradient's size; plain steps show an error of any size in proportion."""
    settings = dict(optim="sgd", learning_rate=0.05, max_grad_norm=0.0)
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    tiny.assert_same_run(stock, own)
    start = dict(tiny.model().named_parameters())
    moved = max((p - start[n]).abs().max().item() for n, p in tiny.trained(own).items())
    assert moved > 0.05


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss_type="dapo"),
        dict(loss_type="grpo", beta=0.04),
        dict(loss_type="grpo", beta=0.04) | SPLIT,
        pytest.param(dict(loss_type="dapo", num_iterations=2), marks=pytest.mark.slow),
        pytest.param(
            dict(loss_type="dapo", gradient_accumulation_steps=1, per_device_train_batch_size=16),
            marks=pytest.mark.slow,
        ),
    ],
    ids=name_of,
)
def test_lora(settings, tmp_path):
    names = ("loss", "grad_norm", "reward") + (("kl", "entropy") if "beta" in settings else ())
    stock = tiny.grpo(False, tmp_path, peft=tiny.lora(), **settings)
    own = tiny.grpo(True, tmp_path, peft=tiny.lora(), **settings)
    tiny.assert_same_run(stock, own, names)


def test_separate_reference_model(tmp_path):
    tiny.model().save_pretrained(tmp_path / "model")

    def policy():
        return tiny.T.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")

    settings = dict(loss_type="grpo", beta=0.04)
    stock = tiny.grpo(False, tmp_path, policy=policy(), **settings)
    own = tiny.grpo(True, tmp_path, policy=policy(), **settings)
    tiny.assert_same_run(stock, own, ("loss", "grad_norm", "kl", "entropy"))


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss_type="dapo", num_iterations=2),
        dict(loss_type="grpo", steps_per_generation=4, num_iterations=2, max_steps=6),
        dict(loss_type="bnpo", entropy_coef=0.05) | SPLIT,
        dict(loss_type="dapo", top_entropy_quantile=0.3) | SPLIT,
        dict(
            loss_type="grpo",
            use_adaptive_entropy=True,
            entropy_target=9.0,
            entropy_coef_delta=0.01,
            entropy_coef_max=1.0,
        )
        | SPLIT,
        dict(loss_type="dapo", mask_truncated_completions=True, max_completion_length=6),
        dict(loss_type="dapo", scale_rewards="batch", temperature=0.7),
        dict(loss_type="dr_grpo", off_policy_mask_threshold=0.01, delta=2.0, num_iterations=2),
    ],
    ids=name_of,
)
def test_terms_and_schedules(settings, tmp_path):
    tiny.assert_same_run(tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings))


def test_metrics_are_trls_when_every_row_counts(tmp_path):
    settings = dict(loss_type="grpo", entropy_coef=0.01) | SPLIT
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    ours_only = {"skipped/rows", "skipped/groups", "quarantined"}
    for x, y in zip(tiny.history(stock), tiny.history(own)):
        assert set(y) - set(x) == ours_only and set(x) <= set(y)
        for key in set(x) - {"step_time"}:
            assert y[key] == pytest.approx(x[key], rel=1e-5, abs=1e-6), key


def test_pad_equal_to_eos_changes_nothing(tmp_path):
    own = tiny.grpo(True, tmp_path, loss_type="dapo")
    same = tiny.grpo(True, tmp_path, loss_type="dapo", tok=tiny.tokenizer(pad="</s>"))
    assert same.processing_class.pad_token_id == same.processing_class.eos_token_id
    tiny.assert_same_run(own, same, tol=0.0)


def test_chunk_size_changes_nothing(tmp_path):
    runs = [tiny.grpo(True, tmp_path, chunk=chunk) for chunk in (3, 4096)]
    tiny.assert_same_run(*runs)


def test_several_rewards_one_of_them_async_one_not_applicable_everywhere(tmp_path):
    async def length(completions, **kwargs):
        return [len(c) / 10 for c in completions]

    def odd_only(completions, number, **kwargs):
        return [1.0 if n % 2 else None for n in number]

    settings = dict(rewards=[tiny.reward, length, odd_only], reward_weights=[1.0, 0.5, 2.0])
    stock, own = tiny.grpo(False, tmp_path, **settings), tiny.grpo(True, tmp_path, **settings)
    names = ("loss", "grad_norm", "reward", "rewards/length/mean", "rewards/odd_only/mean", "rewards/reward/std")
    tiny.assert_same_run(stock, own, names)


def test_router_loss_of_a_mixture_of_experts(tmp_path):
    def run(own, **more):
        policy = tiny.model("qwen3_moe", router_aux_loss_coef=0.1, output_router_logits=True)
        return tiny.grpo(own, tmp_path, policy=policy, **more)

    tiny.assert_same_run(run(False), run(True), ("loss", "grad_norm", "aux_loss"))
    with pytest.raises(ValueError, match=r"router loss.*per_device_train_batch_size to a multiple of 4"):
        run(True, **SPLIT)


def test_rollout_func_with_masked_environment_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def rollout(prompts, trainer):
        ids = trainer.processing_class(text=prompts)["input_ids"]
        completions, _ = tiny.Scripted._generate_single_turn(trainer, ids)
        masks = [[int(i % 3 != 1) for i in range(len(c))] for c in completions]
        logprobs = [[0.0] * len(c) for c in completions]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}

    def run(cls, config, **more):
        args = config(
            **(
                tiny.RUN
                | dict(output_dir=str(tmp_path), num_generations=4, max_completion_length=10, max_steps=2)
                | more
            )
        )
        made = cls(
            model=tiny.model(), reward_funcs=tiny.reward, args=args, train_dataset=tiny.prompts(),
            processing_class=tiny.tokenizer(), rollout_func=rollout,
        )  # fmt: skip
        made.train()
        return made

    with tiny.unshuffled():
        stock = run(tiny.StockGRPO, tiny.trl.GRPOConfig)
    own = run(tiny.OurGRPO, tiny.ours.GRPOConfig, chunk=5, parity_check=False)
    tiny.assert_same_run(stock, own)


def test_evaluation_loss(tmp_path):
    def run(own):
        made = tiny.grpo(own, tmp_path, train=False, per_device_eval_batch_size=8)
        return made.evaluate(tiny.prompts(8))

    a, b = run(False), run(True)
    for key in ("eval_loss", "eval_reward", "eval_entropy"):
        assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-7)


def test_bfloat16_autocast_is_as_close_to_fp32_as_stock(tmp_path):
    exact = tiny.trained(tiny.grpo(False, tmp_path, max_steps=1, optim="sgd", learning_rate=1.0))

    def error(own):
        got = tiny.trained(tiny.grpo(own, tmp_path, max_steps=1, optim="sgd", learning_rate=1.0, bf16=True))
        return torch.sqrt(sum((got[n] - exact[n]).pow(2).sum() for n in exact)).item()

    assert error(True) < 1.5 * error(False)
