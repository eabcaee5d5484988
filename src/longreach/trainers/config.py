"""Configurations: TRL's own, plus the fields that decide how exact chunked execution runs.

Everything is checked when the configuration is made; a message names the field, its value and what would be right.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import trl
from transformers.training_args import OptimizerNames

from ..context.offload import POLICIES
from ..context.release import STATES
from ..rollout import SamplingParams
from ..spelling import check_names
from .versions import require_supported_trl

require_supported_trl()

logger = logging.getLogger(__name__)

OFFLOAD = ("auto", *POLICIES)
MISFIT = ("error", "warn")
ROLLOUT = ("auto", "engine", "transformers")
ROLLOUT_MEMORY = ("keep", "release")
PROMPT_OVERLONG = ("error", "drop", "truncate_left")
SEQUENCE_OVERLONG = ("truncate", "drop", "error")
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
GRPO_COUNTS = (*COUNTS, "num_generations", "num_iterations", "steps_per_generation", "generation_batch_size")


def _engine_field(default: Any, help: str) -> Any:
    """A field of ours. One that takes a number or a word is `int | str | None`, though None is refused: of `int | str`
    Transformers' parser of command lines makes an int, and fails on the default."""
    return field(default=default, metadata={"help": help})


CHUNK_HELP = "Tokens per chunk of a decoder layer, or 'auto'. Any size gives the same gradients."
OFFLOAD_HELP = (
    "Waits on the host: 'none', 'host' (layer inputs), 'rows' (hidden row too), 'keys' (keys, values too), 'auto'."
)
KEEP_HELP = "Keep the inputs of every so-many-th layer only, the others are computed again; a whole number or 'auto'."
MISFIT_HELP = (
    "When the largest step cannot fit by plan: 'error' refuses to start, 'warn' goes on with what needs least memory."
)
SAVE_ATTENTION_HELP = "Keep each chunk's attention output so that the backward skips that forward, or 'auto'."
CHECKPOINTING_HELP = "Without effect: chunked layers always recompute their activations by themselves."
ROUTER_HELP = (
    "Weight of the routers' load-balancing loss; None leaves it out unless the model has output_router_logits=True."
)
PARITY_HELP = "Compare loss and gradients of a short sequence with stock eager attention before training starts."
RELEASE_HELP = (
    "Update each layer inside the backward, so that the gradients of only one layer exist at a time (full fine-tuning)."
)
STATES_HELP = f"With release_gradients, where optimizer states wait between updates: one of {', '.join(STATES)}."


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """`trl.GRPOConfig` with the fields of exact long-context training. All of TRL's fields keep their meaning.

    Gradient checkpointing is always off: the chunked layers recompute on their own and have no use for it.

    Attributes:
        max_length: longest prompt + completion, in tokens. A prompt may have `max_length - max_completion_length`.
            None: no bound.
        on_overlong: what becomes of a longer prompt: "error" (before training starts), "drop" (the row is left out) or
            "truncate_left" (its first tokens are cut). Dropped and cut prompts are counted and reported.
        chunk: tokens per chunk of a decoder layer, or "auto".
        offload: what waits in host memory: "none"; "host" (layer inputs); "rows" (the hidden row and its gradient too); "keys"
            (keys, values and their gradients too); or "auto".
        save_attention: "auto", True or False.
        keep_every: keep the inputs of every so-many-th layer only, or "auto".
        on_misfit: what becomes of a configuration whose largest step (`max_length`, rows per device) cannot fit by plan: "error"
            refuses it at the start and says what would fit; "warn" goes on with what needs least memory.
        parity_check: compare with stock eager attention before training starts.
        router_aux_loss_coef: weight of a mixture's load-balancing loss. None leaves it out, and says so, unless the model's
            config has `output_router_logits=True`, whose coefficient it then has.
        release_gradients: update each layer inside the backward: gradients of one layer at a time. Needs
            gradient_accumulation_steps=1 (larger batches cost little memory in chunks), max_grad_norm=0.0 and not fp16.
        optimizer_states: "device", or with release_gradients "host": they come to the device one layer ahead.
        rollout: how completions are drawn: "engine" by the rollout engine; "auto" by it where it knows model and options, else by
            Transformers' `generate` with a prompt computed once; "transformers" is TRL's own call of `generate`. TRL's vLLM and
            continuous-batching modes take precedence over all.
        rollout_rows: completions that the engine decodes at a time; None: what its plan says.
        rollout_memory: "keep" the engine's keys, values and graphs between rollouts, or "release" them to the training step.
        reuse_prefill: the training step takes its prompts' forward from the rollout's prefill, which is exact while the weights
            are the same: in the first iteration, with `gradient_accumulation_steps` a multiple of `steps_per_generation`. None:
            where it is exact and the plan has room for the prompts' layer inputs; True: or an error; False: prompts are computed
            again.
        rollout_correction: TRL's importance-sampling correction (its `vllm_importance_sampling_*` fields) with the engine's
            log-probs; costs one more forward per batch. The engine computes on the weights that train, so off by default.

    Raises:
        ValueError: from the constructor, for a value that cannot be used.
        TypeError: for a name that is no field, with the one that was probably meant.
    """

    gradient_checkpointing: bool | None = _engine_field(None, CHECKPOINTING_HELP)  # type: ignore[assignment]
    max_length: int | None = _engine_field(None, "Longest prompt + completion in tokens; None for no bound.")
    on_overlong: str = _engine_field("error", f"What becomes of a longer prompt: one of {', '.join(PROMPT_OVERLONG)}.")
    chunk: int | str | None = _engine_field("auto", CHUNK_HELP)
    offload: str = _engine_field("auto", OFFLOAD_HELP)
    save_attention: str = _engine_field("auto", SAVE_ATTENTION_HELP)
    keep_every: int | str | None = _engine_field("auto", KEEP_HELP)
    parity_check: bool = _engine_field(True, PARITY_HELP)
    router_aux_loss_coef: float | None = _engine_field(None, ROUTER_HELP)
    on_misfit: str = _engine_field("error", MISFIT_HELP)
    release_gradients: bool = _engine_field(False, RELEASE_HELP)
    optimizer_states: str = _engine_field("device", STATES_HELP)
    rollout: str = _engine_field("auto", f"How completions are generated: one of {', '.join(ROLLOUT)}.")
    rollout_rows: int | None = _engine_field(
        None, "Completions decoded at a time by the rollout engine; None: its plan."
    )
    rollout_memory: str = _engine_field("keep", "Between rollouts, the engine's memory: 'keep' it or 'release' it.")
    reuse_prefill: bool | None = _engine_field(
        None, "Train on the rollout's prefill while weights are the same: None where it fits by plan, True or False."
    )
    rollout_correction: bool = _engine_field(False, "Weigh tokens by the trainer/sampler ratio, as TRL does for vLLM.")

    def __new__(cls, *args: Any, **kwargs: Any) -> GRPOConfig:
        _check_fields(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_counts(self, GRPO_COUNTS)
        choose_fp16(self)
        super().__post_init__()
        check_engine_fields(self)
        _check_sampling(self)
        _check_choice("on_overlong", self.on_overlong, PROMPT_OVERLONG)
        _check_choice("rollout", self.rollout, ROLLOUT)
        _check_choice("rollout_memory", self.rollout_memory, ROLLOUT_MEMORY)
        if not isinstance(self.rollout_correction, bool):
            raise ValueError(f"rollout_correction={self.rollout_correction!r} is not a truth value; use True or False")
        if not (self.reuse_prefill is None or isinstance(self.reuse_prefill, bool)):
            raise ValueError(f"reuse_prefill={self.reuse_prefill!r} is not known; use None, True or False")
        if self.reuse_prefill and (reason := reuse_obstacle(self)) is not None:
            raise ValueError(f"reuse_prefill=True: {reason}")
        if self.neftune_noise_alpha is not None:
            raise ValueError(
                f"neftune_noise_alpha={self.neftune_noise_alpha}: TRL draws noise for each row, and the rows of a group share "
                "one computation of their prompt; leave it None (SFTConfig takes it)"
            )
        if self.rollout_rows is not None:
            self.rollout_rows = _positive("rollout_rows", self.rollout_rows, also="None")
        if self.max_length is not None:
            self.max_length = _positive("max_length", self.max_length)
            if self.max_length <= (self.max_completion_length or 0):
                raise ValueError(
                    f"max_length={self.max_length} leaves no room for a prompt: it bounds prompt + completion, and "
                    f"max_completion_length={self.max_completion_length}; make it larger than that"
                )
        _check_release(self, accumulation=self.gradient_accumulation_steps // micro_batch_factor(self))

    @property
    def max_prompt_length(self) -> int | None:
        """Longest prompt in tokens, or None for no bound."""
        return None if self.max_length is None else self.max_length - (self.max_completion_length or 0)


@dataclass
class SFTConfig(trl.SFTConfig):
    """`trl.SFTConfig` with the fields of exact long-context training. All of TRL's fields keep their meaning.

    Attributes:
        on_overlong: what becomes of a sequence longer than `max_length`: "truncate" (TRL's behaviour), "drop" or
            "error" (before training starts). Truncated and dropped sequences are counted and reported.
        chunk, offload, save_attention, keep_every, parity_check, router_aux_loss_coef, on_misfit, release_gradients,
            optimizer_states: as in :class:`GRPOConfig`.

    Raises:
        ValueError: from the constructor, for a value that cannot be used.
        TypeError: for a name that is no field, with the one that was probably meant.
    """

    gradient_checkpointing: bool | None = _engine_field(None, CHECKPOINTING_HELP)  # type: ignore[assignment]
    on_overlong: str = _engine_field(
        "truncate", f"What becomes of a sequence longer than max_length: one of {', '.join(SEQUENCE_OVERLONG)}."
    )
    chunk: int | str | None = _engine_field("auto", CHUNK_HELP)
    offload: str = _engine_field("auto", OFFLOAD_HELP)
    save_attention: str = _engine_field("auto", SAVE_ATTENTION_HELP)
    keep_every: int | str | None = _engine_field("auto", KEEP_HELP)
    parity_check: bool = _engine_field(True, PARITY_HELP)
    router_aux_loss_coef: float | None = _engine_field(None, ROUTER_HELP)
    on_misfit: str = _engine_field("error", MISFIT_HELP)
    release_gradients: bool = _engine_field(False, RELEASE_HELP)
    optimizer_states: str = _engine_field("device", STATES_HELP)

    def __new__(cls, *args: Any, **kwargs: Any) -> SFTConfig:
        _check_fields(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_counts(self, COUNTS)
        choose_fp16(self)
        super().__post_init__()
        check_engine_fields(self)
        _check_choice("on_overlong", self.on_overlong, SEQUENCE_OVERLONG)
        if self.max_length is not None:
            self.max_length = _positive("max_length", self.max_length)
        _check_release(self, accumulation=self.gradient_accumulation_steps)


def _check_fields(cls: Any, given: dict[str, Any]) -> None:
    """Raise TypeError for a name that is no field; a subclass with a constructor of its own knows its arguments itself."""
    if "__dataclass_fields__" in cls.__dict__:
        check_names(cls.__name__, given, (f.name for f in fields(cls) if f.init))


def reuse_obstacle(config: GRPOConfig) -> str | None:
    """What in a configuration rules out that a training step takes its prompts from the rollout's prefill."""
    generation, step = config.steps_per_generation or 1, config.gradient_accumulation_steps
    if config.rollout == "transformers" or config.use_vllm:
        return "the rollout engine does not draw the completions (rollout, use_vllm)"
    if step % generation:
        return (
            f"the weights change while a generation is trained on: gradient_accumulation_steps={step} is not a multiple of "
            f"steps_per_generation={generation}"
        )
    if config.max_length is None:
        return "max_length=None leaves no plan of the memory that it takes"
    if config.keep_every not in ("auto", 1):
        return f"keep_every={config.keep_every} keeps only some layers' inputs"
    return None


def check_engine_fields(config: GRPOConfig | SFTConfig) -> None:
    """Check and normalize the fields handed to `longreach.enable`. Raises ValueError."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # its name since Transformers 5.23
        if hasattr(config, name):
            setattr(config, name, False)
    for name in ("chunk", "keep_every"):
        if getattr(config, name) != "auto":
            setattr(config, name, _positive(name, getattr(config, name), also="'auto'"))
    _check_choice("offload", config.offload, OFFLOAD)
    _check_choice("on_misfit", config.on_misfit, MISFIT)
    choices = {"auto": "auto", "true": True, "false": False}
    if str(config.save_attention).lower() not in choices:
        raise ValueError(f"save_attention={config.save_attention!r} is not known; use 'auto', True or False")
    config.save_attention = choices[str(config.save_attention).lower()]  # type: ignore[assignment]
    if not isinstance(config.parity_check, bool):
        raise ValueError(f"parity_check={config.parity_check!r} is not a truth value; use True or False")
    if config.fp16 and config.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        # It skips an overflowing step by itself, unseen by accelerate: the learning rate's schedule would go on.
        config.optim = OptimizerNames.ADAMW_TORCH
    if config.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True replaces the layers and the loss that exact chunked execution runs; set it to False"
        )


def choose_fp16(config: GRPOConfig | SFTConfig) -> None:
    """TRL's default is bf16; a card that only emulates it gets fp16 instead, if nothing was chosen."""
    if config.bf16 is not None or config.fp16 or config.use_cpu or not torch.cuda.is_available():
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        config.fp16 = True
        logger.warning("%s has no bf16: fp16=True is used; set bf16 or fp16 to choose", torch.cuda.get_device_name())


def _check_release(config: GRPOConfig | SFTConfig, *, accumulation: int) -> None:
    """What an update inside the backward rules out. Raises ValueError."""
    if not isinstance(config.release_gradients, bool):
        raise ValueError(f"release_gradients={config.release_gradients!r} is not a truth value; use True or False")
    _check_choice("optimizer_states", config.optimizer_states, STATES)
    if not config.release_gradients:
        if config.optimizer_states != "device":
            raise ValueError(
                f"optimizer_states={config.optimizer_states!r} needs release_gradients=True: states come to the device layer by "
                "layer, with that layer's update"
            )
        return
    told = "release_gradients=True updates each layer inside the backward"
    if accumulation > 1:
        raise ValueError(
            f"{told}, so gradients can't be summed over micro-batches: gradient_accumulation_steps must be 1, not "
            f"{config.gradient_accumulation_steps}; raise per_device_train_batch_size instead (now "
            f"{config.per_device_train_batch_size}): in chunks, more rows take little more memory"
        )
    if config.max_grad_norm:
        raise ValueError(
            f"{told}, before the norm of all gradients is known, so max_grad_norm={config.max_grad_norm} can't clip by it; set "
            "max_grad_norm=0.0 (the norm is still logged), or release_gradients=False"
        )
    if config.fp16:
        raise ValueError(
            f"{told}, but fp16=True may have to skip a step after all gradients are known; use bf16=True, or fp16=False for fp32"
        )
    if config.auto_find_batch_size:
        raise ValueError(
            f"{told}, so a step that runs out of memory can't be taken again with fewer rows: set auto_find_batch_size=False"
        )
    if config.world_size > 1 or config.deepspeed or config.fsdp:
        raise ValueError(
            f"{told}, which one process does for itself; there are {config.world_size}: release_gradients=False"
        )


def micro_batch_factor(config: GRPOConfig) -> int:
    """How many of the user's micro-batches are joined so that none holds a part of a group.

    A group split over micro-batches would have its prompt computed once per part. With factor k a joined micro-batch
    has k × `per_device_train_batch_size` rows and there are `gradient_accumulation_steps` / k of them.

    Raises:
        ValueError: if whole micro-batches cannot be joined to whole groups within one optimizer step.
    """
    group, rows, steps = config.num_generations, config.per_device_train_batch_size, config.steps_per_generation
    assert group is not None and steps is not None  # TRL has settled them
    local = rows * steps  # rows of one process per round of generation
    if local % group == 0:
        unit = group
    elif group % local == 0:
        unit = local  # a group spans processes; the rows that this one holds stay together
    else:
        raise ValueError(
            f"a process generates per_device_train_batch_size × steps_per_generation = {rows} × "
            f"{steps} = {local} rows at a time, which neither is a multiple of num_generations="
            f"{group} nor divides it; choose them so that whole groups stay together"
        )
    factor = math.lcm(rows, unit) // rows
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if getattr(config, name) % factor:
            raise ValueError(
                f"per_device_train_batch_size={rows} splits groups of num_generations={group}, and joining {factor} "
                f"micro-batches to keep them whole needs {name} to be a multiple of {factor}, not "
                f"{getattr(config, name)}; set per_device_train_batch_size={rows * factor} with the "
                f"gradient_accumulation_steps you want, or change {name}"
            )
    return factor


def _check_counts(config: GRPOConfig | SFTConfig, names: tuple[str, ...]) -> None:
    """Before TRL divides by them. Raises ValueError."""
    for name in names:
        if getattr(config, name) is not None:
            _positive(name, getattr(config, name))


def _check_sampling(config: GRPOConfig) -> None:
    """What a rollout can't draw with, before it begins. Raises ValueError."""
    if not config.temperature > 0:
        raise ValueError(
            f"temperature={config.temperature!r} is out of range: it divides the logits, so use a number greater than 0"
        )
    if not config.use_vllm:  # which has ranges of its own
        _positive("max_completion_length", config.max_completion_length)
        SamplingParams(
            top_k=config.top_k or 0,
            top_p=config.top_p,
            min_p=config.min_p or 0.0,
            repetition_penalty=config.repetition_penalty,
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(repr(c) for c in choices)}")


def _positive(name: str, value: Any, also: str = "") -> int:
    text = f"a positive whole number{f' or {also}' if also else ''}"
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number; use {text}") from None
    if isinstance(value, bool) or number != float(value) or number <= 0:
        raise ValueError(f"{name}={value!r} is out of range; use {text}")
    return number
