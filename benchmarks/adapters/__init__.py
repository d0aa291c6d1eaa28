"""What adapters cost on their way into memory and out of it: `python -m benchmarks.adapters --help`."""
