"""Watches a run from inside any Transformers trainer: writes the log and feeds the display."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from longreach.cli import machine
from longreach.cli.runlog import KEPT_COMPLETION, KEPT_HEAD, KEPT_TAIL, LogWriter, from_metrics, shortened
from longreach.report.log import Record
from longreach.rewards.monitor import Monitor
from longreach.trainers.reward_calls import is_async, reward_name

KEPT_PER_EVAL = 8


class Display(Protocol):
    """Where a run shows itself while it goes on."""

    def begin(self, step: int, total: int) -> None: ...

    def step(self, record: Record, eta: float | None) -> None: ...

    def evaluated(self, record: Record) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Recorder(TrainerCallback):
    """Writes a ``step`` record per logged step and an ``eval`` record per evaluation, and keeps them.

    Args:
        log: where records go.
        display: shown every record as it is written.
        monitor: shown every step's completions and rewards for signs of gaming, or None.
        canary: name of the data's boolean column of canaries: their rewards are watched and not paid, or None.

    Attributes:
        steps, evals, alarms: what was recorded since the start of the program.
    """

    def __init__(
        self, log: LogWriter, display: Display, monitor: Monitor | None = None, canary: str | None = None
    ) -> None:
        self.log, self.display, self.monitor, self.canary = log, display, monitor, canary
        self.paused = False
        self.steps: list[Record] = []
        self.evals: list[Record] = []
        self.alarms: list[Record] = []
        self.started = time.monotonic()
        self._step_began = self.started
        self._durations: list[float] = []  # of each step since the start
        self._busy, self._tokens = 0.0, 0.0  # seconds and tokens at the last record
        self._memory: dict[str, int] = {}
        self._batches: list[_Batch] = []  # seen by the rewards since the last step or evaluation batch
        self._train_samples: list[Record] = []
        self._eval_samples: list[Record] = []

    def watch(self, rewards: Sequence[Any]) -> list[Any]:
        """The reward functions, each wrapped so that completions and rewards are seen; models come back as they are."""
        return [reward if hasattr(reward, "parameters") else self._watched(reward) for reward in rewards]

    def _watched(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        name = reward_name(reward)

        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            values = await reward(*args, **kwargs)
            self._saw(name, values, kwargs)
            return self._payable(values, kwargs)

        def synchronous(*args: Any, **kwargs: Any) -> Any:
            values = reward(*args, **kwargs)
            self._saw(name, values, kwargs)
            return self._payable(values, kwargs)

        watched: Callable[..., Any] = asynchronous if is_async(reward) else synchronous
        watched.__name__ = name  # the trainer names its metrics after it
        return watched

    def _payable(self, values: Any, call: dict[str, Any]) -> Any:
        """What the trainer is told: nothing for canaries, so that they have no weight in the loss."""
        flags = call.get(self.canary) if self.canary is not None else None
        if flags is None or not hasattr(values, "__len__") or len(values) != len(flags):
            return values
        return [None if flag else value for flag, value in zip(flags, values)]

    def _saw(self, name: str, values: Any, call: dict[str, Any]) -> None:
        completions = call["completions"]
        # The functions of one batch are called with the same list: that is how their rewards are put together.
        if not self._batches or self._batches[-1].completions is not completions:
            self._batches.append(_Batch(call["prompts"], completions, call.get("completion_ids"), _columns(call)))
        if hasattr(values, "__len__") and len(values) == len(completions):
            self._batches[-1].rewards[name] = [None if value is None else float(value) for value in values]

    def _take_samples(self) -> list[Record]:
        samples = [sample for batch in self._batches for sample in batch.samples()]
        self._batches.clear()
        return samples

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tokens = float(state.num_input_tokens_seen)
        self.display.begin(state.global_step, state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_began = time.monotonic()
        machine.reset_peak()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._durations.append(time.monotonic() - self._step_began)
        self._memory = machine.memory()
        self._train_samples += self._take_samples()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._eval_samples += self._take_samples()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if any(key.startswith("eval_") for key in logs):
            self._write_eval(state, logs)
        elif "train_runtime" not in logs:  # that is the trainer's own summary, not a step
            self._write_step(state, logs)
            if self.monitor is not None and self.monitor.should_pause and not self.paused:
                self.paused = control.should_save = control.should_training_stop = True
                self.display.say("paused by the monitor: look at the alarms and completions, then go on with --resume")

    def _write_step(self, state: TrainerState, logs: dict[str, Any]) -> None:
        record: Record = {"type": "step", "step": state.global_step, "total_steps": state.max_steps}
        record["seconds"] = self.seconds
        record |= from_metrics(logs)
        done = sum(self._durations)
        if self._durations:
            record["step_seconds"] = round(self._durations[-1], 4)
        gained, spent = record.get("tokens", 0) - self._tokens, done - self._busy
        if "tokens" in record:
            self._tokens = record["tokens"]
        if gained > 0 and spent > 0:
            record["tokens_per_second"] = gained / spent
        self._busy = done
        record["memory"] = self._memory
        samples, self._train_samples = self._train_samples, []
        if samples:
            record["completions"] = [_kept(sample) for sample in _best_and_worst(samples)]
        alarms = self._observe(state.global_step, samples)
        if alarms:
            record["alarms"] = alarms
            self.alarms += alarms
        self.log.write(record)
        self.steps.append(record)
        self.display.step(record, self._eta(state))
        for alarm in alarms:
            self.display.say(f"alarm at step {alarm['step']}: {alarm['message']}")

    def _observe(self, step: int, samples: Sequence[Record]) -> list[Record]:
        """The monitor's new alarms for the completions of a step; a completion without any reward counts as unpaid."""
        if self.monitor is None or not samples:
            return []
        names = list(samples[0]["rewards"])
        components = {name: [sample["rewards"].get(name) for sample in samples] for name in names}
        paid = [None if _unpaid(sample) else _total(sample) for sample in samples]
        prompts = [sample["prompt"] for sample in samples]
        completions = [sample["completion"] for sample in samples]
        columns = {name: [sample["columns"][name] for sample in samples] for name in samples[0]["columns"]}
        canary = [bool(flag) for flag in columns[self.canary]] if self.canary in columns else None
        found = self.monitor.observe(
            step, prompts, completions, paid, components, canary=canary, columns=columns
        )  # fmt: skip
        return [alarm.to_json() for alarm in found]

    def _write_eval(self, state: TrainerState, logs: dict[str, Any]) -> None:
        record: Record = {"type": "eval", "step": state.global_step, "seconds": self.seconds}
        record |= from_metrics(logs, prefix="eval_")
        samples, self._eval_samples = self._eval_samples, []
        if samples:
            record["completions"] = [_kept(sample) for sample in samples[:: -(-len(samples) // KEPT_PER_EVAL)]]
        self.log.write(record)
        self.evals.append(record)
        self.display.evaluated(record)

    @property
    def seconds(self) -> float:
        """Since this recorder was made."""
        return round(time.monotonic() - self.started, 3)

    def _eta(self, state: TrainerState) -> float | None:
        recent = self._durations[-10:]
        return (state.max_steps - state.global_step) * sum(recent) / len(recent) if recent else None


class _Batch:
    """One batch as the reward functions saw it."""

    def __init__(
        self, prompts: Sequence[Any], completions: Sequence[Any], ids: Sequence[Any] | None, columns: dict[str, Any]
    ) -> None:
        self.prompts, self.completions, self.ids, self.columns = prompts, completions, ids, columns
        self.rewards: dict[str, list[float | None]] = {}

    def samples(self) -> list[Record]:
        return [
            {
                "prompt": self.prompts[i],
                "completion": self.completions[i],
                "rewards": {name: values[i] for name, values in self.rewards.items()},
                "tokens": len(self.ids[i]) if self.ids is not None else None,
                "columns": {name: values[i] for name, values in self.columns.items()},
            }
            for i in range(len(self.completions))
        ]


def _columns(call: dict[str, Any]) -> dict[str, Any]:
    """The data's columns among a reward's arguments."""
    count = len(call["completions"])
    own = ("prompts", "completions", "completion_ids", "environments")
    return {k: v for k, v in call.items() if k not in own and isinstance(v, (list, tuple)) and len(v) == count}


def _kept(sample: Record) -> Record:
    return {
        **{k: v for k, v in sample.items() if k != "columns"},
        "prompt": shortened(sample["prompt"], KEPT_HEAD, KEPT_TAIL),
        "completion": shortened(sample["completion"], KEPT_COMPLETION // 2, KEPT_COMPLETION // 2),
    }


def _total(sample: Record) -> float:
    return sum(value or 0.0 for value in sample["rewards"].values())


def _unpaid(sample: Record) -> bool:
    return all(value is None for value in sample["rewards"].values())


def _best_and_worst(samples: Sequence[Record]) -> list[Record]:
    """The first of the highest and the first of the lowest total reward; one where all are equal."""
    totals = [_total(sample) for sample in samples]
    best, worst = totals.index(max(totals)), totals.index(min(totals))
    return [samples[best]] if best == worst else [samples[best], samples[worst]]
