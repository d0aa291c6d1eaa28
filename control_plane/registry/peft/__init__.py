"""Reads the files that PEFT writes, checks them against the base model, and packs them."""
