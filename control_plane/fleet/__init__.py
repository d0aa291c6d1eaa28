"""The attached workers and the unfinished requests of one control plane.

In this folder is what the outside calls (fleet.py, service.py), and a request's way in and out: intake.py, attach.py,
delivery.py, slow_readers.py. assembly.py builds and joins the parts.

- placement/: which worker runs which request, and moves between workers
- adapters/: filling the host cache, and unloading adapters everywhere
- requests/: the record and stream of each request, quotas, how a request ends
- gate/: whether a worker may attach
- workers/: one session per worker: its scheduler, its half of the plan stream
"""
