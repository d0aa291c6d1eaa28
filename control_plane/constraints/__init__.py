"""Constraints of completions: checked at admission, sent to workers once per session."""
