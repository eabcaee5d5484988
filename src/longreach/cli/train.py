"""``longreach train config.yaml``: GRPO or SFT from a file, everything checked before a model is loaded."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datasets import Dataset

    from longreach.cli.config import TrainFile


def train(
    config: Annotated[Path, typer.Argument(help="A YAML file; examples/train_grpo.yaml shows one.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run and its checkpoints.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check config, data and rewards, then stop.")] = False,
) -> None:
    """Train a model with GRPO or SFT as a config file says, with TRL's own field names."""
    from longreach.cli.terminal import INTERRUPTED, ConfigError, console, fail

    try:
        job = prepare(config, resume=resume, overwrite=overwrite or check)
    except ConfigError as error:
        fail(error)
    screen = console()
    screen.print(job.describe(), markup=False, soft_wrap=True)
    if check:
        screen.print("all checks passed; no model was loaded")
        return
    if execute(job, screen) == "interrupted":
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True)
class Job:
    """A checked run: nothing in it can still be wrong but the model itself."""

    path: Path
    file: TrainFile
    model: str
    arguments: Any
    lora: Any
    rewards: list[Any]
    shadow: Any
    train: Dataset
    held_out: Dataset | None
    resume: Path | None

    def describe(self) -> str:
        """One line on what is about to run."""
        held = f", {len(self.held_out):,} held out" if self.held_out is not None else ""
        adapter = f", LoRA r={self.lora.r}" if self.lora else ", all parameters"
        return (
            f"{self.file.method.upper()} of {self.file.model.name_or_path}{adapter}; {len(self.train):,} rows{held}; "
            f"output in {self.arguments.output_dir}"
        )


def prepare(path: Path, *, resume: bool = False, overwrite: bool = False) -> Job:
    """Read and check a config file, its data and its rewards. Raises ``ConfigError`` for the first thing wrong."""
    from longreach.cli import fields
    from longreach.cli.checkpoint import resumable, step_of
    from longreach.cli.config import METHODS, parse, read_file
    from longreach.cli.reward_file import load_reward, load_rewards, try_rewards
    from longreach.cli.terminal import ConfigError

    # Before the heavy imports, so that it is said at once: a wrong path, key, model or reward.
    raw = read_file(path)
    file = parse(
        raw, {name: fields.declared_names(name) or fields.field_names(_config_class(name)) for name in METHODS}
    )
    model = _model(file.model.name_or_path, path.parent)
    rewards = load_rewards(file.reward, path.parent)
    from longreach.cli.data import load_data

    lora = _lora(file.lora)
    train, held_out = load_data(file.data, file.method, path.parent)
    arguments = _arguments(_config_class(file.method), file, path, held_out=held_out is not None, resume=resume)
    _check_output(arguments.output_dir)
    shadow = load_reward(file.monitor.shadow, path.parent) if file.monitor.shadow is not None else None
    if rewards:
        graders = rewards if shadow is None else [*rewards, shadow]
        names = file.reward if file.monitor.shadow is None else (*file.reward, file.monitor.shadow)
        try_rewards(graders, names, [train[i] for i in range(min(2, len(train)))])
    _check_canary(file.monitor.canary, train)
    output = Path(arguments.output_dir)
    if not resume and not overwrite and (output / "log.jsonl").exists():
        raise ConfigError(
            f"output_dir={str(output)!r}: holds a run already; add --resume to go on with it, --overwrite to "
            "replace it, or name another output_dir"
        )
    checkpoint = resumable(output) if resume else None
    if checkpoint is not None and 0 < arguments.max_steps <= step_of(checkpoint):
        raise ConfigError(
            f"--resume: the run in {str(output)!r} has finished, at step {step_of(checkpoint)} of "
            f"max_steps={arguments.max_steps}; raise max_steps to go on with it"
        )
    return Job(path, file, model, arguments, lora, rewards, shadow, train, held_out, checkpoint)


def _config_class(method: str) -> type:
    from longreach.trainers.config import GRPOConfig, SFTConfig

    return {"grpo": GRPOConfig, "sft": SFTConfig}[method]


def _check_output(output_dir: str) -> None:
    from longreach.cli.terminal import ConfigError

    if not output_dir:
        raise ConfigError("output_dir='': name the folder to write to, such as runs/first")
    there = next(place for place in (Path(output_dir), *Path(output_dir).absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"output_dir={output_dir!r}: {there} is a file; name a folder")


def _check_canary(column: str | None, train: Dataset) -> None:
    from longreach.cli.terminal import ConfigError
    from longreach.spelling import nearest

    if column is None:
        return
    if column not in train.column_names:
        raise ConfigError(
            f"monitor.canary={column!r}: the data has no such column{nearest(column, train.column_names)}"
        )
    if not isinstance(train[0][column], bool):
        raise ConfigError(f"monitor.canary={column!r}: must hold true or false in every row, not {train[0][column]!r}")


def _model(name: str, base: Path) -> str:
    """The folder, file or Hub id to load: a folder beside the config goes first, "zoo" is the embedded model."""
    from longreach.cli.terminal import ConfigError
    from longreach.model_name import check_holds_model, model_place

    try:
        place = model_place(name, base)
        check_holds_model(place, name)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    return place


def _arguments(config_class: type, file: TrainFile, path: Path, *, held_out: bool, resume: bool) -> Any:
    """The trainer's config: the file's fields over a few defaults that suit a log of every step."""
    import torch

    from longreach.cli import fields

    defaults: dict[str, Any] = {
        "output_dir": f"runs/{path.stem}",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not (torch.cuda.is_available() or torch.backends.mps.is_available()),
    }
    if held_out and "eval_strategy" not in file.training:
        defaults |= {"eval_strategy": "steps", "eval_steps": 0.25, "eval_on_start": not resume}
    return fields.build(config_class, {**defaults, **file.training})


def _lora(given: dict[str, Any] | None) -> Any:
    """PEFT's config from the ``lora`` section; None trains all parameters. The task is always causal LM."""
    if given is None:
        return None
    from peft import LoraConfig

    from longreach.cli import fields

    return fields.build(LoraConfig, {"task_type": "CAUSAL_LM", **given}, section="lora.")


def execute(job: Job, screen: Any) -> str:
    """Load the model, train, save. Returns how it ended: "finished" or "interrupted"."""
    from longreach.cli import session
    from longreach.cli.display import display_for
    from longreach.cli.recorder import Recorder
    from longreach.cli.runlog import LogWriter
    from longreach.cli.terminal import fail

    session.quiet_libraries()
    output = Path(job.arguments.output_dir)
    if job.resume is None:
        _clear(output)
    log = LogWriter(output, fresh=job.resume is None)
    recorder = Recorder(log, display_for(screen), _monitor(job, output), job.file.monitor.canary)
    try:
        trainer = _trainer(job, recorder)
    except (ValueError, OSError) as error:
        fail(error)
    session.write_header(
        recorder, output.name, job.file.method, job.file.model.name_or_path, _settings(job), resume=job.resume
    )
    again = f"longreach train {shlex.quote(str(job.path))} --resume"
    outcome = session.run(trainer, recorder, screen, resume=job.resume, how_to_resume=again)
    if outcome.status == "finished":
        trainer.save_model(str(output))
        screen.print(f"model saved in {output}", soft_wrap=True)
    return outcome.status


def _monitor(job: Job, output: Path) -> Any:
    """The watch on the rewards, with the best completions archived beside the log; None without rewards."""
    if job.file.method != "grpo":
        return None
    from longreach.rewards.monitor import Monitor, MonitorConfig

    section = job.file.monitor
    config = MonitorConfig(shadow_share=section.shadow_share, pause=section.pause)
    return Monitor(config, shadow=job.shadow, archive=str(output / "best_completions.jsonl"))


def _clear(output: Path) -> None:
    """Remove the checkpoints of an earlier run, which --resume would take for this one's."""
    import shutil

    from longreach.cli.checkpoint import checkpoints

    for checkpoint in checkpoints(output):
        shutil.rmtree(checkpoint)


def _settings(job: Job) -> dict[str, Any]:
    return job.file.model_dump(exclude_none=True) | {"output_dir": job.arguments.output_dir}


def _trainer(job: Job, recorder: Any) -> Any:
    from transformers.trainer_callback import PrinterCallback

    from longreach.loading import load
    from longreach.trainers import GRPOTrainer, SFTTrainer

    model: Any = job.model
    common: dict[str, Any] = {}
    if job.file.model.weights is not None or job.file.model.embedding is not None:
        # The trainer checks the engine, once the adapter is on and if the config asks for it.
        model, tokenizer = load(
            job.model,
            weights=job.file.model.weights,
            embedding=job.file.model.embedding,
            max_length=job.arguments.max_length,
            device=job.arguments.device,
            parity_check=False,
        )
        common["processing_class"] = tokenizer
    common |= {
        "args": job.arguments,
        "train_dataset": job.train,
        "eval_dataset": job.held_out,
        "peft_config": job.lora,
        "callbacks": [recorder],
    }
    trainer: Any
    if job.file.method == "grpo":
        trainer = GRPOTrainer(model, recorder.watch(job.rewards), **common)
    else:
        trainer = SFTTrainer(model, **common)
    trainer.remove_callback(PrinterCallback)  # the display says it
    return trainer
