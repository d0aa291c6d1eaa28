"""The gRPC services that clients call: parsing, validation, text, and nothing that decides."""
