"""How the rows of a step get their tokens: settings, draws, log-probabilities, and the copies of results."""
