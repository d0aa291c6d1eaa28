"""Rows of the embedding and the head that an adapter replaces or adds: found in PEFT's files, compared, packed."""
