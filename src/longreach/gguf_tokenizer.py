"""The tokenizer in a GGUF file as one of Transformers: byte-level BPE, scored pieces that are merged, and unigram models."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split, by llama.cpp's name for it; None is GPT-2's way, which ByteLevel has built in.
SPLITS: dict[str, str | None] = {
    "gpt-2": None, "olmo": None, "default": None, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "dbrx": _LLAMA3, "qwen2": _QWEN2,
    "gpt-4o": _GPT4O,
}  # fmt: skip
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # token types of GGUF
_SPACE = "▁"


def tokenizer_of(value: Any) -> Any:
    """Build it.

    Args:
        value: gives the value of a GGUF key, or the default that is passed with it.

    Raises:
        ValueError: a kind of tokenizer, or a way to split text, that isn't known here.
    """
    from transformers import PreTrainedTokenizerFast

    kind = value("tokenizer.ggml.model", None)
    tokens, types = value("tokenizer.ggml.tokens", []), value("tokenizer.ggml.token_type", [])
    if kind == "gpt2":
        backend = _byte_level(value, tokens)
    elif kind == "llama":
        backend = _merged_pieces(value, tokens)
    elif kind == "t5":
        backend = _unigram(value, tokens)
    else:
        raise ValueError(
            f"the GGUF file's tokenizer is of kind {kind!r}; known are gpt2, llama and t5. Pass the model's HF folder."
        )
    added = [(t, k) for t, k in zip(tokens, types) if k in (_CONTROL, _USER)]
    for text, token_type in added:  # in their order, so that each keeps its number
        backend.add_tokens([AddedToken(text, special=token_type == _CONTROL, normalized=False)])
    named = {}
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        number = value(f"tokenizer.ggml.{key}_token_id", None)
        if number is not None and number < len(tokens):
            named[f"{name}_token"] = tokens[number]
    bos = value("tokenizer.ggml.bos_token_id", None)
    if bos is not None and value("tokenizer.ggml.add_bos_token", kind == "llama"):
        first = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, bos)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = value("tokenizer.chat_template", None)
    return made


def _byte_level(value: Any, tokens: list[str]) -> Tokenizer:
    name = value("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ValueError(
            f"the GGUF file splits text as {name!r}; known are {', '.join(SPLITS)}. Pass the model's HF folder."
        )
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges", [])]
    numbers = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(numbers, merges, ignore_merges=name in ("llama-bpe", "llama3")))
    split = SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [byte_level] if split is None else [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merged_pieces(value: Any, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the best-scored pair of neighbours that makes a piece is merged first."""
    scores = value("tokenizer.ggml.scores", [])
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token in sorted(numbers, key=lambda text: (-scores[numbers[text]], numbers[text])):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in numbers and token[i:] in numbers]
        merges += sorted(pairs, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    unknown = _unknown(value, tokens)
    backend = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(_SPACE)] if value("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _unigram(value: Any, tokens: list[str]) -> Tokenizer:
    pieces = list(zip(tokens, value("tokenizer.ggml.scores", [])))
    unknown = _unknown(value, tokens)
    backend = Tokenizer(models.Unigram(pieces, unk_id=tokens.index(unknown) if unknown else None, byte_fallback=True))
    scheme = "always" if value("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _unknown(value: Any, tokens: list[str]) -> str | None:
    number = value("tokenizer.ggml.unknown_token_id", None)
    if number is None:
        types = value("tokenizer.ggml.token_type", [])
        number = types.index(_UNKNOWN) if _UNKNOWN in types else None
    return None if number is None else tokens[number]
