"""What a step costs the host, measured without a GPU."""
