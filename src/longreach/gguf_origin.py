"""A GGUF file as a Transformers model: configuration and unpacked weights of the architectures that are exported to GGUF too.

Transformers' own reader leaves out what its table of keys lacks (head size, rope scaling, soft caps, query scale) and takes
defaults instead, so that some models load without an error and compute something else. Hence this one.

Shape suffixes: E experts, F the experts' inner size, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .gguf_tokenizer import tokenizer_of

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss", "phi3": "phi3", "granite": "granite", "olmo2": "olmo2",
}  # fmt: skip
PERMUTED = ("llama", "granite")  # their query and key rows stand in another order in GGUF
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}  # layers of the sizes whose query scale is not by head size


class GGUFOrigin:
    """An opened GGUF file.

    Raises:
        ValueError: an architecture that can't be read, or a file that is cut off.
    """

    def __init__(self, file: Path) -> None:
        import gguf

        self.file = file
        try:
            self._reader = gguf.GGUFReader(file)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{str(file)!r} is no GGUF file, or not a whole one: {error}") from error
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            raise ValueError(
                f"{str(file)!r}: architecture {self.architecture!r}; known are {', '.join(sorted(MODEL_TYPES))}. "
                "Train on the model's Hugging Face checkpoint instead."
            )
        self.model_type = MODEL_TYPES[self.architecture]

    def tokenizer(self) -> Any:
        """The tokenizer, as Transformers has it."""
        return tokenizer_of(self._value)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _of(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's own prefix; of a list by layers, which must agree, the one value."""
        value = self._value(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            return value[0]
        return value

    def config(self) -> Any:
        """The configuration, as Transformers has it."""
        from transformers import AutoConfig

        heads, hidden = self._of("attention.head_count"), self._of("embedding_length")
        head_dim = self._of("attention.key_length", hidden // heads)
        plain: dict[str, Any] = {
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._of("feed_forward_length"),
            "num_hidden_layers": self._of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._of("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._of("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._of("context_length"),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "dtype": "float32",
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            plain[f"{name}_token_id"] = self._value(f"tokenizer.ggml.{key}_token_id")
        return AutoConfig.for_model(self.model_type, **{**plain, **self._special(plain)})

    def _special(self, plain: dict[str, Any]) -> dict[str, Any]:
        """What only this architecture has."""
        kind, window = self.model_type, self._of("attention.sliding_window") or None  # 0 means none
        biased = {"attention_bias": "blk.0.attn_q.bias" in self._tensors}
        found: dict[str, dict[str, Any]] = {
            "llama": biased,
            "qwen2": {},
            "qwen3": biased,
            "olmo2": biased,
        }
        if kind == "phi3":
            turned = self._of("rope.dimension_count", plain["head_dim"]) / plain["head_dim"]
            rope = plain["rope_parameters"] | {"partial_rotary_factor": turned}
            return {"sliding_window": window, "partial_rotary_factor": turned, "rope_parameters": rope}
        if kind in found:
            return found[kind]
        if kind == "granite":
            keys = {
                "logits_scaling": "logit_scale", "residual_multiplier": "residual_scale",
                "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
            }  # fmt: skip
            return biased | {ours: self._of(theirs, 1.0) for ours, theirs in keys.items()}
        if kind == "qwen3_moe":
            return biased | {
                "num_experts": self._of("expert_count"),
                "num_experts_per_tok": self._of("expert_used_count"),
                "moe_intermediate_size": self._of("expert_feed_forward_length"),
                "norm_topk_prob": True,  # libllama's qwen3moe always does
            }
        if kind == "gpt_oss":
            return {
                "num_local_experts": self._of("expert_count"),
                "num_experts_per_tok": self._of("expert_used_count"),
                "intermediate_size": self._of("expert_feed_forward_length"),
                "sliding_window": window,
            }
        largest = plain["num_hidden_layers"] == _LARGEST_GEMMA[kind]
        scale = plain["hidden_size"] // plain["num_attention_heads"] if largest else plain["head_dim"]
        gemma = {"sliding_window": window, "query_pre_attn_scalar": scale}
        for name in ("attn", "final"):
            gemma[f"{name}_logit_softcapping"] = self._of(f"{name}_logit_softcapping")
        if kind == "gemma3_text":
            local = {"rope_type": "default", "rope_theta": float(self._of("rope.freq_base_swa", 10_000.0))}
            gemma["rope_parameters"] = {"sliding_attention": local, "full_attention": plain["rope_parameters"]}
        return gemma

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self._of("rope.freq_base", 10_000.0))}
        kind, factor = self._of("rope.scaling.type", "none"), self._of("rope.scaling.factor")
        original = self._of("rope.scaling.original_context_length")
        if "rope_freqs.weight" in self._tensors:
            return rope | self._llama3(rope["rope_theta"], head_dim)
        if "rope_factors_long.weight" in self._tensors:
            lists = {f"{n}_factor": self._read(f"rope_factors_{n}.weight").tolist() for n in ("long", "short")}
            return rope | {"rope_type": "longrope", "original_max_position_embeddings": original, **lists}
        if kind == "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            beta = {
                "beta_fast": self._of("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": self._of("rope.scaling.yarn_beta_slow", 1.0),
            }
            exact = {"truncate": False} if self.model_type == "gpt_oss" else {}
            return rope | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                **beta,
                **exact,
            }
        return rope

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling, of which the file holds the resulting factors only: the settings that give these factors."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        stored = self._read("rope_freqs.weight")
        plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        factor, context = float(stored.max()), self._of("context_length")
        for original in (8192, round(context / factor)):
            settings = {
                "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            trial = LlamaConfig(head_dim=head_dim, max_position_embeddings=context, rope_parameters=settings)
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
            if torch.allclose(plain / scaled, stored, rtol=1e-4):
                return settings
        raise ValueError(
            f"{str(self.file)!r}: rope_freqs.weight holds factors that are not Llama 3's; train on the HF checkpoint"
        )

    def _read(self, name: str) -> Tensor:
        """A tensor unpacked to fp32."""
        import gguf

        if name not in self._tensors:
            raise ValueError(f"{str(self.file)!r}: tensor {name!r} is missing")
        stored = self._tensors[name]
        return torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type)).float()

    def weights(self, config: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """All parameters by the names of Transformers' model."""
        import gguf
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[self.architecture], config.num_hidden_layers)
        tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
        found: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name in tied:
                continue
            value = self._experts(name) if ".experts." in name else self._plain(name, names, config)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{str(self.file)!r}: {name!r} has shape {list(value.shape)}, {list(parameter.shape)} expected"
                )
            found[name] = value.to(dtype)
        return found

    def _plain(self, name: str, names: Any, config: Any) -> Tensor:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"{str(self.file)!r}: nothing is known of {name!r}")
        value = self._read(stored if stored in self._tensors else f"{stored}.weight")
        if self.architecture in PERMUTED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        if self.model_type.startswith("gemma") and name.endswith("norm.weight"):
            value = value - 1.0
        return value

    def _experts(self, name: str) -> Tensor:
        """Gate and up as one parameter, in the order and orientation of the model's experts."""
        block = f"blk.{name.split('.layers.')[1].split('.')[0]}"
        part = "bias" if name.endswith("_bias") else "weight"
        interleaved = self.model_type == "gpt_oss"
        read: Callable[[str], Tensor] = lambda product: self._read(f"{block}.ffn_{product}_exps.{part}")  # noqa: E731
        if "down_proj" in name:
            value = read("down")
        else:
            gate, up = read("gate"), read("up")
            value = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
        return value.mT if interleaved and part == "weight" else value
