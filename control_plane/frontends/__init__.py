"""Processes that hold the clients' connections, where --frontends says so.

port.py takes the place of the clients' gRPC server in the control plane; process.py is what runs in a front end.
"""
