"""Builds parts of the control plane; called by server.py."""
