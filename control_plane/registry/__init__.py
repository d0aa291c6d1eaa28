"""Names, versions and durable storage of adapters; the only reader of what users upload."""
