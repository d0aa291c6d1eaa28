"""Generations: what is known of one, and the streams of its chunks."""
