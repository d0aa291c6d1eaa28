"""What a step uses of the adapters: which tokens have which adapter, and what is added to each linear's output."""
