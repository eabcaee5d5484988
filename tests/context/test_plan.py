"""The planner: its formula against the engine's own allocations, the order of policies, what fits, refusals."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from bench.replay import replay
from transformers import AutoModelForCausalLM, Qwen3Config

import longreach
from bench import models
from longreach.context import choice, memory, offload, policy
from longreach.context.limits import CUDA_CONTEXT, Limits
from longreach.context.memory import step_memory
from longreach.context.plan import PlanError, plan
from longreach.context.policy import Policy
from longreach.context.shape import KNOWN, ModelShape
from longreach.context.speed import CARDS, GB, attention_pairs, card_named, step_flop, step_seconds
from longreach.context.tree import IGNORE, TokenTree
from longreach.context.work import Work, weight_bytes

QWEN = KNOWN["qwen3-4b"]
GROUP = {"context": 32768, "completion": 1024, "group": 8, "lora": 32, "host_bytes": 256 * GB}


def work(shape=QWEN, context=32768, completion=1024, group=1, rank=32) -> Work:
    return Work(shape, context, completion, group, "bf16", dict.fromkeys(shape.linears, rank) if rank else {})


# --- the model's dimensions


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B", "Gemma-3-12B"])
def test_weights_are_counted_exactly(name):
    shape = models.shape_of(name, 2, tiny=False)
    model = models.build(shape, 4096, "meta")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert weight_bytes(shape, "bf16") == 2 * shape.parameters
    assert weight_bytes(shape, "fp32") == 4 * shape.parameters


def test_a_shape_is_read_from_config_folder_and_name(tmp_path):
    config = models.config_of(QWEN, QWEN.positions)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for given in (config, str(tmp_path), tmp_path / "config.json"):
        assert dataclasses.replace(ModelShape.of(given), name=QWEN.name) == QWEN
    assert ModelShape.of("Qwen/Qwen3-4B") is QWEN


def test_adapters_are_counted_as_peft_makes_them():
    shape = models.shape_of("Qwen3-0.6B", 2, tiny=False)
    model = models.adapt(models.build(shape, 4096, "meta"))
    assert work(shape).trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- the formula against the engine

POINTS = [
    ("Qwen3-0.6B", 2, 16384, 1024, 1, Policy(8192, "none")),
    ("Qwen3-0.6B", 3, 16384, 1024, 4, Policy(4096, "host")),
    ("Qwen3-0.6B", 3, 16384, 1024, 4, Policy(4096, "none", True)),
    ("Qwen3-1.7B", 3, 32768, 1024, 1, Policy(2048, "host", True)),
    ("Qwen3-4B", 2, 2048, 1024, 8, Policy(8192, "none")),
    ("Llama-3.1-8B", 3, 8192, 512, 1, Policy(2048, "host")),
    ("Gemma-3-12B", 6, 8192, 512, 2, Policy(4096, "none")),
    ("Qwen3-1.7B", 4, 32768, 1024, 1, Policy(4096, "rows", True)),
    ("Qwen3-1.7B", 4, 131072, 1024, 1, Policy(8192, "keys", True)),
    ("Qwen3-4B", 4, 32768, 1024, 1, Policy(8192, "host", False, 2)),
    ("Qwen3-4B", 4, 32768, 1024, 8, Policy(8192, "keys", False, 3)),
]


@pytest.mark.parametrize(("name", "layers", "context", "completion", "group", "policy"), POINTS)
def test_formula_is_within_a_tenth_of_what_the_engine_allocates(name, layers, context, completion, group, policy):
    shape = models.shape_of(name, layers, tiny=False)
    model = models.adapt(models.build(shape, context, "meta"))
    planned = step_memory(work(shape, context, completion, group), policy)
    measured = replay(model, tree(shape, context, completion, group), **dataclasses.asdict(policy)).peak
    assert planned.above_weights - planned.parts["kernel libraries"] == pytest.approx(measured, rel=0.10)


def test_training_all_parameters_takes_no_more_than_planned():
    """Here the gradients of an earlier micro-batch, which the plan counts, are not there."""
    shape = models.shape_of("Qwen3-0.6B", 3, tiny=False)
    planned = step_memory(work(shape, 16384, 1024, 1, rank=0), Policy(4096, "host"))
    measured = replay(models.build(shape, 16384, "meta"), tree(shape, 16384, 1024, 1), chunk=4096, offload="host").peak
    above = planned.above_weights - planned.parts["kernel libraries"]
    assert above - planned.parts["gradients"] == pytest.approx(measured, rel=0.10)
    assert measured <= above


def test_host_memory_is_what_the_pool_takes(monkeypatch):
    shape = models.shape_of("Qwen3-4B", None, tiny=True)
    monkeypatch.setattr(offload, "SLAB_BYTES", 30_000)
    model = models.build(shape, 256, "cpu")
    longreach.enable(model, chunk=32, offload="host", save_attention=True, parity_check=False)
    engine = longreach.context.install.engine_of(model)
    logprobs = longreach.token_logprobs(model, tree(shape, 128, 16, 2))
    del logprobs
    taken = sum(len(slab) for slab in engine.pool.free)
    planned = step_memory(work(shape, 128, 16, 2, rank=0), Policy(32, "host", True))
    assert taken and planned.host == taken


def tree(shape, context, completion, group) -> TokenTree:
    root = models.token_ids(context - completion, shape.vocab)
    return TokenTree.from_groups(
        [(root, [models.token_ids(completion, shape.vocab, seed=i + 1) for i in range(group)])]
    )


def test_tokens_are_those_of_the_tree():
    shape = models.shape_of("Qwen3-4B", None, tiny=True)
    layout = tree(shape, 100, 7, 3).layout
    assert (work(shape, 100, 7, 3).tokens, work(shape, 100, 7, 3).labelled) == (layout.tokens, len(layout.read_index))


# --- how it grows


@pytest.mark.parametrize("policy", [Policy(8192, "none"), Policy(8192, "host"), Policy(2048, "host", True)])
def test_more_work_takes_more(policy):
    def sizes(**changes):
        step = work(**changes)
        found = step_memory(step, policy)
        return found.gpu, found.host, step_seconds(step, policy, CARDS["H200"])

    for name, values in (("context", (4096, 32768, 131072, 1 << 20)), ("group", (1, 2, 8, 32)), ("rank", (8, 32, 128))):
        found = [sizes(**{name: value}) for value in values]
        for smaller, larger in itertools.pairwise(found):
            assert smaller[0] < larger[0] and smaller[1] <= larger[1] and smaller[2] < larger[2], name


@pytest.mark.parametrize("offload", ["host", "rows", "keys"])
def test_smaller_chunks_take_less_of_the_gpu(offload):
    made = plan(QWEN, gpu_bytes=141 * GB, offload=offload, save_attention=False, keep_every=1, **GROUP)
    needed = [choice.gpu_needed for choice in made.choices()]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == len(needed) == 4


def test_each_place_takes_less_of_the_gpu_than_the_one_before_at_long_context():
    long = {**GROUP, "context": 262144, "save_attention": False, "keep_every": 1, "chunk": 8192}
    needed = [plan(QWEN, gpu_bytes=500 * GB, offload=place, **long).gpu for place in offload.POLICIES]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == len(needed) == 4


def test_with_keys_on_the_host_memory_is_flat_in_the_context():
    def needed(context: int) -> int:
        step = {**GROUP, "context": context, "host_bytes": 8000 * GB}
        return plan(QWEN, gpu_bytes=80 * GB, offload="keys", chunk=8192, keep_every=6, **step).gpu

    per_token = (needed(1 << 21) - needed(1 << 20)) / (1 << 20)
    assert per_token < 2 * 2 * QWEN.head_dim + 32  # rotary tables and ids


def test_a_small_host_keeps_every_kth_layer():
    small = {**GROUP, "context": 131072, "host_bytes": 32 * GB}
    made = plan(QWEN, gpu_bytes=24 * GB, **small)
    assert made.policy.keep_every > 1 and made.options["keep_every"] == made.policy.keep_every
    layers = -(-36 // made.policy.keep_every) + made.policy.keep_every - 1
    layers -= made.policy.offload != "host"
    assert made.choice.memory.host_parts["layer inputs"] == layers * made.work.tokens * QWEN.hidden * 2
    whole = plan(QWEN, gpu_bytes=24 * GB, **{**small, "host_bytes": 256 * GB})
    assert whole.policy.keep_every == 1 and whole.seconds < made.seconds


# --- what is picked


def test_policies_are_picked_in_order():
    first = [c.policy for c in plan(QWEN, gpu_bytes=10_000 * GB, save_attention=False, **GROUP).choices()]
    assert [str(policy) for policy in first[:11]] == [
        "kept on GPU, chunk 8192",
        "inputs on host, chunk 8192",
        "inputs on host, chunk 4096",
        "inputs on host, chunk 2048",
        "inputs and rows on host, chunk 8192",
        "inputs and rows on host, chunk 4096",
        "inputs and rows on host, chunk 2048",
        "inputs, rows and keys on host, chunk 8192",
        "inputs, rows and keys on host, chunk 4096",
        "inputs, rows and keys on host, chunk 2048",
        "inputs on host, chunk 1024",
    ]
    assert str(first[13]) == "inputs on host, chunk 8192, every 2nd layer's"
    assert {policy.offload for policy in first} == set(offload.POLICIES)


def test_the_first_tier_that_fits_is_taken_and_in_it_the_fastest():
    tiers = list(choice.choices(work(group=8), Limits(80 * GB, 256 * GB, CARDS["H100"]), {}))
    for i, tier in enumerate(tiers):
        limits = Limits(max(c.gpu_needed for c in tier), 256 * GB, CARDS["H100"])
        picked = choice.choose(work(group=8), limits, {})
        earlier = [c for t in tiers[:i] for c in t if c.fits(limits)]
        if earlier:
            assert picked.policy in [c.policy for c in earlier]
        else:
            assert picked.policy == min(tier, key=lambda c: c.seconds).policy


def test_a_family_whose_embedding_is_not_plain_keeps_one_row_on_the_device():
    def needed(kind):
        return plan(dataclasses.replace(QWEN, kind=kind), gpu_bytes=80 * GB, offload="rows", chunk=8192, **GROUP).choice

    plain, other = needed("llama"), needed("gemma")
    assert other.memory.parts["hidden and gradient rows"] and "hidden and gradient rows" not in plain.memory.parts


def test_on_a_cpu_nothing_is_offloaded_from_the_host_to_the_host():
    limits = Limits(16 * GB, 20 * GB, CARDS["CPU"], offload=False)
    found = [c.policy for tier in choice.choices(work(context=4096), limits, {}) for c in tier]
    assert {(p.offload, p.keep_every) for p in found} == {("none", 1)}
    assert {p.chunk for p in found} == {2048, 1024}


def test_saved_attention_stays_away_where_the_host_is_small():
    small = {**GROUP, "host_bytes": 48 * GB, "context": 131072}
    made = plan(QWEN, gpu_bytes=24 * GB, **small)
    assert made.policy == Policy(8192, "host", False)
    assert made.options == {"chunk": 8192, "offload": "host", "save_attention": False}


def test_what_the_caller_lays_down_is_kept():
    made = plan(QWEN, gpu_bytes=80 * GB, chunk=3000, offload="host", save_attention=False, keep_every=1, **GROUP)
    assert made.policy == Policy(3000, "host", False)
    assert [choice.policy for choice in made.choices()] == [made.policy]


def test_longest_context_fits_and_one_more_token_does_not():
    made = plan(QWEN, gpu_bytes=24 * GB, **GROUP)
    longest = made.longest()
    assert made.at(longest) is not None and made.at(longest + 1) is None
    assert made.longest(gpu_bytes=11 * GB) < longest <= made.longest(gpu_bytes=80 * GB)
    assert made.longest(host_bytes=32 * GB) < longest
    assert made.longest(gpu_bytes=8 * GB) == 0


def test_refusal_says_what_would_fit():
    with pytest.raises(PlanError) as caught:
        plan(QWEN, gpu_bytes=11 * GB, **{**GROUP, "context": 1 << 20})
    text = str(caught.value)
    assert (
        "context of 1048576 (completion 1024, group 8) does not fit 11.0 GB of GPU and 256.0 GB of host memory" in text
    )
    needed = float(text.split("needs a GPU of ")[1].split(" GB")[0])
    host = float(text.split("a host of ")[1].split(" GB")[0])
    with_it = {**GROUP, "context": 1 << 20, "host_bytes": int(host * GB)}
    assert plan(QWEN, gpu_bytes=int(needed * GB), **with_it).policy.offload == "keys"
    with pytest.raises(PlanError):
        plan(QWEN, gpu_bytes=int((needed - 0.2) * GB), **with_it)
    longest = int(text.split("fits here is ")[1].split(" ")[0])
    assert plan(QWEN, gpu_bytes=11 * GB, **{**GROUP, "context": longest}).work.context == longest


def test_refusal_of_a_model_that_never_fits():
    with pytest.raises(
        PlanError,
        match=r"No context fits here: the weights alone take 16\.4 GB\. Choose a smaller model, or 4-bit weights",
    ):
        plan("Qwen3-8B", gpu_bytes=12 * GB, **GROUP)
    with pytest.raises(PlanError, match=r"train an adapter \(lora=16\)"):
        plan(QWEN, gpu_bytes=24 * GB, **{**GROUP, "lora": None})


def test_the_formula_knows_every_offload_policy_of_the_engine():
    assert tuple(policy.PLACES) == offload.POLICIES


def test_running_out_all_the_same_says_plan_fact_and_what_fits():
    made = plan(QWEN, gpu_bytes=60 * GB, **GROUP)
    assert made.policy == Policy(8192, "none", True)
    text = made.out_of_memory(59 * GB)
    assert f"out of GPU memory with 59.0 GB allocated; planned were {made.gpu / GB:.1f} GB" in text
    assert "on a GPU of 60.0 GB" in text
    assert "This would fit: chunk=8192, offload='none', save_attention=False." in text
    last = plan(QWEN, gpu_bytes=12 * GB, chunk=1024, offload="keys", save_attention=False, keep_every=12, **GROUP)
    assert "A context of " in last.out_of_memory(int(1.1 * last.gpu))
    assert "No context fits" in last.out_of_memory(last.gpu + 6 * GB)


def test_free_memory_is_never_asked(monkeypatch):
    def forbidden(*_):
        raise AssertionError("the plan depends on what is free")

    monkeypatch.setattr(torch.cuda, "mem_get_info", forbidden)
    first = plan(QWEN, gpu_bytes=24 * GB, **GROUP)
    ballast = torch.zeros(1 << 20)
    assert plan(QWEN, gpu_bytes=24 * GB, **GROUP) == first and len(ballast)


def test_tables_hold_the_choice_and_every_card_in_80_columns():
    from rich.console import Console

    made = plan(
        QWEN, gpu_bytes=80 * GB, **{**GROUP, "context": 1 << 20, "host_bytes": 4000 * GB, "lora": 8, "chunk": 512}
    )
    with open(os.devnull, "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(made.table())
        console.print(made.longest_table())
    lines = console.export_text().splitlines()
    assert not [line for line in lines if "…" in line]
    chosen = next(line.split() for line in lines if line.split()[:4] == ["1,048,576", "host", "512", "saved"])
    assert chosen[4:6] == f"{made.gpu / GB:.1f} GB".split()
    assert all(
        any(line.strip().startswith(card) for line in lines)
        for card in ("T4", "RTX 4090", "A100", "L40S", "H100", "H200")
    )


# --- exact small cases


def test_a_small_case_by_hand():
    shape = ModelShape("small", "llama", 100, 8, 1, 2, 1, 4, 16, (None,))
    step = Work(shape, 12, 4, 2, "bf16", {"q_proj": 2})
    # prompt 8: root of 7, two leaves of 5; q_proj is 8 -> 8, so its adapter has 2 * (8 + 8) weights in fp32
    assert (step.tokens, step.labelled, step.trained) == (17, 8, 32)
    found = step_memory(step, Policy(8192, "none"))
    assert found.parts["weights"] == 2 * (2 * 800 + (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 16 + 8)
    assert (found.parts["adapters"], found.parts["gradients"], found.parts["optimizer states"]) == (128, 128, 256)
    assert found.parts["keys and values"] == 2 * 17 * 4 * 2
    assert found.host == 0
    bytes_of_inputs = 17 * 8 * 2
    assert step_memory(step, Policy(8192, "host")).host_parts["layer inputs"] == bytes_of_inputs


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_pairs_are_counted_exactly(window):
    shape = dataclasses.replace(QWEN, layers=2, windows=(window, None))
    step = work(shape, context=20, completion=6, group=3)
    layout = tree(dataclasses.replace(shape, vocab=50), 20, 6, 3).layout
    expected = 0
    for layer, reach in enumerate(shape.windows):
        for segment, length in enumerate(layout.length):
            labels = layout.labels[layout.start[segment] : layout.start[segment] + length]
            for i, label in enumerate(labels.tolist()):
                at = layout.first_position[segment] + i
                if layer == 0 or label != IGNORE:
                    expected += at + 1 if reach is None else min(at + 1, reach)
    assert attention_pairs(step) == expected


def test_flop_of_a_long_step_are_those_of_attention():
    flop = step_flop(work(context=131072), Policy(8192, "host"))
    assert flop.attention / 2 == pytest.approx(5.1e15 * 35 / 36, rel=0.02)  # 4 * 36 layers * 4096 wide * 131072^2 / 2
    assert step_flop(work(context=131072), Policy(8192, "host", True)).attention == flop.attention / 2
    assert 30 < step_seconds(work(context=131072), Policy(8192, "host"), CARDS["H200"]) < 60


# --- wrong input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context=0: give a whole number from 1 up"),
        ({"completion": 40000}, "completion=40000 with context=32768"),
        ({"group": True}, "group=True"),
        ({"weights": "int3"}, "weights='int3': choose one of 'bf16', 'fp16', 'fp32'"),
        ({"prompts": 0}, "prompts=0: give a whole number from 1 up"),
        ({"keep_every": 0}, "keep_every=0: give the layers per kept input"),
        ({"optimizer": "adamx"}, "optimizer='adamx': choose one of 'adamw'"),
        ({"lora": "big"}, "lora='big': give a peft.LoraConfig, a rank from 1 up, or None"),
        ({"offload": "disk"}, "offload='disk': choose one of 'none', 'host'"),
        ({"chunk": -1}, "chunk=-1"),
        ({"model_or_config": 7}, "model_or_config is a int"),
        ({"model_or_config": {"model_type": "vit"}}, "lacks vocab_size"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"model_or_config": QWEN, "gpu_bytes": 80 * GB, **GROUP, **change}
    with pytest.raises(ValueError) as caught:
        plan(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["method: grpo", "[1]", "\0"])
def test_a_file_that_is_no_config_is_named(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(content)
    for given in (str(file), str(tmp_path)):
        with pytest.raises(ValueError, match=r"config.json' is no config.json of a model: it holds no JSON object"):
            plan(given, **GROUP)


def test_latent_and_linear_attention_have_no_formula():
    config = models.config_of(QWEN, 64).to_dict() | {"kv_lora_rank": 512}
    with pytest.raises(ValueError, match="latent or linear attention"):
        plan(config, gpu_bytes=80 * GB, **GROUP)


def test_a_lora_config_counts_the_modules_it_names():
    from peft import LoraConfig

    made = plan(QWEN, gpu_bytes=80 * GB, **{**GROUP, "lora": LoraConfig(r=8, target_modules=["q_proj", "v_proj"])})
    assert made.work.ranks == {"q_proj": 8, "v_proj": 8}
    with pytest.raises(ValueError, match="target_modules"):
        plan(QWEN, gpu_bytes=80 * GB, **{**GROUP, "lora": LoraConfig(r=8, target_modules=["wqkv"])})


def test_cards_are_found_by_the_drivers_names():
    assert card_named("NVIDIA H200").name == "H200"
    assert card_named("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert card_named("NVIDIA A100-SXM4-80GB").name == "A100"
    assert card_named("Some Other Card") is None
    assert CUDA_CONTEXT < GB


def test_a_model_is_taken_as_it_is():
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=16)
    )  # fmt: skip
    made = plan(model, context=256, completion=16, weights="fp32", gpu_bytes=16 * GB, host_bytes=16 * GB)
    assert made.work.shape.parameters == sum(p.numel() for p in model.parameters())


def test_formula_agrees_with_the_steps_measured_on_a_card():
    """Every published step: the peak within a tenth, at full depth what it takes over the loaded model too, and its time."""
    path = Path(memory.__file__).parents[3] / "bench" / "results" / "train_step.json"
    compared = 0
    for record in json.loads(path.read_text(encoding="utf-8")):
        if record["engine"] != "longreach" or record["case"] == "group rows" or not record.get("peak_bytes"):
            continue
        shape = models.shape_of(record["model"], record["layers"], tiny=False)
        step = work(shape, record["context"], record["completion"], record["group"])
        step = dataclasses.replace(step, prompts=record["prompts"], weights=record.get("weights", "bf16"))
        policy = Policy(record["chunk"], record["offload"], record["save_attention"], record.get("keep_every", 1))
        planned = step_memory(step, policy)
        # The benchmark has no optimizer.
        assert planned.gpu - planned.parts["optimizer states"] == pytest.approx(record["peak_bytes"], rel=0.10), record
        if record["case"] != "memory":  # of few layers and short contexts, whose step is small beside the model
            assert planned.above_weights == pytest.approx(record["above_weights_bytes"], rel=0.10), record
        if record.get("repeats"):  # a first step alone pins its host memory within the time
            assert step_seconds(step, policy, CARDS["H200"]) == pytest.approx(record["step_s"], rel=0.25), record
        compared += 1
    assert compared >= 5
