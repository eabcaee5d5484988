"""A tokenizer's vocabulary in GGUF, for what llama.cpp's converter doesn't know: tokenizers that it has no fingerprint of, and
SentencePiece-like ones that exist only as tokenizer.json (Transformers no longer saves tokenizer.model).

What is chosen here is never taken on trust: verification tokenizes text with the tokenizer and with libllama and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ExportError

_SPACE = "▁"
_UNUSED_SCORE = -1e6


def pre_tokenizer(tokenizer_json: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level BPE tokenizer splits text, read from its split pattern."""
    steps = _steps(tokenizer_json.get("pre_tokenizer"))
    patterns = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    pattern = patterns[0] if patterns else ""
    cased, triples = r"\p{Lu}" in pattern, r"\p{N}{1,3}" in pattern
    if "\\p{L}" in pattern or cased:
        if cased:
            return "gpt-4o" if triples else "tekken"
        return "llama-bpe" if triples else "qwen2"
    if not patterns and any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    kinds = ", ".join(step["type"] for step in steps) or "none"
    raise ExportError(
        f"the tokenizer splits text in a way that llama.cpp has no name for (pre_tokenizer: {kinds}; {pattern!r})"
    )


def _steps(node: Any) -> list[dict[str, Any]]:
    if node is None:
        return []
    if node["type"] == "Sequence":
        inner = node.get("pretokenizers") or node.get("normalizers") or node.get("decoders") or []
        return [step for child in inner for step in _steps(child)]
    return [node]


def with_vocabulary(converter: Any) -> Any:
    """The converter's class for an architecture, with the vocabulary methods of this module in front."""
    return type(converter.__name__, (_Vocabulary, converter), {"model_arch": converter.model_arch})


class _Vocabulary:
    """Goes in front of a model class of llama.cpp's converter, whose attributes it uses."""

    dir_model: Path
    hparams: dict[str, Any]
    gguf_writer: Any

    def set_vocab(self) -> None:
        stored = self.dir_model / "tokenizer.json"
        described = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
        model = described.get("model", {})
        if (self.dir_model / "tokenizer.model").is_file() or not model:
            super().set_vocab()  # type: ignore[misc]
        elif model["type"] == "Unigram":
            self._set_pieces("t5", described, dict(model["vocab"]))
        elif model["type"] == "BPE" and model.get("byte_fallback"):
            self._set_pieces("llama", described, _merge_scores(model))
        else:
            super().set_vocab()  # type: ignore[misc]
        self._set_ends()
        self._set_stops()

    def get_vocab_base_pre(self, tokenizer: Any) -> str:
        try:
            return super().get_vocab_base_pre(tokenizer)  # type: ignore[misc]
        except NotImplementedError:
            return pre_tokenizer(json.loads((self.dir_model / "tokenizer.json").read_text(encoding="utf-8")))

    def _set_pieces(self, kind: str, described: dict[str, Any], scores: dict[str, float]) -> None:
        """Tokens with scores: kind "t5" is a unigram model, "llama" merges the best-scored neighbours."""
        import gguf
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.dir_model)
        text_of = {number: text for text, number in tokenizer.get_vocab().items()}
        added = {token["id"]: token for token in described.get("added_tokens", ())}
        unknown = tokenizer.unk_token_id
        tokens, values, types = [], [], []
        for number in range(self.hparams.get("vocab_size", len(text_of))):
            text = text_of.get(number)
            if text is None:
                text, kind_of = f"[PAD{number}]", gguf.TokenType.UNUSED
            elif number == unknown:
                kind_of = gguf.TokenType.UNKNOWN
            elif number in added:
                kind_of = gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
            elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                kind_of = gguf.TokenType.BYTE
            else:
                kind_of = gguf.TokenType.NORMAL
            tokens.append(text.encode())
            values.append(float(scores.get(text, _UNUSED_SCORE)))
            types.append(kind_of)
        writer = self.gguf_writer
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(values)
        writer.add_token_types(types)
        writer.add_add_space_prefix(_adds_space(described))
        writer.add_remove_extra_whitespaces(False)
        gguf.SpecialVocab(self.dir_model, n_vocab=len(tokens)).add_to_gguf(writer)

    def _set_ends(self) -> None:
        """Whether a text begins with one token and ends with another: libllama's default depends on how text is split."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.dir_model)
        ids, writer = tokenizer("a")["input_ids"], self.gguf_writer
        begins = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
        ends = tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]
        _put(writer, "tokenizer.ggml.add_bos_token", writer.add_add_bos_token, begins)
        _put(writer, "tokenizer.ggml.add_eos_token", writer.add_add_eos_token, ends)

    def _set_stops(self) -> None:
        """Stop tokens beyond the end-of-sequence token: llama.cpp knows an end of turn and an end of message."""
        stops = stop_ids(self.dir_model)
        if not stops:
            return
        writer = self.gguf_writer
        held = writer.kv_data[0]
        if "tokenizer.ggml.eos_token_id" not in held:
            writer.add_eos_token_id(stops[0])
        rest = [number for number in stops if number != held["tokenizer.ggml.eos_token_id"].value]
        for number, (key, add) in zip(
            rest,
            (
                ("tokenizer.ggml.eot_token_id", writer.add_eot_token_id),
                ("tokenizer.ggml.eom_token_id", writer.add_eom_token_id),
            ),
        ):
            _put(writer, key, add, number)


def _put(writer: Any, key: str, add: Any, value: Any) -> None:
    """Write a key that may be there already with another value."""
    writer.kv_data[0].pop(key, None)
    add(value)


def _merge_scores(model: dict[str, Any]) -> dict[str, float]:
    """Scores that make llama.cpp merge in the order of a BPE model's merge list."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge if isinstance(merge, (list, tuple)) else merge.split(" ")
        scores.setdefault(left + right, -float(rank))
    return scores


def _adds_space(described: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a space in front of the text."""
    for step in _steps(described.get("normalizer")):
        if step["type"] == "Prepend" and step.get("prepend") == _SPACE:
            return True
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(described.get("pre_tokenizer"))
    )


def stop_ids(folder: Path) -> list[int]:
    """The token ids at which generation stops, as generation_config.json or else config.json says."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if given is not None:
                return [int(number) for number in (given if isinstance(given, list) else [given])]
    return []
