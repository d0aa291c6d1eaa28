"""TensorRT-LLM's format of LoRA adapters: two arrays, one row for each module of a layer."""
