"""The control plane's half of the plan stream: one session per worker, from its Hello to its end."""
