"""`longreach.load`: wrong arguments are named before a model is read."""

from __future__ import annotations

import pytest
import torch

import longreach
from longreach.loading import PASSED_ON


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wieghts": "bf16"}, TypeError, r"load takes no 'wieghts'; did you mean 'weights'\?"),
        ({"max_lenght": 64}, TypeError, r"load takes no 'max_lenght'; did you mean 'max_length'\?"),
        ({"parity_chek": False}, TypeError, r"did you mean 'parity_check'\?"),
        ({"dytpe": "bfloat16"}, TypeError, r"did you mean 'dtype'\?"),
        ({"weights": "bf15"}, ValueError, r"weights='bf15': choose one of 'bf16'"),
        (
            {"dtype": "float15"},
            ValueError,
            r"dtype='float15': give 'auto', a dtype of torch .* did you mean 'float16'\?",
        ),
        ({"torch_dtype": 16}, ValueError, r"torch_dtype=16: give 'auto'"),
        ({"device": "gpu"}, ValueError, r"device='gpu': give 'cuda', 'cuda:1', 'cpu'"),
        ({"device": "cuda:99"}, ValueError, r"device='cuda:99': PyTorch sees \d+ GPUs here"),
        ({"max_length": "64"}, ValueError, r"max_length='64': give a whole number of tokens"),
        ({"max_length": 1}, ValueError, r"max_length=1: a prompt and a completion need"),
        ({"lora": 0}, ValueError, r"lora=0: give a peft.LoraConfig, a rank"),
        ({"embedding": "int4"}, ValueError, r"embedding='int4': choose 'int8'"),
        ({"lora_dtype": "bf16"}, ValueError, r"lora_dtype='bf16': 'zoo' has no adapter and lora=None adds none"),
        ({"lora": 4, "lora_dtype": "fp16"}, ValueError, r"lora_dtype='fp16': choose 'bf16'"),
        ({"lora_dtype": "int8"}, ValueError, r"lora_dtype='int8': choose"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(error, match=message):
        longreach.load("zoo", **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16"])
def test_a_dtype_may_be_given_in_any_of_its_forms(dtype) -> None:
    model, _ = longreach.load("zoo", dtype=dtype, device="cpu", parity_check=False, attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("asked", "found"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_adapters_have_the_dtype_asked_for(asked, found) -> None:
    model, _ = longreach.load("zoo", weights="bf16", lora=4, lora_dtype=asked, device="cpu", parity_check=False)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {found}


@pytest.mark.parametrize(("asked", "found"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_so_do_adapters_from_a_folder(asked, found, tmp_path) -> None:
    common = dict(weights="bf16", device="cpu", parity_check=False)
    longreach.load("zoo", lora=4, **common)[0].save_pretrained(tmp_path)
    model, _ = longreach.load(str(tmp_path), lora_dtype=asked, **common)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {found}


def test_16_bits_of_the_adapter_leave_a_head_that_trains_beside_it() -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model, _ = longreach.load("zoo", weights="fp32", lora=lora, lora_dtype="bf16", device="cpu", parity_check=False)
    dtypes = {"lora_" in name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert dtypes == {True: torch.bfloat16, False: torch.float32}
    tree = longreach.TokenTree.from_sequences([list(range(5, 25))])
    longreach.token_logprobs(model, tree)[0].sum().backward()


def test_what_is_passed_on_is_what_transformers_takes() -> None:
    """A name that Transformers no longer knows would be let through; so would be one that it never knew."""
    import inspect
    import re

    from transformers import PreTrainedModel
    from transformers.models.auto import auto_factory

    source = inspect.getsource(PreTrainedModel.from_pretrained) + inspect.getsource(auto_factory)
    known = set(inspect.signature(PreTrainedModel.from_pretrained).parameters) | set(re.findall(r'"(\w+)"', source))
    assert set(PASSED_ON) - known <= {"low_cpu_mem_usage", "use_cache"}
