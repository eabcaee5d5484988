"""Reads a corpus folder: checks its seal, fills the placeholders, computes expected outputs from the references.

The corpus is trusted code: its reference solutions and input generators run in this process. Its exploits do not.
"""

from __future__ import annotations

import hashlib
import json
import random
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from longreach.audit import manifest as seals
from longreach.audit.manifest import CorpusError
from longreach.audit.schema import CODE_KINDS, Control, Corpus, ExploitFile, Sample, Task, TaskFile
from longreach.audit.template import Renderer, Value, evaluate, fresh_identifier

PUBLIC = Path(__file__).with_name("corpus")
HELD_OUT = 12  # inputs for wrongness proofs, which no column of the task contains

Model = TypeVar("Model", bound=BaseModel)


def load_corpus(path: str | Path | None = None) -> Corpus:
    """The public split of the corpus at ``path``, or of the one that comes with the package.

    Raises CorpusError if a file is not the sealed one or is malformed; the message names file and field.
    """
    return _load(Path(path) if path is not None else PUBLIC, None)


def private_split(seed: int, path: str | Path | None = None) -> Corpus:
    """A fresh variant of every task and exploit: other parameters, names and hidden inputs, the same mechanisms.

    The same seed gives the same split on every machine. Keep the seed from whoever trains or tunes a reward.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed: got {seed!r}; it must be a non-negative integer")
    return _load(Path(path) if path is not None else PUBLIC, seed)


def _load(root: Path, seed: int | None) -> Corpus:
    sealed = seals.read(root)
    folders = [root / name.removesuffix("/task.toml") for name in sealed.files if name.endswith("/task.toml")]
    tasks = tuple(_task(folder, seed) for folder in sorted(folders))
    digest = hashlib.sha256()
    for task in tasks:
        texts = [task.prompt, json.dumps(task.columns, sort_keys=True)]
        texts += [f"{s.id}\n{s.text}" for s in (*task.honest, *task.wrong, *task.exploits)]
        for text in texts:
            digest.update(text.encode() + b"\0")
    return Corpus(sealed.version, "public" if seed is None else "private", digest.hexdigest(), tasks, seed)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        return model.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise CorpusError(f"{path}: {error}") from error


def _task(folder: Path, seed: int | None) -> Task:
    file = _read(folder / "task.toml", TaskFile)
    if file.id != folder.name:
        raise CorpusError(f"{folder}/task.toml: id {file.id!r} is not the folder's name")
    rng = None if seed is None else random.Random(f"{seed}/{file.id}")
    try:
        render = Renderer(_values(file, rng), rng)
        columns, prompt, held_out = _columns(file, render, seed)
        honest = tuple(_control(p, "honest", file, render) for p in sorted(folder.glob("honest/*.toml")))
        wrong = tuple(_control(p, "wrong", file, render) for p in sorted(folder.glob("wrong/*.toml")))
        exploits = tuple(_exploit(p, file, render) for p in sorted(folder.glob("exploits/*.toml")))
    except (ValueError, SyntaxError) as error:
        raise CorpusError(f"{folder.name}: {error}") from error
    for exploit in exploits:
        assert exploit.exploit is not None
        if exploit.exploit.control not in {h.id for h in honest}:
            raise CorpusError(
                f"{folder.name}/{exploit.id}: control {exploit.exploit.control!r} is no honest completion"
            )
    if not honest or not wrong:
        raise CorpusError(f"{folder.name}: a task needs at least one honest and one wrong completion")
    return Task(
        file.id,
        file.kind,
        file.title,
        prompt,
        columns,
        file.tolerance,
        tuple(file.banned),
        honest,
        wrong,
        exploits,
        held_out,
    )


def _values(file: TaskFile, rng: random.Random | None) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, parameter in file.parameters.items():
        if rng is None:
            values[name] = parameter.public
        elif parameter.identifier:
            values[name] = fresh_identifier(rng)
        elif parameter.choices is not None:
            values[name] = rng.choice(parameter.choices)
        else:
            assert parameter.low is not None and parameter.high is not None
            values[name] = rng.randint(parameter.low, parameter.high)
    for name, expression in file.derived.items():
        values[name] = evaluate(expression, values)
    return values


def _columns(file: TaskFile, render: Renderer, seed: int | None) -> tuple[dict[str, Any], str, tuple[Any, ...]]:
    prompt = render(file.prompt).strip()
    if file.kind not in CODE_KINDS:
        assert file.answer is not None
        answer = render(file.answer)
        render.values["answer"] = int(answer) if answer.lstrip("-").isdigit() else answer
        return {"answer": answer, "solution": f"${answer}$"}, prompt, ()
    assert file.reference is not None and file.generator is not None
    reference, generator = render(file.reference).strip() + "\n", render(file.generator).strip() + "\n"
    entry = render(file.entry_point or "main")
    solve, generate = _defined(reference, entry), _defined(generator, "generate")
    hidden = [generate(random.Random(f"hidden/{seed}/{file.id}/{i}")) for i in range(file.hidden)]
    held_out = [generate(random.Random(f"held-out/{seed}/{file.id}/{i}")) for i in range(HELD_OUT)]

    def expected(given: Any) -> Any:
        # JSON makes copies, so that a reference that changes its arguments cannot change the case.
        copy = json.loads(json.dumps(given))
        return solve(copy) if file.kind == "program" else solve(*copy)

    pairs = [(given, expected(given)) for given in [*file.visible, *hidden]]
    shown, proofs = pairs[: len(file.visible)], tuple((given, expected(given)) for given in held_out)
    render.values |= {"all_cases": repr(pairs), "visible_cases": repr(shown)}
    columns: dict[str, Any] = {"reference": reference, "generator": generator}
    columns |= {"rel_tol": file.tolerance.relative, "abs_tol": file.tolerance.absolute}
    if file.kind == "program":
        columns |= {"inputs": [i for i, _ in pairs], "outputs": [o for _, o in pairs]}
        examples = "\n\n".join(f"Input:\n{i}\nOutput:\n{o}" for i, o in shown)
    else:
        columns |= _function_columns(entry, pairs, shown)
        examples = "\n".join(f">>> {_call(entry, given)}\n{output!r}" for given, output in shown)
    if file.kind == "speed":
        columns["baseline"] = reference
    return columns, f"{prompt}\n\nExamples:\n{examples}" if shown else prompt, proofs


def _function_columns(entry: str, pairs: list[tuple[Any, Any]], shown: list[tuple[Any, Any]]) -> dict[str, Any]:
    return {
        "entry_point": entry,
        "cases": [{"args": given, "expected": output} for given, output in pairs],
        "visible_cases": [{"args": given, "expected": output} for given, output in shown],
        "test_list": [f"assert {_call(entry, given)} == {output!r}" for given, output in pairs],
    }


def _call(entry: str, given: list[Any]) -> str:
    return f"{entry}({', '.join(map(repr, given))})"


def _defined(source: str, name: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "corpus"}
    exec(compile(source, f"<corpus {name}>", "exec"), namespace)
    if name not in namespace:
        raise ValueError(f"the source defines no {name!r}")
    return namespace[name]


def _wrapped(file: TaskFile, payload: str, raw: bool) -> str:
    return payload if raw or file.kind not in CODE_KINDS else f"```python\n{payload.strip()}\n```"


def _control(path: Path, role: Any, file: TaskFile, render: Renderer) -> Sample:
    control = _read(path, Control)
    source = render(control.payload)
    return Sample(control.id, role, source, _wrapped(file, source, control.raw), control.note, control.faster)


def _exploit(path: Path, file: TaskFile, render: Renderer) -> Sample:
    exploit = _read(path, ExploitFile)
    if exploit.id != path.stem:
        raise CorpusError(f"{path}: id {exploit.id!r} is not the file's name")
    if exploit.generator is not None:
        parts = {k: render(v) if isinstance(v, str) else v for k, v in exploit.generator.model_dump().items()}
        source = type(exploit.generator).model_validate(parts).text()
    else:
        source = render(exploit.payload or "")
    proof = json.loads(render(exploit.proof.model_dump_json()))
    messages = json.loads(render(json.dumps(exploit.messages)))
    exploit = exploit.model_copy(update={"proof": type(exploit.proof)(**proof), "messages": messages})
    text = _wrapped(file, source, exploit.raw)
    return Sample(exploit.id, "exploit", source, text, exploit.title, before=tuple(messages), exploit=exploit)
