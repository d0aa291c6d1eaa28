"""How much memory the device has and a step takes, and how many KV blocks that leaves."""
