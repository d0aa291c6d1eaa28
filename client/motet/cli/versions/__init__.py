"""Actions of `motet adapters` on the versions of a name."""
