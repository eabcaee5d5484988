"""What the name of a model means: the embedded model, a folder or file here, or an id of the Hub."""

from __future__ import annotations

from pathlib import Path

from .spelling import nearest

EMBEDDED = "zoo"
EMBEDDED_FOLDER = Path(__file__).parent / "zoo" / "model"
MODEL_FILES = ("config.json", "adapter_config.json", "*.gguf")  # one of which a model's folder holds
WANTED = f"give a model's or adapter's folder, a .gguf file, an id of the Hub such as Qwen/Qwen3-4B, or {EMBEDDED!r}"


class MissingModelError(ValueError):
    """There is no model of this name; the message says where it was looked for and what would be right."""


def embedded_model() -> Path:
    """The folder of the embedded model. Raises FileNotFoundError where the installation lacks it."""
    if not (EMBEDDED_FOLDER / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{EMBEDDED_FOLDER} holds no model.safetensors: the installation is incomplete; reinstall longreach, or train the "
            f"model again with `python -m longreach.zoo.pretrain --out {EMBEDDED_FOLDER}`"
        )
    return EMBEDDED_FOLDER


def model_place(name: str | Path, base: Path | None = None) -> str:
    """The folder or file that a name stands for, or the name itself where only the Hub can know it.

    Args:
        name: "zoo" is the embedded model; a folder of that name is "./zoo".
        base: a folder that relative paths may be relative to, before the current one.

    Raises:
        MissingModelError: the name can only be a path, and there is nothing.
        ValueError: no name at all.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ValueError(f"model={name!r}: no name of a model; {WANTED}")
    text = str(name)
    if text == EMBEDDED:
        return str(embedded_model())
    for place in ([base / text] if base is not None else []) + [Path(text).expanduser()]:
        if place.exists():
            return str(place)
    if _only_a_path(text):
        raise MissingModelError(f"model={text!r}: no such {_kind(text)}{_beside(text)}; {WANTED}")
    return text


def check_holds_model(place: str, name: str | Path) -> None:
    """Raise MissingModelError, with the ``name`` that was given, for a place that is a folder without a model's files."""
    folder = Path(place)
    if folder.is_dir() and not any(any(folder.glob(held)) for held in MODEL_FILES):
        found = sorted(folder.glob("checkpoint-*/"), key=lambda path: (len(path.name), path.name))
        hint = f"; the newest checkpoint in it is {found[-1]}" if found else ""
        raise MissingModelError(
            f"model={str(name)!r}: the folder holds no config.json, adapter_config.json or .gguf file, so it is no model{hint}"
        )


def check_connected(name: str, revision: str | None = None) -> None:
    """Ask the Hub once about a model of which nothing is here: without a network its client would ask six times in 23 seconds.

    Raises:
        ConnectionError: there is no connection. All else is left to the client, which repeats what may pass.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(name).exists():
        return
    try:
        if try_to_load_from_cache(name, "config.json", revision=revision) is None:
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except Exception as error:
        # By name: the client's HTTP library, and with it the class, is another one in other versions.
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            raise ConnectionError(f"no connection: {error}") from error


def not_on_the_hub(name: str, error: Exception) -> MissingModelError:
    """The error for a name that is nothing here and that the Hub did not give."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return MissingModelError(
        f"model={name!r}: no such folder here{_beside(name)}, and not to be had from the Hub; {WANTED}. The Hub's client says: "
        f"{reason}"
    )


def _only_a_path(text: str) -> bool:
    """Whether no id of the Hub looks like this (those are NAME or OWNER/NAME), or OWNER is a folder of runs here."""
    outside = text.startswith((".", "~", "/", "\\")) or text.endswith(("/", ".gguf", ".safetensors"))
    if outside or text.count("/") > 1 or "\\" in text or Path(text).is_absolute():
        return True
    return "/" in text and any(Path(text).parent.glob("*/log.jsonl"))


def _kind(text: str) -> str:
    return "file" if Path(text).suffix in (".gguf", ".safetensors", ".json") else "folder"


def _beside(text: str) -> str:
    """What lies where the name points to: the folder that was probably meant, or the last one on the way that exists."""
    path = Path(text).expanduser()
    if path.parent.is_dir():
        near = nearest(path.name, (p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"))
        return near if "did you mean" in near else ""
    return f" (there is no folder {str(path.parent)!r} either)" if "/" in text and _only_a_path(text) else ""
