"""Where adapters lie on the device: pages, slots, the slot table that kernels read, and the loads that fill them."""
