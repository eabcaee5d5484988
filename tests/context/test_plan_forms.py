"""The planner's other inputs: forms of weights, optimizers, experts, sampling, limits; and the figures that it has to reach."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model

from bench import models
from longreach.context import limits, memory
from longreach.context.auto import Loaded
from longreach.context.limits import Limits, host_total
from longreach.context.memory import resident, scoring_memory, step_memory
from longreach.context.plan import PlanError, plan
from longreach.context.policy import Policy
from longreach.context.sampling import Sampling, fitting_rows, sampling_memory
from longreach.context.shape import KNOWN
from longreach.context.speed import CARDS, GB
from longreach.context.work import FORMATS, OPTIMIZERS, Work, optimizer_kind, weight_bytes
from longreach.lora.experts import expert_parameters
from longreach.rollout.cache import LayerCache
from longreach.rollout.cache import Limits as RolloutLimits

QWEN, OSS = KNOWN["qwen3-4b"], KNOWN["gpt-oss-20b"]
LEAN = {"completion": 1024, "weights": "nf4", "lora": 16, "embedding": "int8", "optimizer": "adamw_8bit"}


def work(shape=QWEN, weights="nf4", rank=16, **changes) -> Work:
    step = {"context": 32768, "completion": 1024, "group": 1} | changes
    return Work(shape, weights=weights, ranks=dict.fromkeys(shape.linears, rank) if rank else {}, **step)


# --- figures to reach


@pytest.mark.parametrize(("context", "most"), [(4096, 3.2), (32768, 4.0), (131072, 6.0), (380000, 12.0)])
def test_qlora_of_a_4b_model_is_within_its_target(context, most):
    made = plan("Qwen3-4B", context=context, gpu_bytes=141 * GB, host_bytes=512 * GB, **LEAN)
    found = [c for c in made.choices() if c.memory.gpu <= most * GB and c.fits(made.limits)]
    assert found and (context < 380000 or found[0].policy.chunk == 8192)


def test_adapters_in_16_bits_halve_what_trains():
    how = {
        "context": 8192,
        "completion": 1024,
        "weights": "bf16",
        "lora": 32,
        "gpu_bytes": 141 * GB,
        "host_bytes": 512 * GB,
    }
    wide, half = (plan("gpt-oss-20b", **how, lora_dtype=d).choice.memory.parts for d in (None, "bf16"))
    for part in ("adapters", "gradients", "optimizer states"):
        assert half[part] * 2 == wide[part], part
    with pytest.raises(ValueError, match="lora_dtype='int8', lora=32: choose 'bf16' with lora"):
        plan("gpt-oss-20b", **how, lora_dtype="int8")
    with pytest.raises(ValueError, match="lora_dtype='bf16', lora=None: choose"):
        plan("gpt-oss-20b", **how | {"lora": None}, lora_dtype="bf16")


def test_streamed_it_stays_within_6_gb_at_380k_and_grows_by_the_rotary_tables_only():
    lean = {**LEAN, "offload": "keys", "chunk": 4096, "keep_every": 6, "gpu_bytes": 24 * GB, "host_bytes": 512 * GB}
    at_380k, at_1m = (plan("Qwen3-4B", context=n, **lean).gpu for n in (380_000, 1 << 20))
    assert at_380k <= 6 * GB
    assert at_1m - at_380k < ((1 << 20) - 380_000) * (2 * 2 * QWEN.head_dim + 32)


def test_a_card_of_24_gb_takes_a_million_tokens():
    assert plan("Qwen3-4B", context=8192, gpu_bytes=24 * GB, host_bytes=256 * GB, **LEAN).longest() >= 1 << 20


@pytest.mark.parametrize(
    "lora", [8, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])], ids=["experts", "attention"]
)
def test_gpt_oss_as_published_takes_81k_in_16_gb(lora):
    lean = {**LEAN, "weights": "mxfp4", "lora": lora, "gpu_bytes": 80 * GB, "host_bytes": 256 * GB}
    made = plan("gpt-oss-20b", context=81920, **lean)
    found = [c for c in made.choices() if c.memory.gpu <= 16 * GB and c.fits(made.limits)]
    assert found and found[0].policy.keep_every == 1 and found[0].policy.chunk >= 2048
    assert 12 * GB < found[0].memory.parts["weights"] < 13 * GB


# --- forms of weights


@pytest.mark.parametrize("form", ["nf4", "mxfp4"])
def test_packed_weights_are_counted_as_they_are_stored(form):
    shape = dataclasses.replace(models.shape_of("Qwen3-0.6B", 1, tiny=False), vocab=1000)
    model = models.pack(models.build(shape, 64, "cpu"), form)
    found = Loaded.of(model)
    assert found.weights == form
    rotary = sum(b.numel() * 4 for n, b in model.named_buffers() if "inv_freq" in n)
    assert found.model_bytes - rotary == pytest.approx(weight_bytes(shape, form), rel=2e-3)


def test_gpt_oss_keeps_the_linear_layers_of_attention_as_they_are():
    shape = dataclasses.replace(models.shape_of("gpt-oss-20b", 1, tiny=True), hidden=64, mlp=64)
    found = Loaded.of(models.pack(models.build(shape, 64, "cpu"), "mxfp4"))
    assert found.weights == "mxfp4"
    packed = weight_bytes(shape, "mxfp4")
    assert weight_bytes(shape, "bf16") - packed == pytest.approx(
        shape.expert_matrices * (2 - FORMATS["mxfp4"].expert), abs=8
    )
    assert found.model_bytes == pytest.approx(packed, rel=0.02)


def test_a_layer_is_dequantized_once_for_all_its_chunks():
    many, one = (step_memory(work(context=n), Policy(8192, "host")).parts for n in (32768, 4096))
    assert many["dequantized weights"] == 2 * QWEN.linear_matrices
    assert one["dequantized weights"] == 2 * QWEN.hidden * QWEN.mlp
    assert "dequantized weights" not in step_memory(work(weights="bf16"), Policy(8192, "host")).parts


def test_experts_are_dequantized_within_their_scratch():
    parts = step_memory(work(OSS, "mxfp4"), Policy(8192, "host")).parts
    assert parts["dequantized weights"] == 512 * 2**20
    assert "dequantized weights" not in step_memory(work(OSS, "bf16"), Policy(8192, "host")).parts


def test_expert_adapters_are_counted():
    targets = [f"{i}.mlp.experts.{name}" for i in range(24) for name in ("gate_up_proj", "down_proj")]
    lora = LoraConfig(r=8, target_modules=["q_proj"], target_parameters=targets)
    made = plan("gpt-oss-20b", context=8192, completion=512, weights="bf16", lora=lora, gpu_bytes=141 * GB)
    expert = 8 * 32 * ((2880 + 2 * 2880) + (2880 + 2880))
    assert made.work.trained == 24 * (expert + 8 * (2880 + 4096))


def test_adapters_of_a_loaded_mixture_are_told_apart():
    shape = dataclasses.replace(models.shape_of("gpt-oss-20b", 2, tiny=True), mlp=64)
    model = models.build(shape, 64, "cpu")
    lora = LoraConfig(
        r=4, target_modules="all-linear", target_parameters=expert_parameters(model), task_type="CAUSAL_LM"
    )
    found = Loaded.of(get_peft_model(model, lora))
    assert dict(found.ranks) == dict.fromkeys((*shape.linears, *shape.expert_linears), 4)
    assert found.trained_bytes == 4 * shape.layers * shape.adapter(dict(found.ranks))


def test_tables_in_8_bits_save_a_byte_per_entry():
    lean, full = (weight_bytes(QWEN, "nf4", eight) for eight in (True, False))
    assert full - lean == pytest.approx(QWEN.table - 4 * QWEN.vocab, abs=16)


def test_with_experts_a_short_step_runs_in_one_chunk():
    step = {"context": 6144, "completion": 512, "lora": 8, "gpu_bytes": 141 * GB}
    assert plan("gpt-oss-20b", weights="mxfp4", **step).policy.chunk == 6144
    assert plan(QWEN, weights="bf16", **step).policy.chunk == 2048


# --- what trains


@pytest.mark.parametrize(
    ("optim", "kind"),
    [
        ("adamw_torch_fused", "adamw"), ("adamw_torch", "adamw_foreach"), ("adamw_8bit", "adamw_8bit"),
        ("adamw_torch_4bit", "adamw_8bit"), ("paged_adamw_32bit", "paged_adamw"), ("lion_32bit", "lion"),
        ("paged_adamw_8bit", "paged_adamw_8bit"), ("lion_8bit", "lion_8bit"),
        ("adafactor", "adafactor"), ("sgd", "sgd"), ("galore_adamw", "adamw"),
    ],
)  # fmt: skip
def test_optimizers_of_transformers_have_a_kind(optim, kind):
    assert optimizer_kind(optim) == kind and kind in OPTIMIZERS


def test_states_lie_where_the_optimizer_keeps_them():
    sizes = {
        kind: resident(work(optimizer=kind))["optimizer states"]
        for kind in ("adamw", "adamw_8bit", "sgd", "paged_adamw")
    }
    trained = work().trained
    assert sizes["adamw"] == 8 * trained and sizes["sgd"] == sizes["paged_adamw"] == 0
    assert 2 * trained <= sizes["adamw_8bit"] < 2.1 * trained
    assert step_memory(work(optimizer="paged_adamw"), Policy(8192, "none")).host == 8 * trained


def test_released_gradients_are_those_of_a_layer_and_the_tables():
    full = dict(weights="bf16", rank=0)
    parts = [step_memory(work(released=r, **full), Policy(8192, "host")).parts["gradients"] for r in (False, True)]
    assert parts[0] == 2 * QWEN.parameters
    assert parts[1] == 2 * (QWEN.layer_matrices + QWEN.layer_vectors + QWEN.table)
    on_host = step_memory(work(released=True, optimizer="host_adamw", **full), Policy(8192, "host"))
    assert on_host.host_parts["optimizer states"] == 8 * QWEN.parameters
    assert on_host.parts["optimizer states"] < QWEN.parameters


def test_a_reference_model_several_processes_and_a_standing_cache_add_up():
    plain, more = (
        step_memory(work(), Policy(8192, "host")),
        step_memory(work(reference=True, replicas=2, standing=GB), Policy(8192, "host")),
    )
    added = more.gpu - plain.gpu
    assert added == work().weight_bytes + 4 * work().trained + GB
    assert more.above_weights - plain.above_weights == 4 * work().trained


def test_a_plain_call_computes_every_row_of_the_last_layer():
    sizes = [step_memory(work(compact=c, context=65536), Policy(8192, "host")).gpu for c in (True, False)]
    assert sizes[0] < sizes[1]


def test_scoring_takes_less_than_a_step():
    step, scored = step_memory(work(), Policy(8192, "none")), scoring_memory(work(), Policy(8192, "none"))
    assert scored.gpu < step.gpu and "layer inputs" not in scored.parts


# --- sampling


@pytest.mark.parametrize("shape", [QWEN, OSS, KNOWN["gemma-3-12b"]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("rows", "prompts"), [(1, 1), (16, 2), (48, 6)])
def test_the_cache_is_that_of_the_rollout_engine(shape, rows, prompts, on_host):
    step = work(shape, "bf16", context=5000, completion=700)
    layers = [
        LayerCache(shape.kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16, window) for window in shape.windows
    ]
    pool = RolloutLimits(rows=rows, prompt=step.prompt, new=step.completion, prompts=prompts, page=64).pool_bytes(
        layers
    )
    found = sampling_memory(step, Sampling(rows, prompts)).parts["cache of keys and values"]
    assert found == pytest.approx(pool, rel=0.03)  # and a spare page


def test_rows_are_halved_until_they_fit():
    step = work(context=32768, group=8)
    on = Limits(24 * GB, 128 * GB, CARDS["RTX 4090"])
    found = fitting_rows(step, on, 256)
    assert 8 <= found.rows < 256 and found.prompts == -(-found.rows // 8) + 1
    assert fitting_rows(step, dataclasses.replace(on, gpu_bytes=3 * GB), 256) is None
    assert fitting_rows(step, dataclasses.replace(on, gpu_bytes=None), 256).rows == 256


def test_a_rollout_that_does_not_fit_is_refused_with_the_rows_that_would():
    asked = {"context": 32768, "completion": 1024, "group": 8, "gpu_bytes": 16 * GB, "host_bytes": 24 * GB}
    with pytest.raises(PlanError, match=r"sampling 64 completions .* \d+ completions at a time would fit"):
        plan(QWEN, weights="nf4", lora=16, rollout_rows=64, **asked)
    made = plan(QWEN, weights="nf4", lora=16, rollout_rows=8, **asked)
    assert made.sampled.gpu < 16 * GB and "while sampling" in made.describe()
    long = plan(QWEN, weights="nf4", lora=16, rollout_rows=8, **{**asked, "context": 131072, "host_bytes": 128 * GB})
    assert long.sampling.on_host and long.sampled.host > 15 * GB and "on the host while sampling" in long.describe()


def test_a_prompt_per_completion_takes_as_many_times_the_keys():
    step = work(context=8192, group=8)
    shared, apart = (
        sampling_memory(step, Sampling(8, 1, shared)).parts["cache of keys and values"] for shared in (True, False)
    )
    assert apart > 4 * shared


def test_sampling_counts_adapters_copies_and_the_experts_of_a_prefill():
    """gpt-oss's experts in 4 bits are dequantized 512 MiB at a time; the engine copies 16-bit adapters, Transformers doesn't."""
    step = work(OSS, "mxfp4", context=3072)
    ours, theirs = (sampling_memory(step, Sampling(4, 1, shared)).parts for shared in (True, False))
    assert ours["adapters' copies"] == 2 * step.trained > 0 and "adapters' copies" not in theirs
    assert ours["dequantized weights"] == 512 * 2**20
    assert "dequantized weights" not in sampling_memory(work(OSS, "bf16", context=3072), Sampling(4, 1)).parts


# --- limits


def test_a_container_counts_as_the_whole_machine(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("1234567\n")
    (tmp_path / "unlimited").write_text("max\n")
    monkeypatch.setattr(
        limits, "CGROUPS", (str(tmp_path / "unlimited"), str(tmp_path / "max"), str(tmp_path / "missing"))
    )
    host_total.cache_clear()
    try:
        assert host_total() == 1234567
    finally:
        host_total.cache_clear()


def test_processes_share_the_host():
    one, four = limits.this_machine("cpu"), limits.this_machine("cpu", processes=4)
    assert four.host_bytes == one.host_bytes // 4 and not one.offload


def test_the_moments_of_a_step_are_named():
    assert set(memory._moments(work(), Policy(8192, "host"))) == {
        "a layer's forward", "the last layer's forward", "the head", "the final norm's backward", "the last layer's backward",
        "a layer's backward", "the optimizer's step",
    }  # fmt: skip


def test_a_cards_limits_are_asked_for_by_its_number(monkeypatch):
    """torch 2.11 takes no device without one."""
    from types import SimpleNamespace

    import torch

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    facts = SimpleNamespace(total_memory=100, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: asked.append(where) or facts)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda where: asked.append(where) or 0.5, raising=False
    )
    for device in (None, "cuda", "cuda:1"):
        assert limits.this_machine(device).gpu_bytes == 50
    assert asked == [2, 2, 2, 2, 1, 1]
