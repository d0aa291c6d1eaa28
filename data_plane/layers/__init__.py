"""The layers that replace those of transformers: LoRA-aware linears, paged attention, fused forms of common parts."""
