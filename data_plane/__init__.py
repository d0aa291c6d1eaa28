"""The data plane: a worker process that executes step plans on one model. Decides nothing a plan can decide."""
