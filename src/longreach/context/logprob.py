"""Log-probs and entropies of a token tree, without ever holding a logits tensor of the whole sequence.

Shape suffixes: R labelled tokens, V vocabulary, C rows of one slice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels import wide_dtype
from ..kernels.logprob import row_logprob, row_logprob_backward
from .auto import explained
from .autograd import ParamGrads
from .install import Engine, enable, engine_of
from .replay import autocast_as, autocast_state, rng_state, set_rng_state
from .reuse import Prefill
from .tree import ROOT, TokenTree

LOGITS_AT_ONCE = (1 << 24, 1 << 26)  # elements of one slice of logits, on a CPU and on a GPU


@dataclass(frozen=True)
class Scores:
    """What `score` returns, one entry per branch of the tree.

    Attributes:
        logprobs: 1-D, fp32 (fp64 for an fp64 model), natural log.
        entropies: of the same shape, nats; None unless asked for.
        router_loss: scalar load-balancing loss over the tree, each token counted once per row that runs through it;
            None unless asked for or if the model has no router.
        reused: prompt tokens whose forward a rollout's prefill had done.
    """

    logprobs: list[Tensor]
    entropies: list[Tensor] | None
    router_loss: Tensor | None
    reused: int = 0


def token_logprobs(
    model: nn.Module, tree: TokenTree, *, temperature: float = 1.0, entropy: bool = False
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Log-probability of each labelled token, one 1-D tensor per branch of the tree; differentiable.

    Under `torch.no_grad()` the same chunked path only scores and keeps nothing.

    Args:
        model: a causal language model; `enable` is called on it first if that has not been done.
        tree: e.g. `TokenTree.from_groups(...)`: one branch per completion.
        temperature: logits are divided by it.
        entropy: also return the entropy of each predicted distribution, in nats.

    Returns:
        List of fp32 tensors (fp64 for an fp64 model), one entry per labelled token and so empty for an empty completion; with
        `entropy=True` a pair of such lists.

    Raises:
        ValueError: a temperature of 0 or less, or a token id that the model's vocabulary does not have.
    """
    scores = score(model, tree, temperature=temperature, entropy=entropy)
    return (scores.logprobs, scores.entropies) if scores.entropies is not None else scores.logprobs


def score(
    model: nn.Module,
    tree: TokenTree,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    router_loss: bool = False,
    prefill: Prefill | None = None,
) -> Scores:
    """Log-probs, and on request entropies and the router loss, of a tree in one pass.

    With gradients, prompts that `prefill` holds are not computed again where that is exact.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not temperature > 0:
        raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be a number greater than 0")
    if not isinstance(tree, TokenTree):
        raise ValueError(f"tree is a {type(tree).__name__}; make one with TokenTree.from_groups or from_sequences")
    engine = engine_of(model)
    if engine is None:
        enable(model)
        engine = engine_of(model)
    assert engine is not None
    layout = tree.layout
    check_vocabulary(tree, engine.config.vocab_size)
    device = engine.causal.get_input_embeddings().weight.device
    run = engine.make_run(layout, compact=True, backward=torch.is_grad_enabled(), router_logits=router_loss)
    if prefill is not None and run.backward:
        prefill.offer(engine, run)
    # The head sees no row here: it runs below, slice by slice. The wrapped model is called, so DDP and PEFT take part.
    kwargs: dict[str, Any] = {"output_router_logits": False} if engine.routers else {}
    planned = functools.partial(engine.settle, layout.tokens, len(layout.read_index))
    with explained(planned), engine.expecting(run):
        model(
            input_ids=layout.input_ids[None].to(device),
            position_ids=layout.positions[None].to(device),
            use_cache=False,
            logits_to_keep=torch.empty(0, dtype=torch.int64, device=device),
            **kwargs,
        )
    # Taken out of the run: the graph holds the run, and the run must not hold the graph.
    hidden, router_logits = run.hidden, run.router_logits
    run.hidden, run.router_logits = None, []
    assert hidden is not None
    labels_R = layout.labels[layout.read_index].to(device)
    with explained(planned):
        logprobs_R, entropies_R = head_logprobs(engine, hidden[0], labels_R, temperature, entropy)
    return Scores(
        _split(tree, logprobs_R),
        _split(tree, entropies_R) if entropies_R is not None else None,
        _router_loss(engine, router_logits, layout.rows.to(device)) if router_loss and engine.routers else None,
        0 if run.reused is None else run.reused.tokens,
    )


def check_vocabulary(tree: TokenTree, size: int) -> None:
    """Raise ValueError for a token that a vocabulary of this size does not have; on a GPU it would end the process."""
    if int(tree.layout.input_ids.max()) < size and int(tree.layout.labels.max()) < size:
        return
    for number, segment in enumerate(tree.segments):
        for name, ids in (("ids", segment.ids), ("labels", segment.labels)):
            wrong = (ids >= size).nonzero().flatten()
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(
                    f"segment {number} of the tree holds token id {int(ids[at])} ({name}[{at}]); the model's vocabulary has "
                    f"{size}, ids 0 to {size - 1}: was another tokenizer used?"
                )


def _split(tree: TokenTree, values_R: Tensor) -> list[Tensor]:
    layout = tree.layout
    out = []
    for branch in tree.branches:
        if branch == ROOT:
            out.append(values_R[:0])
            continue
        start = layout.start[branch]
        first = layout.reads(0, start)
        out.append(values_R[first : first + layout.reads(start, start + layout.length[branch])])
    return out


def head_logprobs(
    engine: Engine, hidden_RH: Tensor, labels_R: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Head and log-softmax over slices of rows; the backward computes each slice's logits again."""
    head = engine.causal.get_output_embeddings()
    params = [p for p in head.parameters() if p.requires_grad]
    rows = max(1, LOGITS_AT_ONCE[hidden_RH.is_cuda] // engine.config.vocab_size)
    job = _Head(head, rows, *final_scale(engine.config, temperature), entropy)
    logprobs_R, entropies_R = _HeadLogprobs.apply(hidden_RH, labels_R, job, *params)
    return logprobs_R, entropies_R if entropy else None


def final_scale(config: Any, temperature: float) -> tuple[float, float | None]:
    """(divisor, softcap) of the logits: the sampling temperature and what a model does to its logits after the head.

    Softcap (Gemma 2), division (Granite), multiplication (Cohere).
    """
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return temperature * divisor / factor, getattr(config, "final_logit_softcapping", None)


@dataclass(frozen=True)
class _Head:
    module: nn.Module
    rows: int
    divisor: float
    softcap: float | None
    entropy: bool


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, labels_R: Tensor, head: _Head, *params: Tensor):
        ctx.autocast = autocast_state(hidden_RH.device)
        parts = []
        ctx.rng = []  # dropout of an adapter on the head is replayed
        for at in range(0, len(hidden_RH), head.rows):
            part = slice(at, at + head.rows)
            ctx.rng.append(rng_state(hidden_RH.device) if head.module.training else None)
            logits_CV = head.module(hidden_RH[part])
            parts.append(row_logprob(logits_CV, labels_R[part], head.divisor, head.softcap, head.entropy))
            del logits_CV
        none = torch.empty(0, dtype=wide_dtype(hidden_RH.dtype), device=hidden_RH.device)
        logprobs_R = torch.cat([p[0] for p in parts]) if parts else none
        lse_R = torch.cat([p[1] for p in parts]) if parts else none
        entropies = [p[2] for p in parts if p[2] is not None]
        entropies_R = torch.cat(entropies) if entropies else none.clone()
        ctx.head, ctx.params = head, params
        ctx.save_for_backward(hidden_RH, labels_R, lse_R, entropies_R)
        return logprobs_R, entropies_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_R: Tensor, dentropies_R: Tensor):
        hidden_RH, labels_R, lse_R, entropies_R = ctx.saved_tensors
        head: _Head = ctx.head
        dhidden_RH = torch.zeros_like(hidden_RH)
        dparams = ParamGrads(ctx.params)
        now = rng_state(hidden_RH.device) if head.module.training else None
        for number, at in enumerate(range(0, len(hidden_RH), head.rows)):
            part = slice(at, at + head.rows)
            set_rng_state(ctx.rng[number])
            h_CH = hidden_RH[part].detach().requires_grad_()
            with torch.enable_grad(), autocast_as(ctx.autocast):
                logits_CV = head.module(h_CH)
            dentropy_C, entropy_C = (dentropies_R[part], entropies_R[part]) if head.entropy else (None, None)
            # Written over the logits, which the head's own backward does not read.
            dlogits_CV = row_logprob_backward(
                logits_CV.detach(),
                labels_R[part],
                lse_R[part],
                dlogprobs_R[part],
                dentropy_C,
                entropy_C,
                head.divisor,
                head.softcap,
            )
            dh_CH, *grads = torch.autograd.grad(logits_CV, [h_CH, *ctx.params], dlogits_CV, allow_unused=True)
            del logits_CV, dlogits_CV
            dhidden_RH[part] = dh_CH
            dparams.add(grads)
        set_rng_state(now)
        return dhidden_RH, None, None, *dparams.done()


def _router_loss(engine: Engine, logits: list[Tensor], rows_T: Tensor) -> Tensor:
    """Load-balancing loss (Switch Transformer, arXiv 2101.03961, equations 4-6) as Transformers computes it on padded rows.

    A token of a shared prompt counts once for every row that it stands for.
    """
    top_k: int = engine.config.num_experts_per_tok
    experts = logits[0].shape[-1]
    weight_T = rows_T.to(wide_dtype(logits[0].dtype))
    chosen_E = weight_T.new_zeros(experts)
    prob_E = weight_T.new_zeros(experts)
    for layer_TE in logits:
        probs_TE = torch.softmax(layer_TE, -1)
        picked = probs_TE.topk(top_k, -1).indices.flatten()
        chosen_E = chosen_E.scatter_add(0, picked, weight_T.repeat_interleave(top_k))
        prob_E = prob_E + (probs_TE.to(weight_T.dtype) * weight_T[:, None]).sum(0)
    total = weight_T.sum() * len(logits)
    return experts * ((chosen_E / total) * (prob_E / total)).sum()
