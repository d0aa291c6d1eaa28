"""A fleet on a virtual clock: the production scheduler and placement over simulated workers, deterministic by seed."""
