"""Experts and routers in adapters: their names in every version, and their tensors in one form."""
