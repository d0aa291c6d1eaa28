"""What an adapter brings beside its weights: a chat template, additions to the tokenizer, defaults of generation."""
