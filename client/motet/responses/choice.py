"""Which response template the completions of a model are read by."""

from __future__ import annotations

import json

from motet.responses.bundled import BUNDLED, recognise
from motet.responses.templates import ResponseTemplate, TemplateError, load_template


def choose_template(own: str, rendered: str, *, override: str = "") -> ResponseTemplate | None:
    """The operator's, else the checkpoint's own, else the one recognised; None: tool calls stay text.

    `own`: JSON text of the checkpoint's, or empty. `rendered`: its chat template, or a conversation with a tool call
    that it rendered. `override`: the name of a bundled template, or "none". Raises TemplateError.
    """
    if override == "none":
        return None
    if override:
        if override not in BUNDLED:
            raise TemplateError(
                f"there is no response template {override!r}; use one of {', '.join(sorted(BUNDLED))}, none"
            )
        return load_template(dict(BUNDLED[override]))
    if own:
        try:
            spec = json.loads(own)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"response_template is not valid JSON: {str(error)[:200]}") from error
        return load_template(spec)
    name = recognise(rendered)
    return None if name is None else load_template(dict(BUNDLED[name]))
