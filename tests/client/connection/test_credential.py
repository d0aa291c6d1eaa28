"""A key is sent to whom it may be sent to, as it is at that moment, and shown to nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from motet import InvalidArgument
from motet.connection.credential import Credential, is_this_machine

KEY = "motet_k1_secret"
LOCAL, REMOTE = "127.0.0.1:50051", "gpu.example:50051"


def credential(
    api_key: str | Callable[[], str] | None,
    target: str = LOCAL,
    *,
    has_tls: bool = False,
    may_send_plaintext: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Credential:
    return Credential(api_key, target, has_tls=has_tls, may_send_plaintext=may_send_plaintext, environ=environ or {})


def test_a_key_is_sent_as_a_bearer_token() -> None:
    assert credential(f" {KEY}\n").metadata() == (("authorization", f"Bearer {KEY}"),)
    assert credential(None).metadata() == credential("").metadata() == ()


def test_the_environment_gives_a_key_unless_the_user_does() -> None:
    environ = {"MOTET_API_KEY": "of-environment\n"}
    assert credential(None, environ=environ).metadata() == (("authorization", "Bearer of-environment"),)
    assert credential(KEY, environ=environ).metadata() == (("authorization", f"Bearer {KEY}"),)
    assert credential("", environ=environ).metadata() == ()


def test_a_function_is_called_for_every_attempt() -> None:
    keys = iter(["one", "two"])
    changing = credential(lambda: next(keys))
    assert [changing.metadata()[0][1] for _ in range(2)] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("target", [REMOTE, "10.0.0.5:50051", "[2001:db8::1]:50051", "localhost.example:50051"])
def test_a_key_goes_to_another_machine_over_tls_only(target: str) -> None:
    for api_key in (KEY, lambda: KEY):
        with pytest.raises(InvalidArgument, match="another machine; turn TLS on") as caught:
            credential(api_key, target)
        assert KEY not in str(caught.value) and target in str(caught.value)
        assert credential(api_key, target, has_tls=True).metadata()
        assert credential(api_key, target, may_send_plaintext=True).metadata()
    with pytest.raises(InvalidArgument, match=r"\(from MOTET_API_KEY\)"):
        credential(None, target, environ={"MOTET_API_KEY": KEY})
    assert credential("", target).metadata() == ()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("unix:/run/motet", True),
        ("unix-abstract:motet", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("ipv6:[::1]:1", True),
        ("dns:localhost:1", True),
        ("dns:///localhost:1", True),
        ("dns://10.0.0.1/localhost:1", False),
        ("dns:gpu.example:1", False),
        ("0.0.0.0:1", False),
        ("passthrough:///127.0.0.1:1", False),
        ("vsock:2:1", False),
    ],
)
def test_which_addresses_are_of_this_machine(target: str, expected: bool) -> None:
    assert is_this_machine(target) is expected


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "ümlaut", "x" * 4097, "\x00"])
def test_what_is_no_key_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a key or token") as caught:
        credential(key)
    assert key not in str(caught.value)
    with pytest.raises(InvalidArgument, match="is not a key or token"):
        credential(lambda: key).metadata()
    with pytest.raises(InvalidArgument, match="is not a key or token"):
        credential(lambda: "").metadata()


def test_the_key_is_not_shown() -> None:
    assert repr(credential(KEY)) == "Credential(***)" and repr(credential("")) == "Credential()"
