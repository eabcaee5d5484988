"""Completions of a trainer: by the rollout engine or with the prompt's keys shared, the tokens of Transformers' own."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
import trl
from transformers import GenerationConfig

import longreach.trainers as ours
from longreach.context.support import UnsupportedModelError
from longreach.rollout.completion import ENGINE
from longreach.trainers import generation

from ..exactness.models import CONFIGS, build
from . import tiny

GREEDY = dict(do_sample=False, max_new_tokens=9, pad_token_id=0, eos_token_id=[2, 3])


def prompts(lengths, copies, vocabulary=90):
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(4, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    return [p for p in made for _ in range(copies)]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_stock_generate(name, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 16)
    model = build(name, torch.float32, lora=False, attention="eager").eval()
    config = GenerationConfig(**GREEDY)
    assert generation.sharing_obstacle(model, config) is None
    rows = prompts((1, 2, 37, 20), 3)
    with torch.no_grad():
        got = generation.generate_shared(model, rows, config, torch.device("cpu"))
        for i in range(0, len(rows), 3):
            ids = torch.tensor([rows[i]])
            full = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            want = generation._until(full[0, ids.shape[1] :].tolist(), {2, 3})
            assert got[i : i + 3] == [want] * 3


def trainer_for(own, tmp_path, **args):
    cls = ours.GRPOTrainer if own else trl.GRPOTrainer
    made = tiny.grpo(
        own, tmp_path, policy=tiny.model("mistral"), train=False, trainer=cls, data=tiny.prompts(8, 60, 20),
        max_completion_length=12, **args,
    )  # fmt: skip
    made.model.train()
    return made


def completions_of(trainer, ids):
    images, fields = None, {}
    counts = [4] if "num_generations" in inspect.signature(trl.GRPOTrainer._generate_single_turn).parameters else []
    return trainer._generate_single_turn(ids, images, fields, *counts)[0]


@pytest.mark.parametrize("rollout", ["engine", "shared"])
@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"generation_kwargs": {"min_new_tokens": 4}}])
def test_trainer_generates_what_trls_would(sampling, rollout, tmp_path):
    out = []
    for own in (False, True):
        made = trainer_for(own, tmp_path, **sampling)
        made.generation_config.do_sample = False
        if own:
            assert made._rollout == "engine"
            made._rollout = rollout
        ids = [made.processing_class(text=p)["input_ids"] for p in made.train_dataset["prompt"] for _ in range(4)]
        out.append(completions_of(made, ids))
    assert out[0] == out[1] and len(out[0]) == 32


@pytest.mark.parametrize("rollout", ["engine", "shared"])
def test_sampling_options_reach_the_sampler(rollout, tmp_path):
    made = trainer_for(True, tmp_path, top_k=1, temperature=0.5)
    made._rollout = rollout
    ids = [made.processing_class(text=made.train_dataset["prompt"][0])["input_ids"]] * 4
    first, *rest = completions_of(made, ids)
    assert rest == [first] * 3  # top_k=1 leaves one choice
    made = trainer_for(True, tmp_path, temperature=3.0)
    made._rollout = rollout
    assert len({tuple(c) for c in completions_of(made, ids)}) > 1


def test_the_engine_gives_its_log_probs_and_trl_pads_them(tmp_path):
    made = trainer_for(True, tmp_path, temperature=0.8)
    batch = next(iter(made.get_train_dataloader()))
    out = made._generate_and_score_completions(batch)
    sampled_BC, mask_BC = out["sampling_per_token_logps"], out["completion_mask"].bool()
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
    mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    with torch.no_grad():
        ours = made._get_per_token_logps_and_entropies(made.model, ids, mask, sampled_BC.shape[1])[0]
    assert float((ours - sampled_BC)[mask_BC].abs().max()) < 1e-5


def test_difference_to_the_sampler_is_logged(tmp_path):
    made = tiny.grpo(True, tmp_path, trainer=ours.GRPOTrainer, max_steps=2)
    logged = [entry["sampling/logp_difference/max"] for entry in made.state.log_history[:2]]
    assert 0 <= max(logged) < 1e-5


def test_trls_correction_takes_the_engines_log_probs(tmp_path):
    made = tiny.grpo(True, tmp_path, trainer=ours.GRPOTrainer, max_steps=1, rollout_correction=True)
    assert made.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-5
    assert abs(made.state.log_history[0]["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4
    with pytest.raises(ValueError, match="rollout_correction=True"):
        tiny.grpo(
            True, tmp_path, train=False, trainer=ours.GRPOTrainer, rollout_correction=True, rollout="transformers"
        )


def test_turns_of_a_conversation_and_evaluation_go_through_the_engine(tmp_path):
    """What TRL's tool loop does: the rows that go on, each with what it has so far, are generated again."""
    made = trainer_for(True, tmp_path)
    made.generation_config.do_sample = False
    rows = prompts((9, 4, 14, 6), 1)
    counts = [4] if "num_generations" in inspect.signature(trl.GRPOTrainer._generate_single_turn).parameters else []
    first, logprobs = made._generate_single_turn(rows, None, {}, *counts)
    assert [len(x) for x in first] == [len(x) for x in logprobs]
    going_on = [p + c + [11, 12] for p, c in zip(rows[1:], first[1:])]
    second, logprobs = made._generate_single_turn(going_on, None, {}, *counts)
    assert [len(x) for x in second] == [len(x) for x in logprobs] and len(second) == 3
    config = GenerationConfig(do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=[tiny.EOS])
    with torch.no_grad():
        want = generation.generate_shared(made.model, going_on, config, torch.device("cpu"))
    assert second == want
    evaluated = tiny.grpo(True, tmp_path, trainer=ours.GRPOTrainer, train=False, data=tiny.prompts(4))
    evaluated.eval_dataset = tiny.prompts(4)
    assert "eval_reward" in evaluated.evaluate() and ENGINE in evaluated.model.__dict__


def test_memory_of_rollouts_is_released_on_request(tmp_path):
    kept = tiny.grpo(True, tmp_path, trainer=ours.GRPOTrainer, max_steps=1)
    assert ENGINE in kept.model.__dict__
    released = tiny.grpo(True, tmp_path, trainer=ours.GRPOTrainer, max_steps=1, rollout_memory="release")
    assert ENGINE not in released.model.__dict__


def test_what_the_engine_does_not_know_goes_to_transformers(tmp_path, caplog):
    made = trainer_for(True, tmp_path, generation_kwargs={"no_repeat_ngram_size": 3})
    assert made._rollout == "shared" and "no_repeat_ngram_size=3" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"no_repeat_ngram_size=3.*rollout='auto'"):
        trainer_for(True, tmp_path, generation_kwargs={"no_repeat_ngram_size": 3}, rollout="engine")


def test_stock_generation_on_request_and_where_sharing_cannot_work(tmp_path, caplog):
    made = trainer_for(True, tmp_path, rollout="transformers")
    ids = [made.processing_class(text=made.train_dataset["prompt"][0])["input_ids"]] * 4
    assert made._rollout == "trl" and len(completions_of(made, ids)) == 4 and not caplog.text
    made = trainer_for(True, tmp_path, cache_implementation="static")
    assert made._rollout == "trl" and "cache_implementation='static'" in caplog.text


def test_end_of_sequence_equal_to_padding_cuts_at_the_first_one():
    assert generation._until([5, 2, 2, 2], {2}) == [5, 2]
    assert generation._until([2, 2], {2}) == [2]
    assert generation._until([5, 6], {2}) == [5, 6]


def test_long_prompts_are_quick(tmp_path):
    """8 completions of 8 tokens on a 2,000-token prompt cost about one prefill, not eight."""
    model = tiny.model(hidden_size=64, intermediate_size=128).eval()
    rows, config = prompts((2000,), 8), GenerationConfig(**GREEDY)

    def seconds(run):
        start = time.process_time()
        with torch.no_grad():
            run()
        return time.process_time() - start

    ids = torch.tensor(rows)
    stock = lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)  # noqa: E731
    shared = lambda: generation.generate_shared(model, rows, config, torch.device("cpu"))  # noqa: E731
    assert min(seconds(shared) for _ in range(3)) < 0.8 * min(seconds(stock) for _ in range(3))
