"""The layers that replace those of transformers: LoRA-aware linears and paged attention."""
