"""Parts of the control plane that take some building; called by server.py."""
