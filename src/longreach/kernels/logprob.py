"""Log-prob and entropy of labels from a slice of logits, read once, and their gradient written over the slice.

Shape suffixes: C rows of a slice, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_rows, check_shape, implementation


def row_logprob(
    logits_CV: Tensor,
    labels_C: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log softmax(z)[label] with z = logits / temperature, or softcap * tanh(logits / softcap) / temperature.

    Reads the logits once, in blocks joined through running maxima (arXiv 1805.02867); fp32 arithmetic (fp64 for fp64).
    Logits that a model further divides or multiplies (Granite, Cohere) need no pass of their own: put that factor into
    `temperature`.

    Args:
        logits_CV: bf16, fp16, fp32 or fp64; any stride along C.
        labels_C: int64 or int32, each in [0, V).
        temperature: greater than 0.
        softcap: final logit softcap (Gemma 2), or None.
        want_entropy: also return -sum p log p.

    Returns:
        logprob [C], lse [C] of z, entropy [C] in nats or None: fp32 (fp64 for fp64).
    """
    _check("row_logprob", logits_CV, labels_C, temperature, softcap)
    return implementation(logits_CV, "logprob").row_logprob(logits_CV, labels_C, temperature, softcap, want_entropy)


def row_logprob_backward(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    dlogprob_C: Tensor,
    dentropy_C: Tensor | None = None,
    entropy_C: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Gradient of `row_logprob` with respect to the logits, written over them.

    With p = exp(z - lse): d logprob / dz = onehot - p, d entropy / dz = -p (log p + entropy).

    Args:
        logits_CV, labels_C, temperature, softcap: as given to the forward.
        lse_C, entropy_C: as the forward returned them; entropy is needed with dentropy only.
        dlogprob_C, dentropy_C: gradients of the two results; dentropy None if the entropy has none.

    Returns:
        logits_CV, now holding the gradient in its dtype.
    """
    op = "row_logprob_backward"
    _check(op, logits_CV, labels_C, temperature, softcap)
    if dentropy_C is not None and entropy_C is None:
        raise ValueError(f"{op}: entropy is None; with dentropy, the entropy that the forward returned is needed")
    for name, x in (("lse", lse_C), ("dlogprob", dlogprob_C), ("dentropy", dentropy_C), ("entropy", entropy_C)):
        if x is not None:
            check_shape(op, name, x, labels_C.shape, "labels")
    check_rows(op, lse=lse_C, dlogprob=dlogprob_C, dentropy=dentropy_C, entropy=entropy_C)
    return implementation(logits_CV, "logprob").row_logprob_backward(
        logits_CV, labels_C, lse_C, dlogprob_C, dentropy_C, entropy_C, temperature, softcap
    )


def _check(op: str, logits_CV: Tensor, labels_C: Tensor, temperature: float, softcap: float | None) -> None:
    if logits_CV.dim() != 2:
        raise ValueError(f"{op}: logits have shape {tuple(logits_CV.shape)}; expected two axes [rows, vocabulary]")
    check_shape(op, "labels", labels_C, logits_CV.shape[:1], "logits")
    check_rows(op, logits=logits_CV, labels=labels_C)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature={temperature!r}: it divides the logits, so it must be greater than 0")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap={softcap!r}: it must be greater than 0, or None for none")
