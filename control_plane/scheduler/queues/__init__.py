"""In which order requests are served: which requests wait, and which is next."""
