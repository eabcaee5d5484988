"""Child process of `longreach.rewards.equivalence`: decides whether two LaTeX answers are equal with math-verify.

Run as a script with ``python -I``: it imports nothing of the trainer's. Each request is answered by a fresh fork with
limits of CPU, wall clock and memory, so that ``9^9^9^9``, a parser that recurses for ever or a simplification that eats
the memory costs one answer and leaves no state behind.

Protocol: one JSON object a line. Request ``{"gold": str, "answer": str}``; reply ``{"verdict": str, "detail": str}``
with the verdicts ``equal``, ``different``, ``limit`` and ``unreadable`` (the reference).
"""

import json
import logging
import os
import resource
import select
import signal
import sys
import time


def compare(gold: str, answer: str) -> dict[str, str]:
    """Whether two LaTeX expressions are mathematically equal, by math-verify in strict mode."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list:
        config = [LatexExtractionConfig(boxed_match_priority=0)]
        text = f"\\boxed{{{latex}}}"
        return parse(text, extraction_config=config, extraction_mode="first_match", parsing_timeout=None)

    parsed_gold, parsed_answer = read(gold), read(answer)
    # math-verify returns [expression, text]; a lone text means that it could not read the mathematics.
    if len(parsed_gold) < 2:
        return {"verdict": "unreadable", "detail": f"math-verify cannot read the reference {gold!r}"}
    if len(parsed_answer) < 2:
        return {"verdict": "different", "detail": "math-verify cannot read the answer"}
    # Both orders: verify() is not symmetric, and an answer may hide behind the order that is more lenient.
    equal = all(
        verify(a, b, strict=True, float_rounding=15, numeric_precision=30, timeout_seconds=None)
        for a, b in ((parsed_gold, parsed_answer), (parsed_answer, parsed_gold))
    )
    return {"verdict": "equal" if equal else "different", "detail": ""}


def answer_in_fork(line: bytes, seconds: float, memory: int) -> bytes:
    """Answer one request in a forked child; the child that passes its limits is killed and reported as ``limit``."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        try:
            request = json.loads(line)
            reply = compare(request["gold"], request["answer"])
        except (MemoryError, RecursionError) as error:
            reply = {"verdict": "limit", "detail": type(error).__name__}
        except BaseException as error:  # the child must answer whatever sympy raises; the parent reports it
            reply = {"verdict": "different", "detail": f"{type(error).__name__}: {error}"[:200]}
        os.write(writer, json.dumps(reply).encode())
        os._exit(0)
    os.close(writer)
    data, deadline = b"", time.monotonic() + seconds
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 65536)
        if not piece:
            break
        data += piece
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return data or b'{"verdict": "limit", "detail": "killed at its limit of time or memory"}'


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    compare("x^{2}-1", "(x-1)(x+1)")  # warms sympy's caches, which every fork then inherits
    sys.stdout.buffer.write(b'{"verdict": "ready"}\n')
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer_in_fork(line, seconds, memory) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
