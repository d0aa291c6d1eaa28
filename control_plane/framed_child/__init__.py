"""A child process that gets requests over a socket, one after the other, and returns a text for each.

`frames.py` is the child's end and the form of a message, `child.py` the server's end.
"""
