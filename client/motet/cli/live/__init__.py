"""`motet top`: what the system does at the moment."""
