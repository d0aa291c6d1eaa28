"""The base model as adapters see it: its checkpoint, its modules, and what workers report of them."""
