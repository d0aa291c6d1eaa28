"""Several processes of the gateway on one port, and the process that keeps them."""
