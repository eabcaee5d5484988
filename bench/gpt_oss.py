"""A training step of gpt-oss-20b's shape with LoRA on attention and experts: seconds, peak memory; stock Transformers beside it.

    python -m bench.gpt_oss --lengths 1024,8192,32768,62464 --stock-lengths 4096,8192
    python -m bench.gpt_oss --weights mxfp4 --rank 8 --lengths 82944 --offload host
    python -m bench.gpt_oss --weights mxfp4 --layers 2 --lengths 524288 --offload host --save-attention
    python -m bench.gpt_oss --device cpu --tiny          # tests the script

Weights are random and made on the device. A step is the forward and backward of one sequence; the loss is the mean negative
log-prob of the last 1,024 tokens (of a shorter row, its half). Stock is the same model in the same process: its grouped
products, PEFT's own path for expert adapters, gradient checkpointing, the head on the tokens with a loss alone. With --layers,
only so many of the 24 layers: memory and time of the whole model follow by counting layers. Peaks are with gradients and
without optimizer states, unless --optimizer asks for them; then the peak is that of a whole step, states included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import torch
from bench.peers.transformers_step import loss as stock_loss

import longreach
from bench import measure, models
from longreach.context.install import engine_of
from longreach.quant import MXFP4
from longreach.quant.embedding import store_in_8_bits
from longreach.quant.experts import FourBitExperts, is_experts

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SCALE = 120  # e8m0: 2 ** -7, so that weights are about as large as a trained model's


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(model="gpt-oss-20b", layers=24, out=measure.RESULTS / "gpt_oss.json", repeats=3)
    parser.add_argument("--weights", default="bf16", choices=("bf16", "mxfp4"))
    parser.add_argument("--rank", type=int, default=models.RANK, help="of all adapters (default: 32)")
    parser.add_argument(
        "--lora-dtype", default="fp32", choices=("fp32", "bf16"), help="of adapters and their gradients"
    )
    parser.add_argument("--embedding", default=None, choices=("int8",), help="embedding and head in 8 bits")
    parser.add_argument("--optimizer", default=None, choices=models.OPTIMIZERS, help="make its step too (not timed)")
    parser.add_argument("--release", action="store_true", help="with an optimizer: gradients of one layer at a time")
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--save-attention", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--stock-lengths", type=measure.numbers, default=[], help="contexts for stock Transformers")
    parser.add_argument("--stock-attention", default="flash_attention_4,flex_attention,eager", help="first that runs")
    options = measure.parse(parser, argv)
    if options.tiny:
        options.layers = 2
        options.stock_lengths = [n // 64 for n in options.stock_lengths]
    model = build(options, max([*options.lengths, *options.stock_lengths, 1024]))
    if options.embedding:
        store_in_8_bits(model)
    model = adapt(model, options.rank, options.lora_dtype == "fp32")
    bench = Bench(options, model)
    for length in options.lengths:
        bench.ours(length)
    bench.stock()


def config_of(options: Any, positions: int) -> Any:
    """gpt-oss-20b's configuration with some of its layers."""
    from transformers import GptOssConfig

    sizes = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
             "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
             "sliding_window": 128}  # fmt: skip
    if options.tiny:
        sizes |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6, "sliding_window": 8}  # fmt: skip
    return GptOssConfig(
        num_hidden_layers=options.layers, max_position_embeddings=max(positions, 131072), pad_token_id=None,
        bos_token_id=None, eos_token_id=None, **sizes,
    )  # fmt: skip


def build(options: Any, positions: int) -> Any:
    """The model, every parameter made on the device; experts in 4 bits are never anything else."""
    from transformers import AutoModelForCausalLM

    config = config_of(options, positions)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if options.weights == "mxfp4":
        for name, module in list(model.named_modules()):
            if is_experts(module):
                model.set_submodule(name, FourBitExperts.empty(module, MXFP4(), stored=True))
    generator = torch.Generator(options.device).manual_seed(0)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_meta or name not in module._parameters:
                continue
            made = torch.empty(p.shape, dtype=p.dtype, device=options.device)
            if p.dtype == torch.uint8:
                made.fill_(SCALE) if name.endswith("scales") else made.random_(0, 256, generator=generator)
            elif "norm" in type(module).__name__.lower():
                made.fill_(1)
            else:
                made.normal_(0, 0.02, generator=generator)
            module._parameters[name] = torch.nn.Parameter(made, requires_grad=p.requires_grad)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(options.device)
    return model.train()


def adapt(model: Any, rank: int, wide: bool = True) -> Any:
    """LoRA on every linear layer of attention and of the experts; both matrices random, so that every gradient is alive;
    in fp32 if `wide`, else in the model's bf16."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, target_parameters=EXPERTS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config, autocast_adapter_dtype=wide)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.002)
    return model


class Bench:
    def __init__(self, options: Any, model: Any) -> None:
        self.options, self.model = options, model
        self.loaded = measure.loaded_bytes(options.device)
        longreach.enable(
            model, chunk=options.chunk or "auto", offload=options.offload,
            save_attention="auto" if options.save_attention is None else options.save_attention, parity_check=False,
        )  # fmt: skip
        self.optimizer: torch.optim.Optimizer | None = None
        if options.optimizer:
            trained = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = models.optimizer(options.optimizer, trained)
            if options.release:
                self.optimizer = longreach.release_gradients(model, self.optimizer)

    def ours(self, length: int) -> None:
        completion = self.completion(length)
        ids = models.token_ids(length, self.model.config.vocab_size)
        tree = longreach.TokenTree.from_groups([(ids[:-completion], [ids[-completion:]])])
        found = self.measured(lambda: -torch.cat(longreach.token_logprobs(self.model, tree)).mean())
        plan = engine_of(self.model).settle(tree.layout.tokens, completion, True)
        policy = plan.policy
        self.note(
            "longreach", length, found, chunk=policy.chunk, offload=policy.offload, save_attention=policy.save_attention,
            planned_bytes=plan.gpu,
        )  # fmt: skip

    def stock(self) -> None:
        if not self.options.stock_lengths:
            return
        engine, causal = engine_of(self.model), self.model.get_base_model()
        causal.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        with engine.stock():
            attention = self.choose_attention(causal)
            for length in self.options.stock_lengths:
                ids = models.token_ids(length, self.model.config.vocab_size)[None].to(self.options.device)
                found = self.measured(lambda ids=ids: stock_loss(self.model, ids, self.completion(len(ids[0]))))
                self.note("transformers", length, found, attention=attention)

    def choose_attention(self, causal: Any) -> str:
        """The first implementation that runs here; why others don't is printed."""
        ids = models.token_ids(64, self.model.config.vocab_size)[None].to(self.options.device)
        for name in self.options.stock_attention.split(","):
            try:
                causal.set_attn_implementation(name)
                stock_loss(self.model, ids, 16).backward()
            except Exception as error:  # whatever a missing package or an unfit kernel raises
                print(f"stock with {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            return name
        raise SystemExit(f"--stock-attention {self.options.stock_attention}: none of them runs here")

    def completion(self, length: int) -> int:
        """Tokens with a loss: at most half of a short row."""
        return min(self.options.completion, length // 2)

    def measured(self, loss_of: Any) -> dict[str, Any]:
        """The first step alone, then the median of --repeats. The allocator's cache stays warm between steps, as in training."""
        device, trained = self.options.device, [p for p in self.model.parameters() if p.requires_grad]
        steps, peak = [], 0
        try:
            for _ in range(1 + self.options.repeats):
                for p in trained:
                    p.grad = None
                gc.collect()
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                steps.append(measure.timed_step(loss_of, device))
                if self.optimizer is not None:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                peak = max(peak, torch.cuda.max_memory_allocated() if device == "cuda" else 0)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return {"step_s": None, "error": str(error).split(". ")[0]}
        timed = steps[1:] or steps  # --repeats 0: a first step alone, for its memory
        forward, backward = (statistics.median(step[i] for step in timed) for i in (0, 1))
        return {
            "first_step_s": sum(steps[0]), "forward_s": forward, "backward_s": backward,
            "step_s": statistics.median(sum(step) for step in timed), "repeats": self.options.repeats,
            "loaded_bytes": self.loaded, "peak_bytes": peak or None,
            "above_weights_bytes": peak - self.loaded if peak and self.loaded else None,
        }  # fmt: skip

    def note(self, engine: str, context: int, found: dict[str, Any], **more: Any) -> None:
        options = self.options
        case = f"{options.weights} r={options.rank}"
        case += " bf16 adapters" * (options.lora_dtype == "bf16") + " int8 embedding" * bool(options.embedding)
        case += f" {options.optimizer}" * bool(options.optimizer) + " released" * options.release
        entry = {
            "engine": engine, "case": case, "model": "gpt-oss-20b",
            "layers": options.layers, "dtype": "bf16", "context": context, "completion": self.completion(context), "group": 1,
            "prompts": 1, "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            **more, **found,
        }  # fmt: skip
        if found.get("peak_bytes"):
            print(f"peak {found['peak_bytes'] / 2**30:.2f} GiB, {found['peak_bytes'] / 1e9:.2f} GB", flush=True)
        measure.record(options.out, entry, options.commit)


if __name__ == "__main__":
    main()
