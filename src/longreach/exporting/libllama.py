"""libllama, the library inside llama.cpp and Ollama: load a GGUF file, tokenize, compute logits, generate, quantize.

It runs in a process of its own (`libllama_worker`): an assertion that fails in there is an error here, not the end of a session.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import ExportError

WORKER = Path(__file__).with_name("libllama_worker.py")


class _Process:
    """The worker process: `call` sends a request and returns the answer and its raw data."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._child = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )

    def call(self, call: str, **arguments: Any) -> tuple[Any, bytes]:
        """Raises ExportError if the library refuses or ends its process."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._child.wait()
            raise ExportError(f"libllama ended its process: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ExportError(f"libllama: {answer['error']}")
        return answer["result"], self._child.stdout.read(answer["bytes"])

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return " ".join(lines[-3:])[-600:] or f"exit status {self._child.returncode}"

    def close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._child.wait()
        self._stderr.close()


class GGUFModel:
    """A GGUF file in libllama, on the CPU, with keys and values in fp32. Use as a context manager.

    Args:
        file: the GGUF file.
        context: the longest sequence, tokens.

    Raises:
        ExportError: libllama can't load the file; the message quotes it.
    """

    def __init__(self, file: Path, *, context: int = 512) -> None:
        self.context = context
        self._process = _Process()
        try:
            facts, _ = self._process.call(
                "load", file=str(file), context=context, threads=max(1, torch.get_num_threads())
            )
        except ExportError as error:
            self._process.close()
            raise ExportError(f"{file.name} can't be loaded: {error}") from None
        self.vocab_size: int = facts["vocab_size"]
        self.chat_template: str | None = facts["chat_template"]  # Jinja, as stored in the file

    def __enter__(self) -> GGUFModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of every position, [S, V] fp32, of one sequence of at most `context` tokens."""
        self._process.call("clear")
        return self._decode(ids, 0)

    def greedy(self, ids: Sequence[int], tokens: int) -> list[int]:
        """The most likely continuation, token by token, up to and without a token that ends the turn."""
        row_V = self.logits(ids)[-1]
        made: list[int] = []
        while len(made) < tokens:
            choice = int(row_V.argmax())
            if self.ends(choice):
                break
            made.append(choice)
            row_V = self._decode([choice], len(ids) + len(made) - 1)[-1]
        return made

    def _decode(self, ids: Sequence[int], position: int) -> Tensor:
        if position + len(ids) > self.context:
            raise ValueError(f"{position + len(ids)} tokens, but the context holds {self.context}")
        _, data = self._process.call("decode", ids=list(ids), position=position)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(len(ids), self.vocab_size)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids; `special` adds the tokens that a text begins and ends with. Special tokens in the text count as such."""
        return list(self._process.call("tokenize", text=text, special=special)[0])

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self._process.call("detokenize", ids=list(ids))[0])

    def ends(self, number: int) -> bool:
        """Whether generation stops at this token."""
        return bool(self._process.call("ends", number=number)[0])


def quantize(source: Path, out: Path, file_type: int, *, threads: int) -> None:
    """Write a GGUF file of another type (llama_ftype) with llama.cpp's quantizer.

    Raises:
        ExportError: the quantizer failed; the message quotes it.
    """
    process = _Process()
    try:
        process.call("quantize", source=str(source), out=str(out), file_type=file_type, threads=threads)
    finally:
        process.close()
