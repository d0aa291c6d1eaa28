"""Readers of single fields of adapter_config.json, each with what it means for the base model."""
