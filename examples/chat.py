"""A conversation on the terminal: the server renders every turn with the checkpoint's chat template.

The prefix cache keeps the earlier turns: what is cached of them is not computed again.
Run: python examples/chat.py [ADAPTER]        (an empty line or Ctrl-D ends it)
"""

import os
import sys

from motet import ChatMessage, Client

adapter = sys.argv[1] if len(sys.argv) > 1 else ""
conversation: list[ChatMessage] = []
with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    while True:
        print("you: ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            break
        conversation.append(ChatMessage("user", line))
        stream = client.generate(conversation, adapter=adapter, max_tokens=128)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        result = stream.result()
        print(f"\n[{result.started.cached_tokens} of {result.started.prompt_tokens} prompt tokens were cached]")
        conversation.append(ChatMessage("assistant", result.text))
