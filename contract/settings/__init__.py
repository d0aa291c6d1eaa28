"""How a part of Motet reads its settings: flags, the environment and one file."""
