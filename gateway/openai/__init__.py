"""The part of OpenAI's HTTP API that Motet serves: completions, chat completions and models."""
