"""The targets for one GPU that `benchmarks.engine.step_times` does not measure."""
