"""The `motet` command. One file per group of commands; `main.py` joins them."""
