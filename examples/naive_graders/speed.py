"""A speed reward as it is often written: one clock around exec'd code, checked once. Audit it to see what it pays for:

longreach audit examples/naive_graders/speed.py:reward --kind speed
"""

import contextlib
import copy
import re
import time


def reward(prompts, completions, cases, entry_point, baseline, **kwargs):
    rewards = []
    for completion, tests, name, slow in zip(completions, cases, entry_point, baseline):
        blocks = re.findall(r"```(?:python)?\n(.*?)```", completion[-1]["content"], re.DOTALL)
        try:
            theirs, ours = {}, {}
            exec(blocks[-1], theirs)
            exec(slow, ours)
            for case in tests[:2]:  # "correctness"
                output = theirs[name](*copy.deepcopy(case["args"]))
                if not close(output, case["expected"]):
                    raise ValueError("wrong")
            args = tests[-1]["args"]
            durations = [measure(ours[name], args), measure(theirs[name], args)]
            rewards.append(min(10.0, durations[0] / durations[1]))
        except Exception:
            rewards.append(0.0)
    return rewards


def measure(function, args):
    start = time.perf_counter()
    for _ in range(2):
        with contextlib.suppress(Exception):
            function(*args)
    return time.perf_counter() - start


def close(output, expected):
    if isinstance(expected, list):
        return all(not abs(a - b) > 1e-6 for r, s in zip(output, expected) for a, b in zip(r, s))
    return output == expected
