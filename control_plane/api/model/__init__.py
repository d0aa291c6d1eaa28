"""ModelService: facts of the model, and texts to token ids and back."""
