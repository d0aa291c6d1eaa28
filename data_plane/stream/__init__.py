"""The worker's end of the plan stream: attaches an engine to a control plane, one session after the other."""
