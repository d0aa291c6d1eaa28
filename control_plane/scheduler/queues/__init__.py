"""In which order requests are served: who waits, and whose turn it is."""
