"""gpt-oss in the trainers: harmony's template and channels, ends of a completion, router loss, ragged batches, 4-bit experts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers as T
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig

import longreach.trainers as ours
from longreach.quant import MXFP4
from longreach.trainers.generation import generate_shared
from longreach.trainers.prompts import separate_channels

from ..quant.mixtures import EXPERTS, four_bit
from . import tiny

MARKS = ["<|startoftext|>", "<|return|>", "<|endoftext|>", "<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>",
         "<|constrain|>"]  # fmt: skip
TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "gptoss.jinja").read_text(encoding="utf-8")
QUESTIONS = [[{"role": "user", "content": f"What is {i} + {i * i}?"}] for i in range(16)]


def tokenizer() -> T.PreTrainedTokenizerFast:
    """Bytes and harmony's marks, with gpt-oss's own template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = T.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=MARKS[0], eos_token=MARKS[1], pad_token=MARKS[2],
        additional_special_tokens=MARKS[3:], padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def model(tok, seed: int = 0) -> T.PreTrainedModel:
    torch.manual_seed(seed)
    config = T.GptOssConfig(
        vocab_size=len(tok), hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=4096, pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, bos_token_id=None,
        router_aux_loss_coef=0.9,  # as published
    )  # fmt: skip
    made = T.GptOssForCausalLM(config)
    for p in made.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.1)
    made.generation_config.eos_token_id = tok.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    return made


def scripted(tok, text: str):
    """A trainer whose model always says `text`."""

    class Trainer(ours.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids = tok(text, add_special_tokens=False)["input_ids"]
            return [list(ids) for _ in prompt_ids], None

    return Trainer


def train(tmp_path, tok, policy, reward, trainer=ours.GRPOTrainer, **args):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS)
    data = Dataset.from_dict({"prompt": QUESTIONS})
    return tiny.grpo(
        True, tmp_path, policy=policy, tok=tok, rewards=reward, trainer=trainer, peft=lora, data=data, max_steps=2,
        parity_check=True, gradient_accumulation_steps=1, **({"max_completion_length": 8} | args),
    )  # fmt: skip


SAID = "<|channel|>analysis<|message|>four is two twice<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"


@pytest.mark.parametrize("four_bits", [False, True], ids=["whole", "mxfp4"])
def test_rewards_see_the_channels(four_bits: bool, tmp_path) -> None:
    """Analysis and final answer come apart; adapters on 4-bit experts train through TRL."""
    tok, seen = tokenizer(), []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    policy = four_bit(model(tok), MXFP4()) if four_bits else model(tok)
    made = train(tmp_path, tok, policy, reward, scripted(tok, SAID), max_completion_length=160)
    assert seen and all(c[0]["content"] == "4" and c[0]["thinking"] == "four is two twice" for c in seen)
    experts = [p for n, p in made.model.named_parameters() if "experts" in n and "lora_B" in n]
    assert len(experts) == 4 and all(p.abs().max() > 0 for p in experts)  # B begins at zero


def test_prompts_are_the_templates(tmp_path) -> None:
    tok = tokenizer()
    made = train(tmp_path, tok, model(tok), lambda completions, **k: [0.0] * len(completions), scripted(tok, SAID),
                 max_completion_length=160)  # fmt: skip
    ids = made._tokenize_prompts(QUESTIONS[:2])[0] if hasattr(made, "_tokenize_prompts") else None
    text = tok.apply_chat_template(QUESTIONS[0], add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|start|>system<|message|>") and text.endswith("<|start|>assistant")
    assert ids is None or tok.decode(ids[0]) == text


def test_both_ends_end_a_completion(tmp_path) -> None:
    """<|return|> and <|call|>, as the model's generation config says."""
    tok = tokenizer()
    made = train(tmp_path, tok, model(tok), lambda completions, **k: [float(len(str(c))) for c in completions])
    if not hasattr(made, "eos_token_ids"):
        pytest.skip("this TRL ends completions at the tokenizer's end alone")
    ends = set(made.generation_config.eos_token_id)
    assert ends == set(tok.convert_tokens_to_ids(["<|return|>", "<|call|>"]))


def test_router_loss_is_off_and_said(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    tok = tokenizer()
    with caplog.at_level(logging.WARNING, "longreach"):
        made = train(tmp_path, tok, model(tok), lambda completions, **k: [0.0] * len(completions), scripted(tok, SAID),
                     max_completion_length=160)  # fmt: skip
    assert "load-balancing loss is off; set router_aux_loss_coef (0.9" in caplog.text
    assert made.router_aux_loss_coef == 0.0 and not made.aux_loss_enabled
    made = train(tmp_path, tok, model(tok), lambda completions, **k: [0.0] * len(completions), scripted(tok, SAID),
                 max_completion_length=160, router_aux_loss_coef=0.01)  # fmt: skip
    assert made.aux_loss_enabled and tiny.history(made)[-1]["aux_loss"] > 0


def test_a_template_that_is_not_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    with caplog.at_level(logging.WARNING, "longreach"):
        separate_channels(tok)
    assert "chat template that TRL does not know" in caplog.text
    caplog.clear()
    separate_channels(tiny.tokenizer())
    assert not caplog.text


@pytest.mark.parametrize("four_bits", [False, True], ids=["whole", "mxfp4"])
def test_ragged_prompts_together_give_what_each_gives_alone(four_bits: bool) -> None:
    tok = tokenizer()
    policy = four_bit(model(tok), MXFP4()) if four_bits else model(tok)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=tok.pad_token_id,
        eos_token_id=policy.generation_config.eos_token_id,
    )
    prompts = [tok("x" * n + "abc")["input_ids"] for n in (1, 40, 7, 19)]
    with torch.no_grad():
        together = generate_shared(policy.eval(), prompts, config, torch.device("cpu"))
        for prompt, found in zip(prompts, together, strict=True):
            alone = policy.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
            )[0, len(prompt) :].tolist()
            assert found == alone[: len(found)]
        assert generate_shared(policy, prompts[::-1], config, torch.device("cpu"))[::-1] == together
