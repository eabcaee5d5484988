"""A reward in a file of its own, for `longreach train`: TRL's signature, plus every other column of the data by name."""


def exact_answer(prompts, completions, answer, **columns):
    """1 for the answer and nothing else, 0 otherwise. `answer` is a column of the data, one value per completion."""
    return [float(_text(completion).strip() == right) for completion, right in zip(completions, answer)]


def stays_short(completions, completion_ids, **columns):
    """A small price per token, so that of two right completions the shorter one wins."""
    return [-0.01 * len(ids) for ids in completion_ids]


def _text(completion):
    """Prompts that are conversations give completions that are lists of messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
