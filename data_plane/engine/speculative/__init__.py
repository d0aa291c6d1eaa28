"""Speculative decoding: drafts of later tokens, the passes that verify them, and whether they pay."""
