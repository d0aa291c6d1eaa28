"""Ways to prove who one is: API keys, tokens and client certificates, and the files that say what each allows."""
