"""Workers: the calls as data, and the commands."""
