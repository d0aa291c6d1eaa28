"""Times of the kernels alone; `python -m benchmarks.kernels.bench`."""
