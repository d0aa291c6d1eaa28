"""What is hidden of a text, and what stays."""

from __future__ import annotations

import pytest

from contract.redaction import has_password, redacted, redacted_url, split_url, without_password, without_secrets

KEY = "motet_k1_" + "aB3" * 14 + "x"
HUB_TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at redis://me:p%2Fw@host:6379/0 now", "at redis://***@host:6379/0 now"),
        ("at redis://:p/w@w:@host:1", "at redis://***@host:1"),
        ("Redis.from_url('unix://me:pw@/run/s')", "Redis.from_url('unix://***@/run/s')"),
        ("https://token@host/path", "https://***@host/path"),
        (f"key={KEY}", "key=motet_k1_***"),
        ("authorization: Bearer abc.def-_~+/=", "authorization: Bearer ***"),
        ("('authorization', 'bearer abc')", "('authorization', 'bearer ***')"),
        ("token eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln ends", "token *** ends"),
        ("GET https://b/x?X-Amz-Signature=ab&y=2&sig=cd", "GET https://b/x?X-Amz-Signature=***&y=2&sig=***"),
        ("Connection(password='pw', username=me)", "Connection(password='***', username=me)"),
        ('{"client_secret": "pw"}', '{"client_secret": "***"}'),
        (f"GET with {HUB_TOKEN}, 401", "GET with hf_***, 401"),
        (f"HF_TOKEN={HUB_TOKEN[3:]} motet up", "HF_TOKEN=*** motet up"),
        ("Authorization: Basic dXNlcjpwYXNz then", "Authorization: Basic *** then"),
        ("{'Proxy-Authorization': b'basic dXNlcjpwYXNz=='}", "{'Proxy-Authorization': b'basic ***'}"),
        ("('authorization', 'Basic dXNlcjpwYXNz')", "('authorization', 'Basic ***')"),
        (
            "Authorization: AWS4-HMAC-SHA256 Credential=AK/20260101/s3, SignedHeaders=host, Signature=0af1 end",
            "Authorization: AWS4-HMAC-SHA256 *** end",
        ),
        ("authorization=SharedKey account:c2lnbmF0dXJl", "authorization=SharedKey ***"),
        ("aws_secret_access_key=wJalrXUt/K7MDENG", "aws_secret_access_key=***"),
        ('{"SecretAccessKey": "wJalr/K7", "Code": "x"}', '{"SecretAccessKey": "***", "Code": "x"}'),
        ("X-Amz-Security-Token: FwoGZXIv//// and more", "X-Amz-Security-Token: *** and more"),
        ('{"access_token": "opaque", "expires_in": 3599}', '{"access_token": "***", "expires_in": 3599}'),
        ("google says ya29.a0AfH6SMBx-y_z0123456 is old", "google says ya29.*** is old"),
        ("AccountName=a;AccountKey=c2Vj==;EndpointSuffix=x", "AccountName=a;AccountKey=***;EndpointSuffix=x"),
        ("Client(target='h', api_key='opaque')", "Client(target='h', api_key='***')"),
        ("('x-api-key', 'opaque')", "('x-api-key', '***')"),
        ("x-api-key: opaque", "x-api-key: ***"),
        (
            "a\n-----BEGIN EC PRIVATE KEY-----\nMHcC\n-----END EC PRIVATE KEY-----\nb",
            "a\n-----BEGIN EC PRIVATE KEY-----***\nb",
        ),
        ("cut off: -----BEGIN PRIVATE KEY-----\nMHcC", "cut off: -----BEGIN PRIVATE KEY-----***"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "store url=s3://bucket/dir num_adapters=3 num_tokens=12",
        "https://host/a@b and s3://bucket/x@y",
        "--redis-password-file: /run/secrets/pw cannot be read",
        "Redis refuses: it wants a password",
        "motet_k1_short and motet_worker_id",
        "a bearer of news",
        "authorization: off; a basic idea of authorization, basic rights and tokens",
        "written by hf_lora_convert.py; next_page_token=abc num_tokens=12 resume_token=xyz",
        "the api key of x-api-key is an access key: see api_key and session token",
        "",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert redacted(text).replace("bearer ***", "bearer of") == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:pw@host:6379/0?x=y", "redis://***@host:6379/0?***"),
        ("s3://bucket/dir", "s3://bucket/dir"),
        ("/a/dir?x", "/a/dir?x"),
        ("redis://:p/w@host:1", "redis://***"),
        ("redis://:p\u2100w@host", "redis://***"),
    ],
)
def test_a_url_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


@pytest.mark.parametrize(
    "url", ["redis://:se/cret@host:1", "redis://:se#cret@host", "redis://[:secret@h", "x://\u2100"]
)
def test_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    """Python's own errors have the part behind the colon, which is the password, and not a port."""
    with pytest.raises(ValueError, match="cannot be read as SCHEME://") as caught:
        split_url(url)
    assert "cret" not in str(caught.value) and caught.value.__suppress_context__
    assert has_password(url) is ("@" in url)


@pytest.mark.parametrize(
    ("url", "is_there", "rest"),
    [
        ("redis://me:pw@host:6379/0", True, "redis://me@host:6379/0"),
        ("redis://:pw@host", True, "redis://host"),
        ("rediss://me@host?ssl_ca_certs=/ca&password=pw", True, "rediss://me@host?ssl_ca_certs=/ca"),
        ("redis://host?pass%77ord=pw", True, "redis://host"),
        ("unix://me:pw@/run/s?db=1", True, "unix://me@/run/s?db=1"),
        ("unix:///run/s", False, "unix:///run/s"),
        ("redis://me@host", False, "redis://me@host"),
        ("s3://bucket/x", False, "s3://bucket/x"),
    ],
)
def test_the_password_of_a_url_is_found_and_taken_out(url: str, is_there: bool, rest: str) -> None:
    assert has_password(url) is is_there
    assert without_password(url) == rest and not has_password(rest)


def test_an_environment_without_secrets() -> None:
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "HTTPS_PROXY": "http://proxy:3128", "NOTE": "a@b://"}
    secrets = {"HF_TOKEN": "x", "HTTPS_PROXY_2": "http://me:pw@proxy:3128", "CACHE": "redis://h/0?password=pw"}
    assert without_secrets({**kept, **secrets}) == kept
