"""Commands for the operator of this machine: settings, shell completion. They call no server."""
