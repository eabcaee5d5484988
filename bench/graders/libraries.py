"""Maths graders of well-known libraries with TRL's signature, as their documentation says to use them."""


def math_verify_default(prompts, completions, answer, **kwargs):
    """math-verify with its default settings on the whole completion."""
    from math_verify import parse, verify

    golds = [parse(f"${gold}$") for gold in answer]
    return [float(verify(gold, parse(c[-1]["content"]))) for gold, c in zip(golds, completions)]


def trl_accuracy(prompts, completions, solution, **kwargs):
    """TRL's accuracy_reward, which sets math-verify up for boxed LaTeX."""
    from trl.rewards import accuracy_reward

    return accuracy_reward(completions, solution)


def verifiers_math_rubric():
    """verifiers' MathRubric (0.1.x)."""
    import verifiers

    from longreach.audit import from_verifiers

    return from_verifiers(verifiers.MathRubric())


def inspect_math():
    """Inspect's scorer that matches the end of the output with the target."""
    from inspect_ai.scorer import match

    from longreach.audit import from_inspect

    return from_inspect(match(location="end", numeric=True))


verifiers_math_rubric.audit_factory = True
inspect_math.audit_factory = True
