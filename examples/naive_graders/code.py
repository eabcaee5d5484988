"""A code reward as it is often written: exec in the trainer's process, compare with ==. Audit it to see what it pays for:

longreach audit examples/naive_graders/code.py:reward --kind function
"""

import re


def reward(prompts, completions, cases, entry_point, **kwargs):
    rewards = []
    for completion, tests, name in zip(completions, cases, entry_point):
        text = completion[-1]["content"]
        blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
        namespace = {}
        try:
            exec(blocks[-1] if blocks else text, namespace)
            results = []
            for case in tests:
                expected = case["expected"]
                output = namespace[name](*case["args"])
                if isinstance(expected, list) and all(isinstance(v, float) for v in expected):
                    results.append(all(not abs(a - b) > 1e-6 for a, b in zip(output, expected)))
                else:
                    results.append(output == expected)
            rewards.append(1.0 if all(results) else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards
