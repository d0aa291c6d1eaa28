"""What the fleet knows of each request: its record and stream, its quota, its worker's deaths, and how it ends."""
