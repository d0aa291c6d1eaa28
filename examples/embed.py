"""Finds the text that is nearest to a question, by embeddings of an adapter.

Run: python examples/embed.py legal "Who pays?" "The buyer pays." "The seller delivers."     (MOTET_SERVER: the server)
"""

import os
import sys

from motet import Client

adapter, question, *texts = sys.argv[1:]
with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    first, *others = client.embed([question, *texts], adapter=adapter).embeddings
# Embeddings have length 1, so their product is the cosine of the angle between them.
scores = [sum(a * b for a, b in zip(first.values, other.values, strict=True)) for other in others]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
    print(f"{score:.3f}  {text}")
