"""Planted faults: whatever goes wrong between training and export, verification says so and the export is marked bad."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longreach
from longreach.exporting import adapter, folder, merge, pipeline
from longreach.exporting.errors import ExportError, MismatchError
from tests.exporting.models import CHATML, adapted, tokenizer_for

add_to = adapter.LowRank.add_to


def dropped(self: adapter.LowRank, weight: Tensor, rows: slice) -> None:
    """The experts' adapter is left out."""
    if not self.by_expert:
        add_to(self, weight, rows)


def doubled(self: adapter.LowRank, weight: Tensor, rows: slice) -> None:
    add_to(self, weight, rows)
    add_to(self, weight, rows)


def transposed(self: adapter.LowRank, weight: Tensor, rows: slice) -> None:
    """A B in the place of B A, where the shapes let it through."""
    if self.by_expert or self.shape[0] != self.shape[1]:
        return add_to(self, weight, rows)
    weight += (self.left_EMr[0].float() @ self.right_ErN[0].float()).t()[rows] * self.scale
    return None


def swapped(self: adapter.LowRank, weight: Tensor, rows: slice) -> None:
    """The gate's change goes to up and the other way round."""
    if not self.by_expert or weight.shape[1] != 64:  # qwen3_moe's gate and up, 32 rows each
        return add_to(self, weight, rows)
    left = self.left_EMr[rows].float().roll(32, 1)
    weight.baddbmm_(left, self.right_ErN[rows].float(), alpha=self.scale)
    return None


def one_expert(self: adapter.LowRank, weight: Tensor, rows: slice) -> None:
    """The last expert's change is lost."""
    before = weight[-1].clone()
    add_to(self, weight, rows)
    if self.by_expert:
        weight[-1] = before


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["adapter that matters", "hardly trained adapter"])
@pytest.mark.parametrize("fault", [dropped, doubled, transposed, swapped, one_expert])
def test_wrong_merges_are_caught(
    fault: Any, scale: float, base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted("qwen3_moe", base("qwen3_moe"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(scale)
    longreach.export(model, tokenizer_for("qwen3_moe"), tmp_path / "good")
    monkeypatch.setattr(adapter.LowRank, "add_to", fault)
    with pytest.raises(MismatchError, match="of the adapter's change"):
        longreach.export(model, tokenizer_for("qwen3_moe"), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert json.loads((tmp_path / "m.bad" / "verification.json").read_text())["passed"] is False


def test_wrong_logits_are_caught_without_an_adapter(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    pieces = merge._pieces

    def scaled(weights: Any, entry: Any, changes: Any, name: str | None = None):
        for piece in pieces(weights, entry, changes, name):
            yield piece * 1.1 if "down_proj" in entry.name else piece

    monkeypatch.setattr(merge, "_pieces", scaled)
    model = AutoModelForCausalLM.from_pretrained(base("qwen3"), dtype=torch.float32)
    with pytest.raises(MismatchError, match="logits: relative difference"):
        longreach.export(model, tokenizer_for("qwen3"), tmp_path / "m")


@pytest.mark.parametrize("format", ["merged", "gguf", "ollama"])
def test_a_wrong_chat_template_is_caught(format: str, base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = folder.write_tokenizer

    def other(source: Any, place: Path) -> None:
        write(source, place)
        (place / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>\n", "<|im_end|>"))

    monkeypatch.setattr(folder, "write_tokenizer", other)
    with pytest.raises(MismatchError, match="chat template in") as caught:
        longreach.export(adapted("qwen3", base("qwen3")), tokenizer_for("qwen3"), tmp_path / "m", format=format)
    assert ("GGUF file" in str(caught.value)) == (format != "merged")


def test_lost_stop_tokens_are_caught(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "stop_ids", lambda place: [5])  # an ordinary token: libllama goes on after it
    with pytest.raises(MismatchError, match="token 5 stops generation in training but not in libllama"):
        longreach.export(adapted("gemma2", base("gemma2")), tokenizer_for("gemma2"), tmp_path / "m", format="gguf")


def test_a_dropped_tensor_in_the_adapters_file_is_caught(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    write = pipeline.write_adapter

    def without_experts(source: Any, place: Path) -> None:
        write(source, place)
        file = place / "adapter_model.safetensors"
        save_file({k: v for k, v in load_file(file).items() if "experts" not in k}, file)

    monkeypatch.setattr(pipeline, "write_adapter", without_experts)
    with pytest.raises(MismatchError, match=r"adapter tensor '.*experts.*' is missing"):
        longreach.export(
            adapted("gpt_oss", base("gpt_oss")), tokenizer_for("gpt_oss"), tmp_path / "a", format="adapter"
        )


def test_a_tensor_that_belongs_nowhere_is_refused(base, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = adapted("qwen3", base("qwen3"))
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    extra = {k.replace("layers.0", "layers.7"): v.clone() for k, v in tensors.items() if "layers.0" in k}
    save_file({**tensors, **extra}, file)
    with pytest.raises(ExportError, match="no such module; is it another model's adapter"):
        longreach.export(tmp_path / "a", None, tmp_path / "m")
    kept = {k: v for k, v in tensors.items() if not k.endswith("layers.0.self_attn.q_proj.lora_B.weight")}
    save_file(kept, file)
    with pytest.raises(ExportError, match=r"no lora_B.weight beside it"):
        longreach.export(tmp_path / "a", None, tmp_path / "m")


def test_libllama_that_ends_its_process_is_an_error(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of layers that libllama's Gemma 3 doesn't have makes it fail an assertion."""
    from tests.exporting.models import build

    small = build("gemma3_text", tmp_path / "base", num_hidden_layers=2)
    with pytest.raises(ExportError, match=r"libllama|can't be loaded"):
        longreach.export(small, None, tmp_path / "g", format="gguf")
    assert not (tmp_path / "g").exists()


# --- another model's tokenizer


def larger_tokenizer(**special: Any) -> Any:
    made = tokenizer_for("llama")
    if special:
        made.add_special_tokens(special)
    else:
        made.add_tokens([f"word{i}" for i in range(40)])
    return made


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(verify: str, base, tmp_path: Path) -> None:
    size, said = len(tokenizer_for("llama")), []
    told = rf"the tokenizer has {size + 40} tokens, the model's vocabulary {size} \(ids 0 to {size - 1}\).*'word0' with id {size}"
    for model in (adapted("llama", base("llama")), base("llama")):
        with pytest.raises(ExportError, match=told):
            longreach.export(model, larger_tokenizer(), tmp_path / "m", verify=verify, say=said.append)
    assert said == [] and list(tmp_path.iterdir()) == []


def test_it_is_refused_before_weights_are_quantized(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.exporting.from_disk.load", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(ExportError, match="was another tokenizer used"):
        longreach.export(base("llama"), larger_tokenizer(), tmp_path / "m", weights="nf4")


def test_special_tokens_beyond_the_vocabulary_are_remarked_on_unless_they_are_used(base, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has a token for images that its models of text have no row for."""
    model = adapted("llama", base("llama"))
    made = longreach.export(model, larger_tokenizer(additional_special_tokens=["<image>"]), tmp_path / "idle")
    assert any("'<image>' lies beyond the model's vocabulary" in note for note in made.notes)
    ends, chats = larger_tokenizer(eos_token="<end>"), larger_tokenizer(additional_special_tokens=["<say>"])
    chats.chat_template = chats.chat_template.replace("<|im_start|>", "<say>")
    for tokenizer, token in ((ends, "<end>"), (chats, "<say>")):
        with pytest.raises(ExportError, match=f"{token!r} with id"):
            longreach.export(model, tokenizer, tmp_path / "used")
