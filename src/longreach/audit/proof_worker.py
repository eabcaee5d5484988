"""Runs one payload of the corpus on inputs and reports plain outputs; a script started with ``python -I -S``.

Reads one JSON line ``{"nonce", "entry", "source", "inputs"}``; writes one line a call, ``nonce`` in front, so that what a
payload prints is not taken for an output. ``entry`` is null for programs, which are run whole on each input text.
"""

import contextlib
import copy
import io
import json
import os
import sys


def plain(value: object) -> object:
    """``value`` if it is built from exact JSON types; lists and tuples of any class are read out; else a mark."""
    if type(value) in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if type(value) is dict:
        return {str(k): plain(v) for k, v in value.items()}
    return {"not plain": type(value).__name__}


def program(source: str, text: str) -> str:
    """What a program prints on ``text``."""
    sys.stdin, sys.stdout = io.StringIO(text), io.StringIO()
    output = sys.stdout
    with contextlib.suppress(SystemExit):
        exec(compile(source, "payload", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def main() -> None:
    request = json.loads(sys.stdin.readline())
    out = os.dup(1)

    def report(status: str, value: object) -> None:
        os.write(out, (json.dumps([request["nonce"], status, value]) + "\n").encode())

    function = None
    try:
        if request["entry"] is not None:
            namespace = {"__name__": "payload"}
            exec(compile(request["source"], "payload", "exec"), namespace)
            function = namespace[request["entry"]]
    except BaseException as error:
        report("error", type(error).__name__)
        os._exit(0)
    for given in request["inputs"]:
        try:
            value = program(request["source"], given) if function is None else function(*copy.deepcopy(given))  # type: ignore[operator]
            report("output", plain(value))
        except BaseException as error:
            report("error", type(error).__name__)
    os._exit(0)


if __name__ == "__main__":
    main()
