"""Keeps secrets out of texts: URLs without their passwords, and the last check of every line that is logged.

Standard library only. Code hides a secret where it knows that it has one. `redacted` is for what nobody thought of:
errors of other packages that repeat a URL, a header or a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "***"
# Names of options whose value is a secret, as in ?password=... and X-Amz-Signature=...
_SECRET_NAME = (
    r"[\w.-]*(?:password|passwd|secret|token(?![a-z])|signature|credential|api[_-]?key|access[_-]?key)[\w.-]*|sig"
)
_IS_SECRET_NAME = re.compile(_SECRET_NAME, re.IGNORECASE)
# What may begin a secret: the texts without any of these need no search.
_MARKS = (
    *("://", "earer", "EARER", "motet_", "eyJ", "?", "assw", "ecret", "PRIVATE KEY", "hf_", "ya29.", "ccountKey"),
    *("uthorization", "UTHORIZATION", "SECRET", "ASSW", "pi-key", "Api-Key", "pi_key", "API_KEY", "CCESS_KEY"),
    *("ccess_token", "ccessToken", "CCESS_TOKEN", "ession_token", "essionToken", "SESSION_TOKEN", "efresh_token"),
    *("HF_TOKEN", "hf_token", "ecurity-", "ccess_key"),
)
# Texts of these alone have none of the forms below: each form has a colon, an equals sign, a comma, a dot, an
# underscore, a quote or white space. Most digests, ids and names of adapters are such texts. One look finds them.
_is_plain = re.compile(r"[0-9A-Za-z/-]*").fullmatch
# The header `authorization` in each form in which packages log it: `name: value`, and pairs of quoted texts. The value
# begins with a scheme; parameters with commas between them may follow. Bearer has a pattern of its own.
_SCHEMES = "basic|digest|negotiate|ntlm|token|apikey|sharedkey(?:lite)?|aws4-[a-z0-9-]+|goog4-[a-z0-9-]+"
_PARAMETERS = r"[^\s'\",;]+(?:,\s?[\w-]+=[^\s'\",;]+)*"
# Names whose value is hidden in NAME=VALUE, and in "NAME": "VALUE" of JSON and of reprs.
_NAMED = (
    "password|passwd|secret|secret_?access_?key|account_?key|api[_-]key|hf_token|"
    "x-amz-security-token|(?:access|session|refresh)_?token"
)
_PATTERNS = (
    # User and password of a URL; the password may hold anything that is not white space or a quote.
    (re.compile(r"(://)(?:[^\s/@:'\"]*:[^\s'\"]*|[^\s/@'\"]+)@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(bearer\s+)[^\s'\",;]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # An API key keeps its id, which is not a secret and says which key to revoke.
    (re.compile(r"\b(motet_[0-9A-Za-z-]{1,64}_)[0-9A-Za-z]{43}(?![0-9A-Za-z])"), rf"\1{HIDDEN}"),
    # Tokens of the Hub and of Google Cloud, by their first letters.
    (re.compile(r"\b(?:(hf_)[0-9A-Za-z]{16,}|(ya29\.)[\w.-]{16,})"), rf"\1\2{HIDDEN}"),
    (
        re.compile(rf"(authorization(?:['\"]\s?[:,]|\s?[:=])\s?b?['\"]?(?:{_SCHEMES})\s+){_PARAMETERS}", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    # A JSON web token: three parts in base64url, of which the first is a JSON object.
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), HIDDEN),
    (re.compile(rf"([?&](?:{_SECRET_NAME})=)[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(rf"((?:{_NAMED})(?:['\"]?\s?=|['\"]\s?[:,])\s?b?['\"]?)[^\s'\",;&}}]+", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(x-(?:goog-)?api-key:\s?|x-amz-security-token:\s?)[^\s'\",;]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        rf"\1{HIDDEN}",
    ),
)


def redacted(text: str) -> str:
    """`text` without what has the form of a secret: passwords in URLs, bearer tokens, API keys, private keys."""
    if _is_plain(text) or not any(mark in text for mark in _MARKS):
        return text
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def redacted_url(url: str) -> str:
    """The URL with user, password and query hidden. A path stays as it is."""
    if "://" not in url:
        return url
    try:
        parts = split_url(url)
    except ValueError:
        return f"{url.partition('://')[0]}://{HIDDEN}"
    host = parts.netloc.rpartition("@")[2]
    user = f"{HIDDEN}@" if "@" in parts.netloc else ""
    return redacted(f"{parts.scheme}://{user}{host}{parts.path}{f'?{HIDDEN}' if parts.query else ''}")


def is_secret_name(name: str) -> bool:
    """Whether an option or a variable of the environment is, by its name, a secret."""
    return _IS_SECRET_NAME.fullmatch(name) is not None


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are not a secret by their name, and no URL with a password."""
    return {name: value for name, value in environ.items() if not (is_secret_name(name) or has_password(value))}


def split_url(url: str) -> SplitResult:
    """The parts of a URL, its host and port among them. Raises ValueError, whose text repeats nothing of the URL."""
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port
    except ValueError:
        # The original text may hold a part of the password, which is not a port.
        raise ValueError(
            "cannot be read as SCHEME://USER:PASSWORD@HOST:PORT/PATH; write special characters of the password as "
            "%XX, such as %2F for a slash"
        ) from None
    return parts


def has_password(url: str) -> bool:
    """Whether the URL has a password, or an option that is one."""
    if "://" not in url:
        return False
    try:
        parts = split_url(url)
    except ValueError:
        return "@" in url
    if parts.netloc.rpartition("@")[0].partition(":")[2]:
        return True
    return any(is_secret_name(name) for name, _ in parse_qsl(parts.query))


def without_password(url: str) -> str:
    """The URL with its user name and without its password, and without options that are secrets."""
    parts = split_url(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    user = userinfo.partition(":")[0]
    netloc = f"{user}{at}{host}" if user else host
    options = [item for item in parts.query.split("&") if not is_secret_name(_name_of(item))]
    # Not by urlunsplit, which leaves the slashes of unix:///path out.
    query = f"?{'&'.join(options)}" if options and parts.query else ""
    return f"{parts.scheme}://{netloc}{parts.path}{query}"


def _name_of(option: str) -> str:
    return unquote(option.partition("=")[0].replace("+", " "))
