"""What is read: packed adapters (docs/protocol.md), where they come from, and the checks of their bytes."""
