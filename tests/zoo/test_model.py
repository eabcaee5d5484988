"""The embedded model: it loads as any model does, knows the tasks' words, and is right about a third of the time."""

import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longreach import model_name, zoo
from longreach.zoo import pretrain, recipe
from longreach.zoo.task import count_tokens, pair_split
from longreach.zoo.tokenizer import build_tokenizer

TASKS = zoo.tasks()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(zoo.model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(zoo.model_path(), dtype=torch.float32)


def test_model_is_small_and_stock(model, tokenizer):
    assert sum(file.stat().st_size for file in zoo.model_path().iterdir()) < 4e6
    assert model.config.model_type == "qwen3"
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings >= 32768
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("length", [192, 2048, 16384])
def test_prompts_are_as_long_as_asked_and_come_back(task, length, tokenizer):
    for index in range(3):
        row = task.row("heldout", length, seed=1, index=index)
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert abs(len(ids) - length) <= 0.05 * length
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert count_tokens(row["prompt"][0]["content"]) == len(ids) - 3
        content = tokenizer(row["prompt"][0]["content"], add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(content) == pretrain.split_tokens(row["prompt"][0]["content"])


@pytest.mark.parametrize("text", ["héllo wörld ☃", "x = 3.14159;\n\treturn {'a': [1, 2]}", "  two  spaces ", "日本語"])
def test_any_text_comes_back(text, tokenizer):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_chat_template(tokenizer):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": " a"},
    ]
    assert (
        tokenizer.apply_chat_template(turns, tokenize=False)
        == "<|system|>s<|end|><|user|>u<|end|><|assistant|> a<|end|>"
    )
    asked = tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"


def test_tokenizer_is_the_one_the_script_builds(tokenizer):
    assert build_tokenizer(TASKS, pretrain.MAX_LENGTH).get_vocab() == tokenizer.get_vocab()


def test_missing_weights_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(model_name, "EMBEDDED_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors: .*longreach\.zoo\.pretrain --out"):
        zoo.model_path()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_annotator_is_right_about_a_third_of_the_time(task):
    rng = random.Random(0)
    settings = pretrain.Settings()
    document = task.document(rng, 2048, "train")
    key = document.keys[0]
    right = " ".join(document.trace(key))
    given = [pretrain.demonstrate(document, key, rng, settings) for _ in range(4000)]
    share = settings.first_share * settings.later_share * (1 - settings.wordy_share)
    assert abs(given.count(right) / len(given) - share) < 0.03
    assert abs(sum(answer.startswith("Answer : ") for answer in given) / len(given) - settings.wordy_share) < 0.02
    assert settings.first_share < 0.5, "the likeliest answer should be wrong"


def test_training_texts_ask_of_the_train_split_only():
    ids_of = build_tokenizer(TASKS, pretrain.MAX_LENGTH).get_vocab()
    words = {index: piece for piece, index in ids_of.items()}
    data = pretrain.Demonstrations(pretrain.Stage(320, 4, 5, size=3), 0, pretrain.Settings(), ids_of)
    assert len(data) == 20
    for index in range(len(data)):
        ids, answers = data[index]
        assert data[index] == (ids, answers)
        text = "".join(words[token] for token in ids).replace("▁", " ")
        turns = re.findall(r"(?:for|behind) (\w+)<\|end\|><\|assistant\|> (?:Answer : )?(\w+)", text)
        assert len(turns) >= 3
        live = dict(re.findall(r"^(?:\d\d:\d\d|let) (\w+) (?:joined|opened|=) (\w+)$", text, re.M))
        assert all(pair_split(key, live[key]) == "train" for key, _ in turns)
        assert [words[ids[at]] for at in answers].count("<|end|>") == len(turns)


def test_a_short_training_run_lowers_the_loss_and_saves_a_model(tmp_path):
    settings = pretrain.Settings(
        stages=(pretrain.Stage(192, 4, 12, size=2), pretrain.Stage(256, 2, 2, size=3, tasks=("log_facts",))),
        learning_rate=1e-2,
        warmup_steps=2,
        hidden=32,
        heads=2,
        kv_heads=1,
        head_size=16,
        intermediate=32,
        layers=1,
    )
    tokenizer = build_tokenizer(TASKS, pretrain.MAX_LENGTH)

    def run():
        model = pretrain.build_model(settings, tokenizer)
        losses = pretrain.train(model, settings, tokenizer.get_vocab(), "cpu", 0, lambda: None)
        return model, losses

    model, losses = run()
    assert losses[-1] < 0.9 * losses[0]
    assert run()[1] == losses
    pretrain.save(model, tokenizer, settings, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16).float(), again.state_dict()[name]), name


def test_model_is_right_about_a_third_of_the_time(model, tokenizer):
    """The chance of the right answer, exact, over held-out prompts: no sampling noise, one forward each."""
    task = zoo.task(recipe.DEMO.task)
    chances = []
    for index in range(8):
        row = task.row("heldout", 2048, seed=7, index=index)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer(f" {row['answer']}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits_SV = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        logprobs = logits_SV.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        chances.append(logprobs.sum().exp().item())
    assert 0.15 <= sum(chances) / len(chances) <= 0.45


def test_recipe_fits_the_tasks():
    demo = recipe.DEMO
    task = zoo.task(demo.task)
    assert demo.length >= 2000
    row = task.row("heldout", 512, demo.seed, 0)
    assert count_tokens(f" Answer : {row['answer']}") + 1 <= demo.max_completion_tokens
