"""A process that holds the tests and reaches the candidate only by messages.

The candidate runs in another process: it cannot see a test, an expected value or the record of what passed.
Functions, classes and their instances appear here as proxies; values cross by copy. Proxies compare by identity: a
candidate's own ``__eq__`` never decides a check.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import types
import unittest
from typing import Any

from . import codec
from .wire import FAILED, HEADER, LENGTH, NONCE_BYTES, OK, UNSENDABLE, read_exactly, write_all

ASK = 3  # a frame of the tester's that asks the candidate something
_REPLY = struct.Struct("<BI")  # status, length: the trainer's answer to an ASK


class Unsupported(Exception):
    """The tests need something that cannot cross the process boundary: the suite is at fault, not the candidate."""


class CandidateGone(BaseException):
    """The candidate's process ended; no further check can be run. Not an Exception, so that no test swallows it."""


class RemoteError(Exception):
    """The candidate raised an exception of a class of its own, or returned what cannot cross."""


class _Link:
    def __init__(self, fd: int, in_place: bool) -> None:
        self.fd = fd
        self.in_place = in_place
        self.unsupported = ""

    def ask(self, target: str, mode: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            request = codec.encode(
                (target, mode, [_outgoing(a) for a in args], {k: _outgoing(v) for k, v in (kwargs or {}).items()})
            )
        except (codec.CodecError, RecursionError) as error:
            self.unsupported = f"a test passes the candidate a value that cannot cross: {error}"
            raise Unsupported(self.unsupported) from None
        write_all(self.fd, HEADER.pack(bytes(NONCE_BYTES), ASK, len(request)) + request)
        status, length = _REPLY.unpack(read_exactly(self.fd, _REPLY.size))
        payload = read_exactly(self.fd, length)
        if status == OK:
            try:
                return codec.decode(payload, resolve=lambda ident, kind: Proxy(self, ident, kind))
            except codec.CodecError as error:
                raise RemoteError(f"malformed reply: {error}") from None
        if status in (UNSENDABLE, FAILED):
            raise _as_exception(bytes(payload))
        raise CandidateGone(bytes(payload).decode("utf-8", "replace"))


def _outgoing(value: Any) -> Any:
    if isinstance(value, Proxy):
        return {"$ref": value._ident}
    return value


def _as_exception(payload: bytes) -> BaseException:
    try:
        described = json.loads(payload)
        name, message = str(described["type"]), str(described["message"])
    except (ValueError, KeyError, TypeError):
        return RemoteError("malformed error")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and the like take other arguments
            return RemoteError(f"{name}: {message}")
    return RemoteError(f"{name}: {message}")


def _copy_back(original: Any, changed: Any) -> None:
    if type(original) is list and type(changed) is list:
        original[:] = changed
    elif type(original) in (dict, set) and type(changed) is type(original):
        original.clear()
        original.update(changed)


class Proxy:
    """A function, class or instance that lives in the candidate's process."""

    def __init__(self, link: _Link, ident: int, kind: str) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_ident", ident)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._link.ask(f"#{self._ident}.{name}", "get")

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask(f"#{self._ident}.__setattr__", "call", (name, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._link.in_place:
            return self._link.ask(f"#{self._ident}", "call", args, kwargs)
        value, after = self._link.ask(f"#{self._ident}", "mutate", args, kwargs)
        for original, changed in zip(args, after):
            _copy_back(original, changed)
        return value

    def __repr__(self) -> str:
        return f"<{self._kind} of the candidate's>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _forward(name: str) -> Any:
    def method(self: Proxy, *args: Any) -> Any:
        return self._link.ask(f"#{self._ident}.{name}", "call", args)

    return method


# No arithmetic, comparison or membership: those would hand the candidate the expected value and let it decide the
# check.
for _name in ("len", "getitem", "setitem", "delitem", "iter", "next"):
    setattr(Proxy, f"__{_name}__", _forward(f"__{_name}__"))


class _CandidateModule(types.ModuleType):
    def __init__(self, name: str, link: _Link) -> None:
        super().__init__(name)
        self.__dict__["_link"] = link

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._link.ask("", "names")
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask(name, "get")


def _run_one(name: str, run: Any) -> dict[str, Any]:
    try:
        run()
    except unittest.SkipTest:
        return {"name": name, "passed": False, "message": "skipped"}
    except (CandidateGone, Unsupported) as error:
        return {"name": name, "passed": False, "message": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        return {"name": name, "passed": False, "message": f"{type(error).__name__}: {error}"[:300]}
    return {"name": name, "passed": True, "message": ""}


def _run_case(kind: type[unittest.TestCase], method: str) -> None:
    result = unittest.TestResult()
    kind(method).run(result)
    for _, trace in [*result.errors, *result.failures]:
        raise AssertionError(trace.strip().splitlines()[-1])
    if result.testsRun != 1 or result.skipped or result.unexpectedSuccesses or result.expectedFailures:
        raise unittest.SkipTest("skipped")


def _named_test(namespace: dict[str, Any], name: str) -> Any:
    first, _, method = name.partition(".")
    found = namespace[first]
    if not method:
        return found
    if issubclass(found, unittest.TestCase):
        return lambda: _run_case(found, method)
    return lambda: getattr(found(), method)()


def serve_tests(fd: int) -> None:
    """Run the suite in the first request; the one reply holds a record for every check that was run."""
    nonce = bytes(read_exactly(fd, NONCE_BYTES))
    (length,) = LENGTH.unpack(read_exactly(fd, LENGTH.size))
    head = json.loads(bytes(read_exactly(fd, length)))
    link = _Link(fd, head["in_place"])
    module = _CandidateModule(head["module"], link)
    sys.modules[head["module"]] = module
    records: list[dict[str, Any]] = []
    broken = ""
    try:
        star = {name: getattr(module, name) for name in module.__all__} if head["snippets"] else {}
        for index, snippet in enumerate(head["snippets"]):
            code = compile(snippet, f"<check {index}>", "exec", dont_inherit=True)
            records.append(_run_one(f"check {index}", lambda code=code: exec(code, {"__name__": "__checks__", **star})))
        for file, source in head["files"].items():
            namespace = types.ModuleType(os.path.splitext(file)[0].replace("/", "."))
            sys.modules[namespace.__name__] = namespace
            code = compile(source, file, "exec", dont_inherit=True)
            exec(code, namespace.__dict__)
            for name in head["names"].get(file, ()):
                records.append(_run_one(f"{file}::{name}", _named_test(namespace.__dict__, name)))
    except CandidateGone as error:
        broken = f"candidate: {error}"
    except BaseException as error:
        broken = f"suite: {type(error).__name__}: {error}"
    answer = json.dumps({"records": records, "broken": broken, "unsupported": link.unsupported}).encode()
    write_all(fd, HEADER.pack(nonce, OK, len(answer)) + answer)
