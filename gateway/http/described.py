"""A route with what it takes and gives. The document of the API is made from these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

JSON = "application/json"
FORM_MEDIA = "multipart/form-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a route takes and gives."""

    summary: str
    body: Any = None  # the type that its body is decoded as; None: it takes none
    form: Mapping[str, Any] = field(default_factory=dict)  # schema of each part, where it may come as a form, too
    response: Any = None  # the type of its JSON; None: any JSON object
    response_media: tuple[str, ...] = (JSON,)
    query: Mapping[str, str] = field(default_factory=dict)  # name to meaning; all may be left out
    is_open: bool = False  # it needs no key


class Described(Route):
    """One method of one path."""

    def __init__(
        self, method: str, path: str, endpoint: Callable[[Request], Awaitable[Any]], description: Description
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.description = description
