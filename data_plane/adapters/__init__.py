"""Adapters on a worker: `format` reads packed ones, `arena` keeps them on the device, `step` applies them in a step."""
