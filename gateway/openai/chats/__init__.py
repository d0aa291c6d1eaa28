"""What a chat calls: which tools it has to, and what of a completion is a call."""
