"""What callers give, checked as far as the wire needs it, as messages of the protocol."""
