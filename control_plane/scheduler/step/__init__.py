"""What the next step computes, and what the result of a step means."""
