"""The adapter registry over HTTP: what the SDK's `client.adapters` does, as JSON."""
