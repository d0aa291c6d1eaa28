"""Routes that vLLM's HTTP server has beside OpenAI's: tokens and texts, version, health, adapters by name."""
