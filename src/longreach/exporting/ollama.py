"""An Ollama Modelfile: the chat template in Go's template language, stop strings and sampling parameters.

Ollama does not run Jinja. The Go template is derived: the model's Jinja template is rendered for marked messages, and what
stands before and after each of them is what every turn of its role gets. Conversations rendered both ways are then compared as
token ids, so a Jinja template that does more than that is found out and refused.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from .chat import CONVERSATIONS, render
from .errors import ExportError

FILE = "Modelfile"
_SYSTEM, _USER, _ANSWER, _LAST = "MARKSYSTEM", "MARKUSER", "MARKANSWER", "MARKLAST"
_PARAMETERS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class Turns:
    """A chat template as text around messages.

    Attributes:
        head: before the first message, if that is no system message.
        system_head: before a system message.
        system: around a system message that is a turn of its own; None if there is none.
        inline: around a system message that is put in front of the first user message, inside its turn; None if it is not.
        user, answer: around these messages.
        prompt: after the last message, for the model to go on from.
    """

    head: str
    system_head: str
    system: tuple[str, str] | None
    inline: tuple[str, str] | None
    user: tuple[str, str]
    answer: tuple[str, str]
    prompt: str

    def render(self, conversation: Sequence[dict[str, str]]) -> str | None:
        """The conversation's text; None if it has a system message and the template takes none."""
        has_system = conversation[0]["role"] == "system"
        if has_system and self.system is None and self.inline is None:
            return None
        parts = [self.system_head if has_system else self.head]
        for index, message in enumerate(conversation):
            if message["role"] == "system":
                parts += [self.system[0], message["content"], self.system[1]] if self.system else []
            elif message["role"] == "user":
                parts.append(self.user[0])
                if has_system and self.inline is not None and index == 1:
                    parts += [self.inline[0], conversation[0]["content"], self.inline[1]]
                parts += [message["content"], self.user[1]]
            else:
                parts += [self.answer[0], message["content"], self.answer[1]]
        return "".join([*parts, self.prompt])

    def go(self) -> str:
        """The same in Go's template language, over Ollama's `.Messages`."""
        around = {"user": self.user, "assistant": self.answer}
        head = _text(self.head)
        if self.system_head != self.head and (self.system or self.inline is not None):
            head = f"{{{{ if .System }}}}{_text(self.system_head)}{{{{ else }}}}{head}{{{{ end }}}}"
        branches = []
        if self.system:
            branches.append(("system", f"{_text(self.system[0])}{{{{ .Content }}}}{_text(self.system[1])}"))
        for role, (before, after) in around.items():
            front = ""
            if role == "user" and self.inline is not None:
                system = f"{_text(self.inline[0])}{{{{ $.System }}}}{_text(self.inline[1])}"
                front = f"{{{{ if and $.System (eq $i 1) }}}}{system}{{{{ end }}}}"
            branches.append((role, f"{_text(before)}{front}{{{{ .Content }}}}{_text(after)}"))
        body = ""
        for number, (role, text) in enumerate(branches):
            body += f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{text}'
        return f"{head}{{{{ range $i, $_ := .Messages }}}}{body}{{{{ end }}}}{{{{ end }}}}{_text(self.prompt)}"


def _text(literal: str) -> str:
    """Text for a Go template: braces quoted, today's date computed when it is used."""
    literal = literal.replace("{{", '{{ "{{" }}')
    return literal.replace(date.today().isoformat(), "{{ currentDate }}")


def turns_of(tokenizer: Any) -> Turns:
    """Take a Jinja chat template apart.

    Raises:
        ExportError: the template is more than text around messages.
    """
    user, answer, last = (
        {"role": r, "content": c} for r, c in (("user", _USER), ("assistant", _ANSWER), ("user", _LAST))
    )
    plain = render(tokenizer, [user, answer, last])
    open_end = render(tokenizer, [user, answer, last], prompt=False)
    answered = render(tokenizer, [user, answer], prompt=False)
    if plain is None or open_end is None or answered is None:
        raise ExportError("the chat template refuses a plain conversation of user and assistant")
    try:
        start, after_user, after_answer, tail = _cut(plain, _USER, _ANSWER, _LAST)
        user_after = _cut(open_end, _LAST)[1]
        answer_after = _common_prefix(_cut(answered, _ANSWER)[1], after_answer)
        turn_user = (after_answer[len(answer_after) :], user_after)
        turn_answer = (_without(after_user, user_after, front=True), answer_after)
        head, prompt = _without(start, turn_user[0], front=False), _without(tail, user_after, front=True)
        system_head, system, inline = _system(tokenizer, turn_user, head)
    except ValueError as error:
        raise ExportError(
            f"the chat template is more than text around messages ({error}); Ollama can't have it"
        ) from error
    return _without_bos(Turns(head, system_head, system, inline, turn_user, turn_answer, prompt), tokenizer)


def _system(
    tokenizer: Any, user: tuple[str, str], head: str
) -> tuple[str, tuple[str, str] | None, tuple[str, str] | None]:
    """Head, turn or separator of a system message, as in `Turns`."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    text = render(tokenizer, messages, prompt=False)
    if text is None or _SYSTEM not in text:
        return head, None, None
    before, between, _ = _cut(text, _SYSTEM, _USER)
    if between.endswith(user[0]) and not before.endswith(user[0]):
        shared = _common_prefix(before, head)
        return shared, (before[len(shared) :], _without(between, user[0], front=False)), None
    start, opened, front = before.partition(user[0])
    if not opened:
        raise ValueError(f"{user[0]!r} expected in {before!r}")
    return start, None, (front, between)


def _cut(text: str, *marks: str) -> list[str]:
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"a message appears {text.count(mark)} times")
        before, _, text = text.partition(mark)
        pieces.append(before)
    return [*pieces, text]


def _without(text: str, part: str, *, front: bool) -> str:
    """The text without what it begins (or ends) with."""
    fits = text.startswith(part) if front else text.endswith(part)
    if not fits:
        raise ValueError(f"{part!r} expected {'before' if front else 'after'} {text!r}")
    return text[len(part) :] if front else text[: len(text) - len(part)]


def _common_prefix(a: str, b: str) -> str:
    size = 0
    while size < min(len(a), len(b)) and a[size] == b[size]:
        size += 1
    return a[:size]


def _without_bos(turns: Turns, tokenizer: Any) -> Turns:
    """Ollama puts the beginning-of-sequence token in front by itself."""
    bos = tokenizer.bos_token
    if not bos or not adds_bos(tokenizer):
        return turns
    return Turns(
        turns.head.removeprefix(bos), turns.system_head.removeprefix(bos), turns.system, turns.inline,
        turns.user, turns.answer, turns.prompt,
    )  # fmt: skip


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer begins a text with its beginning-of-sequence token; GGUF files say the same of themselves."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def modelfile(tokenizer: Any, weights: str, stops: Sequence[int], generation: Any) -> tuple[str, list[str]]:
    """The Modelfile's text, and where its template gives other token ids than the tokenizer's own."""
    lines = [f"FROM ./{weights}"]
    faults: list[str] = []
    if tokenizer.chat_template:
        turns = turns_of(tokenizer)
        faults = template_faults(tokenizer, turns)
        text = turns.go()
        if '"""' in text:
            raise ExportError('the chat template holds """, which a Modelfile can\'t quote')
        lines.append(f'TEMPLATE """{text}"""')
    for number in stops:
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(number)}"')
    for key, name in _PARAMETERS.items():
        value = getattr(generation, key, None)
        if value is not None:
            lines.append(f"PARAMETER {name} {value}")
    return "\n".join(lines) + "\n", faults


def template_faults(tokenizer: Any, turns: Turns) -> list[str]:
    """Conversations that the derived template renders to other token ids. Messages are stripped: Go templates can't do that."""
    faults = []
    begin = tokenizer.bos_token if tokenizer.bos_token and adds_bos(tokenizer) else ""
    for number, conversation in enumerate(CONVERSATIONS, 1):
        stripped = [{**message, "content": message["content"].strip()} for message in conversation]
        wanted, got = render(tokenizer, stripped), turns.render(stripped)
        if wanted is None and got is None:
            continue
        if wanted is not None and begin and not wanted.startswith(begin):
            begin = ""
        ids = [
            None if t is None else tokenizer(t, add_special_tokens=False)["input_ids"]
            for t in (wanted, begin + (got or ""))
        ]
        if ids[0] != ids[1]:
            faults.append(f"conversation {number} becomes {got!r}, expected {wanted!r}")
    return faults


def how_to_create(target: Path) -> str:
    return f"ollama create {shlex.quote(target.name)} -f {shlex.quote(str(target / FILE))}"


def create(target: Path) -> str | None:
    """Run ``ollama create`` if the program is there; returns the model's name.

    Raises:
        ExportError: Ollama refuses. The export stays where it is.
    """
    program = shutil.which("ollama")
    if program is None:
        return None
    done = subprocess.run(
        [program, "create", target.name, "-f", FILE], cwd=target, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ExportError(
            f"ollama create {target.name} failed: {(done.stderr or done.stdout).strip()[-400:]}; the files are in {target}"
        )
    return target.name
