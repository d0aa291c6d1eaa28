"""What a request is inside the scheduler: its sequences, their states, and beam search."""
