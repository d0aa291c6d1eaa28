"""Names of the linears inside a mixture's experts: `...experts.3.gate_proj` is one of expert 3.

transformers keeps the experts of a layer in stacked parameters, so these modules exist by name only. A report names all
experts of a layer at once, with "*" in the place of the expert.
"""

from __future__ import annotations

import re

ANY = "*"
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
PROJECTIONS = (GATE, UP, DOWN)
_EXPERT = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")


def of_expert(name: str, expert: int) -> str:
    """The module of one expert, of a name that stands for all of them."""
    return name.replace(f".{ANY}.", f".{expert}.")


def of_all(name: str) -> str:
    """The name that stands for this module of all experts; the name itself outside of experts."""
    return _EXPERT.sub(ANY, name, count=1)
