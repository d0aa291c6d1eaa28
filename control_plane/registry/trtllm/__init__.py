"""Reads adapters in TensorRT-LLM's format, `lora_weights` and `lora_config`. The result is that of PEFT's files."""
