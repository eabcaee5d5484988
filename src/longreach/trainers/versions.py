"""Which TRL can be subclassed: a version range, and a check that the methods overridden here are the ones known."""

from __future__ import annotations

import inspect
from importlib.metadata import version

from packaging.version import Version

OLDEST, NEXT_MAJOR = Version("1.8.0"), Version("2.0.0")
# Overridden here, with the leading parameters relied upon
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "GRPOTrainer": {
        "_prepare_inputs": ("generation_batch",),
        "_tokenize_prompts": ("prompts",),
        "_generate_single_turn": ("prompt_ids",),
        "_generate_and_score_completions": ("inputs",),
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
        "_compute_loss": ("model", "inputs"),
        "_get_train_sampler": ("dataset",),
    },
    "SFTTrainer": {
        "_prepare_dataset": ("dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"),
    },
}


class UnsupportedTRLError(ImportError):
    """The installed TRL is not one that the trainers can extend."""


def require_supported_trl() -> None:
    """Raise UnsupportedTRLError unless the installed TRL has the methods that the trainers override."""
    installed = version("trl")
    wanted = f"install trl>={OLDEST},<{NEXT_MAJOR}"
    if not OLDEST <= Version(installed) < NEXT_MAJOR:
        raise UnsupportedTRLError(f"trl {installed} is not supported; {wanted}")
    import trl

    for trainer, methods in METHODS.items():
        for name, expected in methods.items():
            method = getattr(getattr(trl, trainer), name, None)
            if method is None:
                raise UnsupportedTRLError(f"trl {installed} has no {trainer}.{name}, which is extended here; {wanted}")
            found = tuple(inspect.signature(method).parameters)[1 : 1 + len(expected)]
            if found != expected:
                raise UnsupportedTRLError(
                    f"trl {installed}: {trainer}.{name} takes {found} where {expected} is expected; {wanted}"
                )
