"""`make demo`: trains a small model with adapters of different voices, then serves them in one batch."""
