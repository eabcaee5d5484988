"""The candidate's process, after it is locked down: run the source, answer calls, or be a program.

Nothing in here is trusted by anybody: the candidate can replace all of it. It only ever holds the source and the
inputs.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import sys
import types
from typing import Any

from . import codec
from .wire import FAILED, HEADER, LENGTH, NONCE_BYTES, OK, UNSENDABLE, read_exactly, write_all


def _describe(error: BaseException) -> bytes:
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    return json.dumps({"type": type(error).__name__, "message": text}).encode()


def _reply(fd: int, nonce: bytes, status: int, payload: bytes) -> None:
    write_all(fd, HEADER.pack(nonce, status, len(payload)) + payload)


def _request(fd: int) -> tuple[bytes, bytearray]:
    nonce = bytes(read_exactly(fd, NONCE_BYTES))
    (length,) = LENGTH.unpack(read_exactly(fd, LENGTH.size))
    return nonce, read_exactly(fd, length)


def load(source: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    return module


def _target(module: types.ModuleType, name: str, objects: dict[int, Any]) -> Any:
    """``f``, ``Class.method`` on a fresh instance, or ``#3.method`` on a kept object."""
    first, _, rest = name.partition(".")
    kept = first.startswith("#")
    found: Any = objects[int(first[1:])] if kept else getattr(module, first)
    for part in rest.split(".") if rest else ():
        if (
            not kept
            and isinstance(found, type)
            and not isinstance(found.__dict__.get(part), staticmethod | classmethod)
        ):
            found = found()
        found = getattr(found, part)
    return found


def _answer(module: types.ModuleType, request: Any, objects: dict[int, Any]) -> Any:
    name, mode, args, kwargs = request
    if mode == "names":
        return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = _target(module, name, objects)
    if mode == "get":
        return found
    args = [_resolved(item, objects) for item in args]
    value = found(*args, **{key: _resolved(item, objects) for key, item in kwargs.items()})
    if mode == "mutate":  # the caller's lists, dicts and sets follow what the call did to them
        return (value, [item if type(item) in (list, dict, set) else None for item in args])
    return value


def _resolved(item: Any, objects: dict[int, Any]) -> Any:
    return objects[item["$ref"]] if type(item) is dict and item.keys() == {"$ref"} else item


def serve_calls(fd: int) -> None:
    """Answer requests until the other end closes. The first one holds the source."""
    objects: dict[int, Any] = {}

    def keep(value: Any) -> int:
        objects[len(objects)] = value
        return len(objects) - 1

    nonce, payload = _request(fd)
    head = json.loads(bytes(payload))
    allow_objects = head["objects"]
    try:
        module = load(head["source"], "solution")
        if head["function"]:
            _target(module, head["function"], objects)
    except BaseException as error:
        _reply(fd, nonce, FAILED, _describe(error))
        return
    gc.freeze()  # what loading made is never scanned again; collecting here would touch, and so copy, shared pages
    _reply(fd, nonce, OK, b"")
    while True:
        try:
            nonce, payload = _request(fd)
        except EOFError:
            return
        status = FAILED
        try:
            value = _answer(module, codec.decode(payload), objects)
            status = UNSENDABLE
            answer = codec.encode(value, keep=keep if allow_objects else None)
        except BaseException as error:
            _reply(fd, nonce, status, _describe(error))
        else:
            _reply(fd, nonce, OK, answer)
            del value, answer


def run_program(fd: int) -> int:
    """Be a program: standard streams are real pipes. Returns the exit code."""
    _, payload = _request(fd)
    os.close(fd)
    # never closed: the streams live as long as the process
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape")
    error = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(error, "utf-8", "backslashreplace", line_buffering=True)
    code = 0
    try:
        load(json.loads(bytes(payload))["source"], "__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = (stop.code or 0) & 0xFF
        else:
            print(stop.code, file=sys.stderr)
            code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        atexit._run_exitfuncs()  # the process leaves by _exit, which runs none
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    return code
