"""What stands between the matrix products: fused ops, in Triton for CUDA tensors and in plain torch for the rest.

These are functions, not autograd functions: whoever calls them writes the backward out, so that nothing is kept which the
backward doesn't need. Every op computes in fp32 (fp64 for fp64 tensors) and sums in a fixed order: the same call gives the
same bits.
"""

from .experts import Gating, Routing, combine_rows, expert_swiglu, expert_swiglu_backward, gather_rows, route
from .grouped import add_low_rank, grouped_mm, grouped_outer
from .logprob import row_logprob, row_logprob_backward
from .merge import apply_sink, merge_blocks
from .norm import rms_norm, rms_norm_backward
from .reference import wide_dtype
from .rope import qk_norm_rope, qk_norm_rope_backward
from .swiglu import swiglu, swiglu_backward

__all__ = [
    "Gating",
    "Routing",
    "add_low_rank",
    "apply_sink",
    "combine_rows",
    "expert_swiglu",
    "expert_swiglu_backward",
    "gather_rows",
    "grouped_mm",
    "grouped_outer",
    "merge_blocks",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "rms_norm",
    "rms_norm_backward",
    "route",
    "row_logprob",
    "row_logprob_backward",
    "swiglu",
    "swiglu_backward",
    "wide_dtype",
]
