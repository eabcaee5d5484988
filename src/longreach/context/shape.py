"""The dimensions of a model that memory and time depend on, read from its config; and those of well-known models.

Sizes are elements (weights) per layer or per token; nothing here needs the weights themselves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model_name import EMBEDDED, EMBEDDED_FOLDER, check_connected, model_place, not_on_the_hub

# Families whose layers `fused.py` writes out by hand; all others run as Transformers' modules under autograd.
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe")
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3")
SANDWICH = ("gemma2", "gemma3_text")
QKV_BIAS = ("qwen2",)


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder.

    Attributes:
        kind: Transformers' model_type.
        hidden, heads, kv_heads, head_dim, mlp: widths; mlp is that of a dense layer or of one expert.
        windows: per layer, the sliding window or None for full attention.
        experts, active: of a mixture-of-experts layer, and how many a token visits; 0 for a dense model.
        tied: head and embedding are one table.
        positions: longest position the config names, or None.
        bias: linear layers of attention carry a bias.
        exact: False where the memory formula is an upper estimate only (latent or linear attention).
        dtype: of a checkpoint's weights as its config names it, such as "bfloat16", or None.
        quantization: the config's entry on how they are packed, or None.
    """

    name: str
    kind: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    windows: tuple[int | None, ...]
    experts: int = 0
    active: int = 0
    tied: bool = False
    positions: int | None = None
    bias: bool = False
    exact: bool = True
    dtype: str | None = field(default=None, compare=False)
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def fused(self) -> bool:
        """Whether `fused.py` has this family's layer."""
        return self.kind in FUSED

    @property
    def sandwich(self) -> bool:
        return self.kind in SANDWICH

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of one decoder layer that `target_modules="all-linear"` adapts."""
        found = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.query, self.hidden),
        }
        if not self.experts:
            mlp = {"gate_proj": (self.hidden, self.mlp), "up_proj": (self.hidden, self.mlp)}
            found |= mlp | {"down_proj": (self.mlp, self.hidden)}
        return found

    @functools.cached_property
    def expert_linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of what one expert multiplies with, by the names that `target_parameters` uses."""
        if not self.experts:
            return {}
        return {
            "experts.gate_up_proj": (self.hidden, 2 * self.mlp),
            "experts.down_proj": (self.mlp, self.hidden),
        }

    @functools.cached_property
    def linear_matrices(self) -> int:
        """Weights in the linear layers of one decoder layer."""
        return sum(i * o for i, o in self.linears.values())

    @property
    def expert_matrices(self) -> int:
        """Weights in all experts of one layer."""
        return 3 * self.hidden * self.mlp * self.experts

    @property
    def layer_matrices(self) -> int:
        """Weights in the matrices of one layer: linear layers, all experts, the router."""
        return self.linear_matrices + self.expert_matrices + self.experts * self.hidden

    @property
    def layer_active(self) -> int:
        """Weights a token is multiplied with in one layer."""
        expert = 3 * self.hidden * self.mlp * self.active
        return self.linear_matrices + expert + self.experts * self.hidden

    def adapter(self, ranks: Mapping[str, int]) -> int:
        """Adapter weights of one layer, with a rank per name of `linears` or of `expert_linears`."""
        found = sum(ranks[name] * (i + o) for name, (i, o) in self.linears.items() if name in ranks)
        return found + sum(
            self.experts * ranks[name] * (i + o) for name, (i, o) in self.expert_linears.items() if name in ranks
        )

    @property
    def layer_vectors(self) -> int:
        """Norm weights, biases and sinks of one layer."""
        norms = (4 if self.sandwich else 2) * self.hidden + (2 * self.head_dim if self.kind in QK_NORM else 0)
        bias = self.query + 2 * self.keys if self.bias else 0
        if self.kind == "gpt_oss":  # output and expert biases, sinks
            bias += self.hidden + self.experts * (2 * self.mlp + self.hidden + 1) + self.heads
        return norms + bias

    @property
    def table(self) -> int:
        """Weights of the embedding; of the head as well where it is a table of its own."""
        return self.vocab * self.hidden

    @functools.cached_property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        return tables + self.layers * (self.layer_matrices + self.layer_vectors) + self.hidden

    @classmethod
    def of(cls, model_or_config: Any, *, estimate: bool = False) -> ModelShape:
        """From a model, a Transformers config, its dict, a config.json, a folder with one, a known name or a Hub id.

        Args:
            estimate: take a model without an exact formula as one of full attention, which needs at least as much.

        Raises:
            ValueError: something else, or a config without the dimensions of a decoder with keys and values.
        """
        if isinstance(model_or_config, ModelShape):
            return model_or_config
        if isinstance(model_or_config, (str, Path)):
            return cls._named(str(model_or_config), estimate)
        config = getattr(model_or_config, "config", model_or_config)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        name = str(getattr(text, "_name_or_path", "") or "")
        name = EMBEDDED if name == str(EMBEDDED_FOLDER) else name
        config, text = (c.to_dict() if hasattr(c, "to_dict") else c for c in (config, text))
        if not isinstance(text, Mapping):
            raise ValueError(f"model_or_config is a {type(model_or_config).__name__}: pass a model, a config or a name")
        return cls._from_dict(text, name, estimate, whole=config)

    @classmethod
    def _named(cls, name: str, estimate: bool = False) -> ModelShape:
        known = KNOWN.get(name.rsplit("/", 1)[-1].lower())
        path = Path(model_place(name) if known is None else name)
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            title = EMBEDDED if name == EMBEDDED else path.parent.name or name
            return cls._from_dict(_config_in(path), title, estimate)
        if known is not None:
            return known
        if path.parent.is_dir() and path.name == "config.json":
            raise ValueError(f"{name!r} holds no config.json; of an adapter, name the model that it was trained on")
        from transformers import AutoConfig

        try:
            check_connected(name)
            return cls.of(AutoConfig.from_pretrained(name), estimate=estimate)
        except OSError as error:
            names = ", ".join(dict.fromkeys(shape.name for shape in KNOWN.values()))
            raise ValueError(f"{not_on_the_hub(name, error)}. Known without it are {names}") from error

    @classmethod
    def _from_dict(
        cls, config: Mapping[str, Any], name: str, estimate: bool = False, *, whole: Mapping[str, Any] | None = None
    ) -> ModelShape:
        whole = whole or config
        config = config.get("text_config") or config
        dtype = next((c[k] for c in (whole, config) for k in ("dtype", "torch_dtype") if c.get(k)), None)
        kind = str(config.get("model_type", ""))
        missing = [
            k for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if k not in config
        ]
        if missing:
            raise ValueError(f"the config of {name or kind!r} lacks {', '.join(missing)}: it is not one of a decoder")
        exact = not (config.get("kv_lora_rank") or "linear_attention" in (config.get("layer_types") or ()))
        if not exact and not estimate:
            raise ValueError(
                f"{kind!r} has latent or linear attention, for which there is no memory formula; the engine runs it, but its "
                "plan has to be measured"
            )
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if config.get("kv_lora_rank"):  # keys and values are expanded to all heads before attention sees them
            kv_heads, head_dim = heads, int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
        mlp = config.get("moe_intermediate_size") if experts else None
        return cls(
            name=name or kind,
            kind=kind,
            vocab=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=int(mlp or config["intermediate_size"]),
            windows=_windows(config, kind, layers),
            experts=experts,
            active=int(config.get("num_experts_per_tok") or 0) if experts else 0,
            tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
            positions=config.get("max_position_embeddings"),
            bias=kind in QKV_BIAS or bool(config.get("attention_bias")),
            exact=exact,
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            quantization=whole.get("quantization_config") or None,
        )


def _config_in(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} is no config.json of a model: it holds no JSON object")
    return found


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types:
        return tuple(window if t == "sliding_attention" else None for t in types[:layers])
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if window and kind == "gemma3_text":
        return tuple(None if (i + 1) % int(pattern or 6) == 0 else window for i in range(layers))
    if window and kind == "gpt_oss":
        return tuple(window if i % 2 == 0 else None for i in range(layers))
    return (window if kind == "mistral" else None,) * layers


def _dense(name: str, kind: str, *dims: int, tied: bool, positions: int) -> ModelShape:
    vocab, hidden, layers, heads, kv_heads, head_dim, mlp = dims
    windows = (None,) * layers
    return ModelShape(
        name, kind, vocab, hidden, layers, heads, kv_heads, head_dim, mlp, windows, tied=tied, positions=positions,
        dtype="bfloat16",
    )  # fmt: skip


_SHAPES = (
    #                              vocab   hidden layers heads kv  d    mlp
    _dense("Qwen3-0.6B", "qwen3", 151936, 1024, 28, 16, 8, 128, 3072, tied=True, positions=40960),
    _dense("Qwen3-1.7B", "qwen3", 151936, 2048, 28, 16, 8, 128, 6144, tied=True, positions=40960),
    _dense("Qwen3-4B", "qwen3", 151936, 2560, 36, 32, 8, 128, 9728, tied=True, positions=40960),
    _dense("Qwen3-8B", "qwen3", 151936, 4096, 36, 32, 8, 128, 12288, tied=False, positions=40960),
    _dense("Qwen3-14B", "qwen3", 151936, 5120, 40, 40, 8, 128, 17408, tied=False, positions=40960),
    _dense("Qwen3-32B", "qwen3", 151936, 5120, 64, 64, 8, 128, 25600, tied=False, positions=40960),
    _dense("Llama-3.1-8B", "llama", 128256, 4096, 32, 32, 8, 128, 14336, tied=False, positions=131072),
    ModelShape(
        "Gemma-3-12B", "gemma3_text", 262208, 3840, 48, 16, 8, 256, 15360,
        tuple(None if (i + 1) % 6 == 0 else 1024 for i in range(48)), tied=True, positions=131072,
        dtype="bfloat16",
    ),
    ModelShape(
        "gpt-oss-20b", "gpt_oss", 201088, 2880, 24, 64, 8, 64, 2880,
        tuple(128 if i % 2 == 0 else None for i in range(24)), experts=32, active=4, positions=131072, bias=True,
        dtype="bfloat16", quantization={"quant_method": "mxfp4"},
    ),
)  # fmt: skip
KNOWN = {shape.name.lower(): shape for shape in _SHAPES}
KNOWN |= {"llama-3.1-8b-instruct": KNOWN["llama-3.1-8b"], "gemma-3-12b-it": KNOWN["gemma-3-12b"]}
