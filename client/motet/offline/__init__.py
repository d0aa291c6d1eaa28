"""`LLM`: Motet as a library. It starts a server of its own, runs lists of prompts through it, and stops it.

`llm.py` is what users call, over `inputs.py` (prompts as requests), `results.py` (what comes of them), `batch.py` (many
requests at once) and `private_server.py`, whose process is `watched_up.py`.
"""
