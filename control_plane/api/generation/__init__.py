"""GenerationService: checks requests and turns tokens into the messages of a stream."""
