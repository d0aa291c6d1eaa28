"""The durable home of adapters: documents and blobs, on a disk or behind a URL."""
