"""An embedded model of a few megabytes and verifiable long-context tasks: all the demo needs, with no download.

`task(name)` and `tasks()` give the tasks, `model_path()` the folder to hand to `AutoModelForCausalLM.from_pretrained`;
wherever this package takes a model's name, "zoo" is enough.
On prompts of 2,048 tokens the embedded model is right about one time in four on `program_trace`, the demo's task. On
`log_facts` it reads a host's port but seldom finds the host, so that it is right about one time in thirty.
"""

from longreach.model_name import embedded_model as model_path
from longreach.zoo.log_facts import LOG_FACTS
from longreach.zoo.program_trace import PROGRAM_TRACE
from longreach.zoo.task import Task

_TASKS = {task.name: task for task in (LOG_FACTS, PROGRAM_TRACE)}

__all__ = ["Task", "model_path", "task", "tasks"]


def tasks() -> tuple[Task, ...]:
    """All tasks of the zoo."""
    return tuple(_TASKS.values())


def task(name: str) -> Task:
    """The task of that name; ValueError names the known ones."""
    if name not in _TASKS:
        raise ValueError(f"name={name!r}: unknown task; choose one of {', '.join(_TASKS)}")
    return _TASKS[name]
