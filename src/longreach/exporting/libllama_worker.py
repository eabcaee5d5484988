"""libllama in a process of its own, which `libllama` starts and talks to: the library ends its process when an assertion fails.

A request is a line of JSON; an answer is a line of JSON with the number of bytes of raw data that follow it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from array import array
from typing import Any

_F32 = 0  # ggml_type
_ERROR = 4  # ggml_log_level
_NO_FLASH = 0  # llama_flash_attn_type


class Worker:
    """Holds at most one model. Every method named in a request is called with the request's arguments."""

    def __init__(self) -> None:
        from cyllama.llama import llama_cpp

        self.cpp: Any = llama_cpp
        self.messages: list[str] = []
        llama_cpp.set_log_callback(self._keep)
        llama_cpp.ggml_backend_load_all()
        llama_cpp.llama_backend_init()

    def _keep(self, level: Any, text: Any = "") -> None:
        if int(level) == _ERROR:
            self.messages.append(str(text).strip())

    def load(self, file: str, context: int, threads: int) -> dict[str, Any]:
        params = self.cpp.LlamaModelParams()
        params.n_gpu_layers = 0
        wanted = self.cpp.LlamaContextParams()
        wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = context
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.type_k = wanted.type_v = _F32
        wanted.flash_attn_type = _NO_FLASH
        self.model = _sized(self.cpp.LlamaModel)(file, params)
        self.context = self.cpp.LlamaContext(self.model, wanted)
        self.vocab = self.model.get_vocab()
        return {"vocab_size": int(self.vocab.n_vocab), "chat_template": self.model.get_default_chat_template() or None}

    def clear(self) -> None:
        self.context.kv_cache_clear()

    def decode(self, ids: list[int], position: int) -> array[float]:
        """Logits after each of the tokens, one row after the other."""
        batch = self.cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for i, number in enumerate(ids):
            batch.add(number, position + i, [0], True)
        self.context.decode(batch)
        rows = array("f")
        for i in range(len(ids)):
            rows.extend(self.context.get_logits_ith(i))
        return rows

    def tokenize(self, text: str, special: bool) -> list[int]:
        return list(self.vocab.tokenize(text, special, True))

    def detokenize(self, ids: list[int]) -> str:
        return str(self.vocab.detokenize(ids))

    def ends(self, number: int) -> bool:
        return bool(self.vocab.is_eog(number))

    def quantize(self, source: str, out: str, file_type: int, threads: int) -> None:
        params = self.cpp.LlamaModelQuantizeParams()
        params.nthread, params.ftype = threads, file_type
        # Only expert weights that are MXFP4 from the start can be packed already; all other tensors of the source are 16-bit.
        params.allow_requantize = True
        self.cpp.model_quantize(source, out, params)


def _sized(model_class: Any) -> Any:
    """The bindings' model class with the vocabulary's size, which their `get_logits_ith` asks it for (missing in cyllama 0.2)."""
    if hasattr(model_class, "n_vocab"):
        return model_class
    return type("SizedModel", (model_class,), {"n_vocab": property(lambda self: self.get_vocab().n_vocab)})


def main() -> None:
    answers = sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # what the library prints is no answer
        worker = Worker()
        for line in sys.stdin:
            request = json.loads(line)
            data = b""
            worker.messages.clear()
            try:
                result: Any = getattr(worker, request.pop("call"))(**request)
                if isinstance(result, array):
                    data, result = result.tobytes(), None
                answer = {"result": result, "bytes": len(data)}
            except (RuntimeError, ValueError, OSError, MemoryError) as error:
                reasons = "; ".join([str(error), *worker.messages[-3:]])
                answer = {"error": reasons, "bytes": 0}
            answers.write(json.dumps(answer).encode() + b"\n" + data)
            answers.flush()


if __name__ == "__main__":
    main()
