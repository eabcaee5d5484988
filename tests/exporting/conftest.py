"""One tiny base model and its tokenizer per architecture, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.exporting.models import build, pack_experts


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of an architecture's base model; "gpt_oss-mxfp4" has its experts packed."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = build(name.removesuffix("-mxfp4"), tmp_path_factory.mktemp(name) / "base", dtype=torch.bfloat16)
            made[name] = pack_experts(folder) if name.endswith("-mxfp4") else folder
        return made[name]

    return get
