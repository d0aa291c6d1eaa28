"""What is kept of requests that ended: numbers, a line of the log, spans of a trace. Nothing looks at single tokens."""
