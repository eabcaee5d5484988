"""Where a model comes from: the embedded one, a Hub id, a model folder, an adapter on its base, or a GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .gguf_origin import GGUFOrigin
from .model_name import MissingModelError, check_connected, check_holds_model, model_place, not_on_the_hub

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Origin:
    """What Transformers and PEFT are asked to load.

    Attributes:
        base: Hub id or folder of the base model.
        adapter: folder of the adapter on it, None for a model without one.
        tokenizer: folder or Hub id of the tokenizer.
        gguf: the GGUF file that holds the base model, None for a checkpoint.
    """

    base: str
    tokenizer: str
    adapter: str | None = None
    gguf: Path | None = None

    def config(self, **kwargs: Any) -> Any:
        """The base model's configuration.

        Raises:
            ValueError: a GGUF file of an architecture that Transformers can't read.
            MissingModelError: the Hub does not give a model of this name.
        """
        from transformers import AutoConfig

        if self.gguf:
            return GGUFOrigin(self.gguf).config()
        with _from_hub(self.base):
            check_connected(self.base, kwargs.get("revision"))
            return AutoConfig.from_pretrained(self.base, **kwargs)

    def load_tokenizer(self, **kwargs: Any) -> Any:
        """The tokenizer."""
        from transformers import AutoTokenizer

        if self.gguf and self.tokenizer == self.base:
            return GGUFOrigin(self.gguf).tokenizer()
        with _from_hub(self.tokenizer):
            return AutoTokenizer.from_pretrained(self.tokenizer, **kwargs)

    def load_base(self, config: Any, **kwargs: Any) -> Any:
        """The base model, by `AutoModelForCausalLM.from_pretrained`; from a GGUF file unpacked."""
        from transformers import AutoModelForCausalLM

        if self.gguf is None:
            return AutoModelForCausalLM.from_pretrained(self.base, config=config, **kwargs)
        if kwargs.get("quantization_config") is not None:
            raise ValueError(f"{str(self.gguf)!r} is unpacked to 16 or 32 bits; for 4-bit weights take a checkpoint")
        dtype = kwargs.pop("dtype", "auto")
        dtype = torch.bfloat16 if dtype == "auto" else dtype
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.load_state_dict(GGUFOrigin(self.gguf).weights(config, dtype), strict=False, assign=True)
        model.tie_weights()
        model.config._name_or_path = model.name_or_path = str(self.gguf)
        return model


@contextlib.contextmanager
def _from_hub(name: str) -> Iterator[None]:
    """What the Hub's client and Transformers raise for a name that is no folder, in our words."""
    try:
        yield
    except OSError as error:
        if Path(name).exists():
            raise
        raise not_on_the_hub(name, error) from error


def origin_of(name_or_path: str | Path) -> Origin:
    """Tell the embedded model, a Hub id, a model folder, an adapter folder and a GGUF file apart.

    Raises:
        MissingModelError: a path where there is nothing, or no model.
        ValueError: a GGUF file or adapter that can't be used; the message says what would be right.
    """
    place = model_place(name_or_path)
    path = Path(place)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    check_holds_model(place, name_or_path)
    if (path / ADAPTER_CONFIG).is_file():
        try:
            base = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path / ADAPTER_CONFIG}: no JSON object: {error}") from error
        if not base:
            raise ValueError(
                f"{path / ADAPTER_CONFIG}: base_model_name_or_path is missing; write the base model's name there"
            )
        own = (path / "tokenizer_config.json").is_file()
        try:
            inner = origin_of(base)
        except MissingModelError as error:
            raise MissingModelError(
                f"{path / ADAPTER_CONFIG}: base_model_name_or_path: the model that this adapter was trained on is gone; {error}"
            ) from error
        return Origin(inner.base, str(path) if own else inner.tokenizer, str(path), inner.gguf)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0])
        if files:
            raise ValueError(f"{place!r} holds {len(files)} GGUF files; name one, e.g. {files[0]}")
    return Origin(place, place)


def _gguf(file: Path) -> Origin:
    if find_spec("gguf") is None:
        raise ValueError(f"{str(file)!r}: reading GGUF files needs the package gguf: pip install 'longreach[export]'")
    return Origin(str(file), str(file), None, file)
