"""What every RPC goes through: ports, limits, errors. Nothing here knows what a method does."""
