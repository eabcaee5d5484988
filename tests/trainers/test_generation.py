"""Generation with the prompt's keys and values shared: the tokens of Transformers' own, for every kind of cache."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
import trl
from transformers import GenerationConfig

import longreach.trainers as ours
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


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"generation_kwargs": {"min_new_tokens": 4}}])
def test_trainer_generates_what_trls_would(sampling, tmp_path):
    out = []
    for own in (False, True):
        made = trainer_for(own, tmp_path, **sampling)
        made.generation_config.do_sample = False
        ids = [made.processing_class(text=p)["input_ids"] for p in made.train_dataset["prompt"] for _ in range(4)]
        out.append(completions_of(made, ids))
    assert out[0] == out[1] and len(out[0]) == 32


def test_sampling_options_reach_the_sampler(tmp_path):
    made = trainer_for(True, tmp_path, top_k=1, temperature=0.5)
    ids = [made.processing_class(text=made.train_dataset["prompt"][0])["input_ids"]] * 4
    first, *rest = completions_of(made, ids)
    assert rest == [first] * 3  # top_k=1 leaves one choice
    made = trainer_for(True, tmp_path, temperature=3.0)
    assert len({tuple(c) for c in completions_of(made, ids)}) > 1


def test_stock_generation_on_request_and_where_sharing_cannot_work(tmp_path, caplog, monkeypatch):
    called = []
    monkeypatch.setattr(ours.grpo, "generate_shared", lambda *a: called.append(a))
    made = trainer_for(True, tmp_path, rollout="transformers")
    ids = [made.processing_class(text=made.train_dataset["prompt"][0])["input_ids"]] * 4
    assert len(completions_of(made, ids)) == 4 and not called and not caplog.text
    made = trainer_for(True, tmp_path, cache_implementation="static")
    assert not made._share_prompts
    assert "rollout='transformers' is used" in caplog.text and "cache_implementation='static'" in caplog.text


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
