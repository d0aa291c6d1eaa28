"""Adapters on a worker: `kinds` says what sorts there are, `format` reads packed adapters, `arena` keeps
them on the device, `step` applies them."""
