"""The model and its tokenizer: the calls as data, and the commands."""
