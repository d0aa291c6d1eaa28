"""Text to tokens and back: tokenizer, incremental detokeniser, stop strings, chat template. No gRPC, no protobuf."""
