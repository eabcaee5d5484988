"""Tiny random models, a word-level tokenizer, and stock and own trainers that see the same completions."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import transformers as T
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

import longreach.trainers as ours

WORDS = 97
PAD, BOS, EOS = 0, 1, 2
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RUN = dict(report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, bf16=False)


def tokenizer(pad: str = "<pad>") -> T.PreTrainedTokenizerFast:
    vocab = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(WORDS - 3)])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return T.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def model(kind: str = "qwen3", seed: int = 0, **changes: Any) -> T.PreTrainedModel:
    torch.manual_seed(seed)
    config = dict(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    if kind == "qwen3":
        config |= dict(head_dim=8)
        made: T.PreTrainedModel = T.Qwen3ForCausalLM(T.Qwen3Config(**(config | changes)))
    elif kind == "qwen3_moe":
        config |= dict(
            head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
        )
        made = T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**(config | changes)))
    elif kind == "mistral":
        made = T.MistralForCausalLM(T.MistralConfig(**(config | dict(sliding_window=16) | changes)))
    else:
        made = T.LlamaForCausalLM(T.LlamaConfig(**(config | changes)))
    for name, p in made.named_parameters():
        if p.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(p, std=0.15)
    return made


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS)


def prompts(rows: int = 32, longest: int = 14, shortest: int = 5) -> Dataset:
    span = longest - shortest + 1
    text = [" ".join(f"w{(i * 7 + j * 3) % 90}" for j in range(shortest + i % span)) for i in range(rows)]
    return Dataset.from_dict({"prompt": text, "number": list(range(rows))})


def pairs(rows: int = 24) -> Dataset:
    completion = [" ".join(f"w{(i * 11 + j * 5) % 90}" for j in range(4 + i % 7)) for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts(rows)["prompt"], "completion": completion})


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c) % 7) - sum(map(ord, c)) % 5 for c in completions]


class Scripted:
    """Completions drawn from the call's number, so that both trainers score the same ones; no shuffle in TRL's."""

    calls = 0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        draw = random.Random(self.calls)
        out = [[draw.randrange(3, WORDS) for _ in range(draw.randrange(2, 9))] + [EOS] for _ in prompt_ids]
        return out, None


class StockGRPO(Scripted, trl.GRPOTrainer):
    pass


class OurGRPO(Scripted, ours.GRPOTrainer):
    pass


@contextlib.contextmanager
def unshuffled():
    """Stock TRL without its shuffle of the generated rows: what a micro-batch normalizer sees is then defined."""
    import trl.trainer.grpo_trainer as module

    before = module.shuffle_sequence_dict
    module.shuffle_sequence_dict = lambda batch: batch
    try:
        yield
    finally:
        module.shuffle_sequence_dict = before


def grpo(
    own: bool, tmp: Any, *, policy: Any = None, rewards: Any = reward, peft: Any = None, train: Any = None,
    tok: Any = None, trainer: Any = None, callbacks: Any = None, data: Any = None, evaluation: Any = None, **args: Any,
) -> Any:  # fmt: skip
    """A GRPO trainer after training."""
    settings: dict[str, Any] = RUN | dict(
        output_dir=str(tmp), per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4,
        max_completion_length=10, max_steps=3, learning_rate=1e-4, lr_scheduler_type="constant", beta=0.0,
    ) | args  # fmt: skip
    if own:
        settings = dict(chunk=16, parity_check=False) | settings
    config = (ours.GRPOConfig if own else trl.GRPOConfig)(**settings)
    made = (trainer or (OurGRPO if own else StockGRPO))(
        model=model() if policy is None else policy, reward_funcs=rewards, args=config,
        train_dataset=prompts() if data is None else data, processing_class=tok or tokenizer(), peft_config=peft,
        callbacks=callbacks, eval_dataset=evaluation,
    )  # fmt: skip
    if train is not False:
        with contextlib.nullcontext() if own else unshuffled():
            made.train()
    return made


def history(trainer: Any, *names: str) -> list[dict[str, float]]:
    """The logged steps, reduced to the names given (all numbers if none)."""
    steps = [h for h in trainer.state.log_history if "loss" in h]
    return [{k: v for k, v in h.items() if not names or k in names} for h in steps]


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_run(stock: Any, own: Any, names: tuple[str, ...] = ("loss", "grad_norm", "reward"), tol: float = 1e-5):
    """Logged numbers and the parameters after training are equal to `tol`."""
    a, b = history(stock, *names), history(own, *names)
    assert len(a) == len(b) > 0
    for step, (x, y) in enumerate(zip(a, b)):
        assert x.keys() == y.keys() and x, (step, x.keys(), y.keys())
        for name in x:
            assert abs(x[name] - y[name]) <= tol * max(1.0, abs(x[name])), (step, name, x[name], y[name])
    p, q = trained(stock), trained(own)
    assert p.keys() == q.keys() and p
    for name in p:
        worst = (p[name] - q[name]).abs().max().item()
        assert worst <= tol, (name, worst)
