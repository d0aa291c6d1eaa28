"""Random cases of attention, small enough for Triton's interpreter."""

from __future__ import annotations

from hypothesis import strategies as st

from kernels.paged_attention import BlockSparsity
from kernels.paged_attention.cases import Case

_SPARSITY = st.builds(
    BlockSparsity,
    block_size=st.integers(1, 9),
    local_blocks=st.integers(1, 3),
    vertical_stride=st.integers(1, 4),
    head_sliding_step=st.integers(-2, 3),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mixture of sequences and options that the public calls let pass."""
    is_causal = draw(st.booleans())
    sequences = []
    for _ in range(draw(st.integers(0, 3))):
        num_keys = draw(st.integers(1, 50))
        most_queries = num_keys if is_causal else 20
        sequences.append((draw(st.sampled_from((0, 1, 1, min(7, most_queries), most_queries))), num_keys))
    num_kv_heads = draw(st.integers(1, 2))
    mask = draw(st.sampled_from(("all", "window", "sparse"))) if is_causal else "all"
    return Case(
        "random",
        tuple(sequences),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.sampled_from((1, 5, 16, 24))),
        value_dim=draw(st.sampled_from((1, 5, 16, 24))),
        block_size=draw(st.sampled_from((1, 3, 16, 32))),
        sliding_window=draw(st.integers(1, 60)) if mask == "window" else None,
        softcap=draw(st.sampled_from((None, 0.5, 30.0))),
        has_sinks=is_causal and draw(st.booleans()),
        has_slopes=is_causal and draw(st.booleans()),
        is_causal=is_causal,
        sparsity=draw(_SPARSITY) if mask == "sparse" else None,
        cache=draw(st.sampled_from(("as query", "fp8", "fp8_per_token_head"))),
    )
