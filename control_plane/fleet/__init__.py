"""The workers: sessions, plan streams, placement, and moving requests off a lost worker."""
