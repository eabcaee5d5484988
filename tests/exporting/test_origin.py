"""The other way round: a model is trained on from an adapter's folder, a merged folder or a GGUF file."""

from pathlib import Path

import pytest
import torch

import longreach
from longreach.exporting.errors import ExportError
from longreach.gguf_origin import MODEL_TYPES
from longreach.origin import origin_of
from tests.exporting.models import CONFIGS, adapted, tokenizer_for

TEXTS = ("The harbour master keeps 12 ledgers.", "Größe 東京 1234567 33 it's\n\n  x<|im_end|>")


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits.float()


@pytest.mark.parametrize("name", CONFIGS)
def test_from_gguf(name: str, base, tmp_path: Path) -> None:
    model, tokenizer = adapted(name, base(name)), tokenizer_for(name)
    file = longreach.export(model, tokenizer, tmp_path / "m.gguf", format="gguf", quantization="f16", verify="off").path
    again, read = longreach.load(str(file), weights="fp32", lora=2, device="cpu")
    assert [read(t)["input_ids"] for t in TEXTS] == [tokenizer(t)["input_ids"] for t in TEXTS]
    assert (read.chat_template, read.eos_token, read.bos_token) == (
        tokenizer.chat_template, tokenizer.eos_token, tokenizer.bos_token if read.bos_token else None
    )  # fmt: skip
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    wanted = logits(model, ids)
    assert float((logits(again, ids) - wanted).norm() / wanted.norm()) < 5e-3
    assert any(p.requires_grad for p in again.parameters())


def test_every_gguf_architecture_is_tested() -> None:
    assert set(MODEL_TYPES.values()) | {"mistral"} == set(CONFIGS)


def test_from_an_adapter(base, tmp_path: Path) -> None:
    model, tokenizer = adapted("qwen3", base("qwen3")), tokenizer_for("qwen3")
    folder = longreach.export(model, tokenizer, tmp_path / "a", format="adapter").path
    again, _ = longreach.load(str(folder), weights="fp32", device="cpu")
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=1e-4, atol=1e-5)
    assert sum(p.requires_grad for p in again.parameters()) == 28
    with pytest.raises(ValueError, match="is an adapter already; leave lora out"):
        longreach.load(str(folder), lora=4)


def test_an_adapter_on_a_gguf_file_goes_round(base, tmp_path: Path) -> None:
    file = longreach.export(base("qwen2"), None, tmp_path / "m.gguf", format="gguf", quantization="q8_0").path
    model, tokenizer = longreach.load(str(file), lora=4, device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapter = longreach.export(model, tokenizer, tmp_path / "a", format="adapter").path
    longreach.export(adapter, None, tmp_path / "m")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: str(p / "none.gguf"), "no such file"),
        (lambda p: [(p / n).write_bytes(b"") for n in ("a.gguf", "b.gguf")] and str(p), "holds 2 GGUF files; name one"),
        (lambda p: (p / "adapter_config.json").write_text("{}") and str(p), "base_model_name_or_path is missing"),
        (lambda p: (p / "adapter_config.json").write_text("{") and str(p), "adapter_config.json: no JSON object"),
    ],
)
def test_wrong_origins_are_named(make, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        origin_of(make(tmp_path))


@pytest.mark.parametrize("kind", ["adapter", "gguf"])
def test_trainers_take_them(kind: str, base, tmp_path: Path) -> None:
    """A step of SFT, then the export of what it trained."""
    from datasets import Dataset
    from peft import LoraConfig

    if kind == "gguf":
        start = longreach.export(
            base("qwen2"), None, tmp_path / "m.gguf", format="gguf", quantization="f16", verify="off"
        )
    else:
        model, tokenizer = adapted("qwen2", base("qwen2")), tokenizer_for("qwen2")
        start = longreach.export(model, tokenizer, tmp_path / "a", format="adapter", verify="off")
    args = longreach.SFTConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        max_length=64,
        bf16=False,
        use_cpu=True,
        report_to=[],
        learning_rate=1e-3,
    )
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if kind == "gguf" else None
    rows = Dataset.from_list([{"text": TEXTS[0]}] * 8)
    trainer = longreach.SFTTrainer(str(start.path), args=args, train_dataset=rows, peft_config=lora)
    trainer.train()
    trainer.save_model()
    longreach.export(tmp_path / "run", None, tmp_path / "done")
    if kind == "adapter":
        with pytest.raises(ValueError, match="is an adapter already; leave peft_config out"):
            longreach.SFTTrainer(str(start.path), args=args, train_dataset=rows, peft_config=LoraConfig(r=2))


def test_models_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    for name, message in (("short.gguf", "no GGUF file, or not a whole one"), ("", "`nonsense`")):
        with pytest.raises(ValueError, match=message):
            longreach.load(str(tmp_path / name))
        with pytest.raises(ExportError, match=message):
            longreach.export(str(tmp_path / name), None, tmp_path / "out")
