"""``longreach chat``: talk to a model or to what a run has trained, in the terminal, through the rollout engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longreach.rollout import SamplingParams

HELP = "An empty line or Ctrl-D ends, Ctrl-C stops an answer, /reset forgets the conversation."


def chat(
    model: Annotated[
        str, typer.Argument(help="Folder of a run, of an adapter or of a model; a GGUF file; a model's Hub id; or zoo.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this once and end.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 for all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 for all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 for all tokens.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 for none.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    weights: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, nf4 or mxfp4 [default: as stored].")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: the GPU if there is one].")] = None,
) -> None:
    """Chat with a model; a run's newest weights or adapter are loaded."""
    from longreach.cli.terminal import fail

    try:
        place = _place(model)  # before the heavy imports: a wrong name is said at once
        from longreach.rollout import SamplingParams

        sampling = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
        talk = Conversation(*_load(place, weights, device), sampling, seed, system)
        if prompt is not None:
            talk.answer(prompt)
            return
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    typer.echo(HELP if talk.template else f"No chat template: your text is continued as it stands. {HELP}")
    _loop(talk)


def _place(name: str) -> str:
    """The folder, file or Hub id to load; of a run that has only checkpoints, the newest."""
    from longreach.cli.checkpoint import checkpoints
    from longreach.model_name import MODEL_FILES, model_place

    place = model_place(name)
    folder = Path(place)
    if not folder.is_dir() or any(any(folder.glob(file)) for file in MODEL_FILES):
        return place
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"{name!r} holds no model, adapter or checkpoint; name a run's folder or a model")
    return str(found[-1])


def _load(name: str, weights: str | None, device: str | None) -> tuple[Any, Any]:
    """Model and tokenizer."""
    import longreach
    from longreach.cli.session import quiet_libraries

    quiet_libraries()
    return longreach.load(name, weights=weights, device=device, parity_check=False)


def _loop(talk: Conversation) -> None:
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not text.strip():
            return
        if text.strip() == "/reset":
            talk.reset()
            continue
        try:
            talk.answer(text)
        except KeyboardInterrupt:
            typer.echo()
        except ValueError as error:
            typer.echo(f"error: {error}", err=True)


class Conversation:
    """Messages so far, and how the next answer is made; answers are printed as they come.

    Attributes:
        template: whether the tokenizer knows how a conversation looks; without, a text is continued as it stands.
        messages: role and content, in order.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: SamplingParams, seed: int, system: str | None) -> None:
        self.model, self.tokenizer, self.sampling, self.seed, self.system = model, tokenizer, sampling, seed, system
        self.template = bool(getattr(tokenizer, "chat_template", None))
        if system is not None and not self.template:
            raise ValueError(f"--system {system!r}: the tokenizer has no chat template; put the text into the prompt")
        self.turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> str:
        """Print the answer to a text token by token; a conversation goes on with both. Raises ValueError if it got too long."""
        from longreach.rollout import generate

        ids = self._ids(text)
        stream = TextStream(self.tokenizer)
        sampling = self._within_positions(len(ids))
        self.turn += 1
        try:
            generate(
                self.model, [ids], sampling=sampling, seed=self.seed + self.turn - 1, tokenizer=self.tokenizer,
                on_token=lambda _, so_far: typer.echo(stream.next(so_far), nl=False),
            )  # fmt: skip
        finally:  # an answer that was stopped counts as far as it got
            typer.echo(stream.rest())
            if self.template and stream.text:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": stream.text}]
        return stream.text

    def _ids(self, text: str) -> list[int]:
        if not self.template:
            return self.tokenizer(text)["input_ids"]
        messages = [*self.messages, {"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def _within_positions(self, prompt: int) -> SamplingParams:
        import dataclasses

        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is None:
            return self.sampling
        if prompt >= limit:
            raise ValueError(
                f"the conversation has {prompt:,} tokens, and the model {limit:,} positions; /reset forgets it"
            )
        return dataclasses.replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, limit - prompt))


class TextStream:
    """Text of a completion that grows token by token, given out as soon as its characters are whole."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""  # given out so far

    def next(self, ids: list[int]) -> str:
        """What the newest token adds; nothing while a character is unfinished."""
        self.ids = list(ids)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        return "" if text.endswith("\ufffd") else self._give(text)

    def rest(self) -> str:
        """What was held back."""
        return self._give(self.tokenizer.decode(self.ids, skip_special_tokens=True)) if self.ids else ""

    def _give(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new
