"""The life cycle of adapters over every tier. Entrances (gRPC, or an admin job) call it; it knows none of them."""
