"""What a start keeps for the next one, so that it need not read every document again."""
