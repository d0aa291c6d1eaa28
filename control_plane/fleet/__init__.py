"""The attached workers and the unfinished requests: taking requests on, placing them, and delivering their tokens."""
