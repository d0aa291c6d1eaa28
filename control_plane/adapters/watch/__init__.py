"""Changes of adapters as clients watch them."""
