"""``longreach demo``: GRPO on the embedded model, from a first evaluation to a page, in a few minutes on two cores."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longreach.zoo.recipe import Recipe


def demo(
    seed: Annotated[
        int | None, typer.Option(help="Seed of data, sampling and training [default: the recipe's].", min=0)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/demo-DATE-TIME].")] = None,
    task: Annotated[str | None, typer.Option(help="A task of the zoo [default: the recipe's].")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a prompt [default: the recipe's].", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps [default: the recipe's].", min=1)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest checkpoint.")
    ] = False,
) -> None:
    """Watch GRPO raise the held-out reward of a small embedded model on prompts of thousands of tokens."""
    from longreach.cli.terminal import INTERRUPTED, ConfigError, console, fail

    try:
        recipe = _recipe(seed=seed, task=task, length=length, steps=steps)
        folder, checkpoint = _folder(out, resume)
    except ConfigError as error:
        fail(error)
    screen = console()
    screen.print(
        f"GRPO on the task {recipe.task}: {recipe.steps} steps, {recipe.prompts_per_step} prompts of {recipe.length:,} "
        f"tokens a step, {recipe.group} completions each; seed {recipe.seed}",
        markup=False,
        soft_wrap=True,
    )
    if execute(recipe, folder, checkpoint, screen) == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _recipe(**changes: Any) -> Recipe:
    """The demo's recipe with what the user asked for. Raises ``ConfigError`` for an unknown task."""
    import dataclasses

    from longreach.cli.data import zoo_task
    from longreach.cli.terminal import ConfigError
    from longreach.zoo.recipe import DEMO
    from longreach.zoo.task import MIN_LENGTH

    recipe = dataclasses.replace(DEMO, **{name: value for name, value in changes.items() if value is not None})
    zoo_task(recipe.task, f"--task {recipe.task!r}")
    if recipe.length < MIN_LENGTH:
        raise ConfigError(f"--length {recipe.length}: a prompt needs at least {MIN_LENGTH} tokens to hold its facts")
    return recipe


def _folder(out: Path | None, resume: bool) -> tuple[Path, Path | None]:
    """Where the run goes and the checkpoint it goes on from. Raises ``ConfigError`` for a folder that is taken."""
    from longreach.cli.checkpoint import resumable
    from longreach.cli.terminal import ConfigError

    if resume:
        if out is None:
            raise ConfigError("--resume needs --out, the folder of the run to go on with")
        return out, resumable(out)
    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / "log.jsonl").exists():
        raise ConfigError(
            f"--out {str(folder)!r}: holds a run already; add --resume to go on with it or name another folder"
        )
    return folder, None


def execute(recipe: Recipe, folder: Path, checkpoint: Path | None, screen: Any) -> str:
    """Evaluate, train, evaluate again. Returns how it ended: "finished" or "interrupted"."""
    import dataclasses

    from longreach.cli import session
    from longreach.cli.display import display_for
    from longreach.cli.recorder import Recorder
    from longreach.cli.runlog import LogWriter

    session.quiet_libraries()
    recorder = Recorder(LogWriter(folder, fresh=checkpoint is None), display_for(screen))
    trainer = _trainer(recipe, folder, recorder, evaluate_first=checkpoint is None)
    settings = dataclasses.asdict(recipe)
    model = f"embedded model, {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.1f}M parameters"
    session.write_header(recorder, folder.name, "grpo", model, settings, resume=checkpoint)
    outcome = session.run(trainer, recorder, screen, resume=checkpoint, how_to_resume=_again(recipe, folder))
    if outcome.status == "finished":
        trainer.save_model(str(folder))
    return outcome.status


def _again(recipe: Recipe, folder: Path) -> str:
    """The command that goes on with an interrupted demo: with every setting that differs from the recipe's."""
    from longreach.zoo.recipe import DEMO

    options = ("seed", "task", "length", "steps")
    changed = [f"--{name} {getattr(recipe, name)}" for name in options if getattr(recipe, name) != getattr(DEMO, name)]
    return " ".join(["longreach demo", *changed, f"--out {shlex.quote(str(folder))} --resume"])


def _trainer(recipe: Recipe, folder: Path, recorder: Any, *, evaluate_first: bool) -> Any:
    """The trainer of the recipe, with held-out evaluations: before, halfway (of an even number of steps) and after."""
    import torch
    from transformers.trainer_callback import PrinterCallback

    from longreach.trainers import GRPOConfig, GRPOTrainer
    from longreach.zoo import model_path
    from longreach.zoo import task as zoo_task

    task = zoo_task(recipe.task)
    rows = recipe.prompts_per_step * recipe.group
    config = GRPOConfig(
        output_dir=str(folder),
        seed=recipe.seed,
        max_steps=recipe.steps,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=recipe.eval_prompts * recipe.eval_group,
        num_generations=recipe.group,
        num_generations_eval=recipe.eval_group,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        adam_beta1=recipe.adam_betas[0],
        adam_beta2=recipe.adam_betas[1],
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        loss_type=recipe.loss,
        beta=recipe.beta,
        temperature=recipe.temperature,
        max_completion_length=recipe.max_completion_tokens,
        max_length=recipe.length + recipe.length // 16 + recipe.max_completion_tokens,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=recipe.steps if recipe.steps % 2 else recipe.steps // 2,
        eval_on_start=evaluate_first,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        str(model_path()),
        recorder.watch([task.reward]),
        args=config,
        train_dataset=task.dataset("train", recipe.steps * recipe.prompts_per_step, recipe.length, recipe.seed),
        eval_dataset=task.dataset("heldout", recipe.eval_prompts, recipe.length, recipe.seed),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)  # the display says it
    return trainer
