"""Several completions of one prompt: samples, the best of several samples, and beam search.

The server computes the prompt once for all completions of a request.
Run: python examples/completions_and_beams.py "Once upon a time"
"""

import os
import sys

from motet import BeamSearch, Client

prompt = sys.argv[1]
with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    print("three samples, each streamed as it is generated; chunk.index names the sample")
    samples = client.generate(prompt, n=3, temperature=0.8, seed=1, max_tokens=16)
    for chunk in samples:
        if chunk.finish_reason is not None:
            print(f"  sample {chunk.index} ended: {chunk.finish_reason}")

    print("the two most likely of six samples")
    for completion in (
        client.generate(prompt, n=2, best_of=6, temperature=0.8, seed=1, max_tokens=16).result().completions
    ):
        print(f"  {completion.text!r}")

    print("the two best of four beams")
    for completion in client.generate(prompt, n=2, beam_search=BeamSearch(width=4), max_tokens=16).result().completions:
        print(f"  {completion.finished.score:.3f} {completion.text!r}")

    print("log-probabilities of four tokens, with the two most likely candidates of each")
    for token in client.generate(prompt, logprobs=2, max_tokens=4).result().completions[0].logprobs:
        candidates = ", ".join(f"{candidate.token_id}: {candidate.logprob:.2f}" for candidate in token.top)
        print(f"  token {token.token_id}: {token.logprob:.2f} (rank {token.rank}; {candidates})")
