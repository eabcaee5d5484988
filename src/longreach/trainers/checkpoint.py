"""Continue a run to the same numbers: what Transformers' checkpoint leaves out, and Ctrl-C."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

logger = logging.getLogger(__name__)


class ResumableRepeatSampler(RepeatSampler):
    """TRL's sampler, which after a resume goes on with the order of the epoch that it is in.

    The order of epoch e is the e-th draw from one generator; a sampler made anew would repeat the first epoch's.

    Args:
        epochs_done: gives the number of whole epochs behind when iteration starts.
    """

    def __init__(self, *args: Any, epochs_done: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epochs_done = epochs_done
        self._epochs_drawn = 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            while self._epochs_drawn < self._epochs_done():
                torch.randperm(self.num_samples, generator=self.generator)
                self._epochs_drawn += 1
            self._epochs_drawn += 1
        return super().__iter__()


def run_state_file(checkpoint: str, process: int) -> Path:
    """Where a process keeps its part of the run's state inside a checkpoint folder."""
    return Path(checkpoint) / f"rollout_state_{process}.pt"


def save_run_state(checkpoint: str, process: int, state: dict[str, Any]) -> None:
    """Write tensors, numbers and lists; complete or not at all."""
    file = run_state_file(checkpoint, process)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.replace(file)


def load_run_state(checkpoint: str, process: int) -> dict[str, Any] | None:
    """What `save_run_state` wrote, on the CPU; None for a checkpoint without it.

    Raises:
        ValueError: if the file cannot be read.
    """
    file = run_state_file(checkpoint, process)
    if not file.is_file():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(
            f"checkpoint {checkpoint}: {file.name} cannot be read ({kind}); resume from another"
        ) from error


class Resuming(Trainer):
    """Part of a trainer: what is loaded from a checkpoint keeps the dtype that it trains in."""

    model: Any

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _dtypes_kept(self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with _dtypes_kept(self.model):
            super()._load_best_model()


@contextmanager
def _dtypes_kept(model: Any) -> Iterator[None]:
    """PEFT makes 16-bit adapters that it loads float32; on 4-bit weights they train in bfloat16."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, p in model.named_parameters():
        if name in dtypes and p.dtype != dtypes[name]:
            p.data = p.data.to(dtypes[name])


class InterruptCallback(TrainerCallback):
    """Ctrl-C ends the run after the current step, with a checkpoint to go on from; a second Ctrl-C ends it at once.

    Attributes:
        interrupted: whether the run was ended this way.
        checkpoint: the folder of the checkpoint that was saved, or None.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.checkpoint: str | None = None
        self._before: Any = None
        self._installed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to the main thread alone
            self._before = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            self._restore()
            raise KeyboardInterrupt
        self.interrupted = True
        logger.warning("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._any_process(args):
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.interrupted:
            self.checkpoint = str(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._restore()

    def _any_process(self, args: TrainingArguments) -> bool:
        """Whether any process was interrupted: all must save together."""
        if args.world_size == 1 or not torch.distributed.is_initialized():
            return self.interrupted
        flag = torch.tensor(int(self.interrupted), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _restore(self) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            self._installed = False
