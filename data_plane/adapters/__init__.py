"""Adapter weights on the device: arena, slots, loading."""
