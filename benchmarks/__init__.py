"""Programs that show and measure the running system."""
