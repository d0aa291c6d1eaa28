"""Whether a worker may attach: its Hello, its quarantine, its epoch."""
