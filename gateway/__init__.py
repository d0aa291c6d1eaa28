"""The HTTP gateway: a process of its own over Motet's SDK. It knows no tokenizer, no weights and no adapters."""
