"""What people get wrong on the command line: it is said in one line, with what to do."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from motet.cli import exits, server_parts
from motet.cli.main import main

from tests.client.scripted_server import (
    ScriptedServer,
    abort,
    make_adapter,
    playing,
)
from tests.client.test_cli import Capture, motet


@pytest.mark.parametrize("command", [("status",), ("generate", "hi"), ("adapters", "list")])
def test_nobody_listening_is_said_with_what_to_do(capsys: Capture, command: tuple[str, ...]) -> None:
    assert main(["--server", "127.0.0.1:1", *command]) == exits.UNAVAILABLE
    assert capsys.readouterr().err == (
        "motet: no Motet server responds at 127.0.0.1:1: Connection refused; given up after connect_timeout_s=2; "
        "is `motet up` running there? --server HOST:PORT or MOTET_SERVER names another server [SERVER_UNREACHABLE]\n"
    )


def test_name_without_an_address_is_said(capsys: Capture) -> None:
    assert main(["status", "--server", "no-such-host.invalid:50051"]) == 6
    error = capsys.readouterr().err
    assert error.startswith(
        "motet: no Motet server responds at no-such-host.invalid:50051: its host name has no address; check the name; "
    )


def test_what_is_no_token_id_is_named(capsys: Capture) -> None:
    for given in ("a", "-1", "1.5", "٣"):
        assert main(["generate", "--token-ids", f"7 {given}"]) == 3
        assert capsys.readouterr().err.startswith(f"motet: PROMPT: {given!r} is not a token id; with --token-ids give")


def test_port_of_another_service_is_said(capsys: Capture) -> None:
    """As the port for workers takes clients: it knows none of their calls."""
    with futures.ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        try:
            assert main(["--server", f"127.0.0.1:{port}", "status"]) == exits.FAILED
        finally:
            other.stop(0).wait()
    error = capsys.readouterr().err
    assert error.startswith(f"motet: the server at 127.0.0.1:{port} does not know this call: it is another service")
    assert "its port for workers; give the port for clients" in error


@pytest.mark.parametrize(
    ("server_address", "advice"),
    [
        ("127.0.0.1", "'127.0.0.1' has no port; give HOST:PORT, such as 127.0.0.1:50051"),
        ("http://127.0.0.1:50051", "is a URL; give HOST:PORT without http://, such as 127.0.0.1:50051"),
    ],
)
def test_address_that_is_none_is_a_wrong_command_line(capsys: Capture, server_address: str, advice: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--server", server_address, "status"])
    assert caught.value.code == exits.USAGE and advice in capsys.readouterr().err


def test_message_that_says_to_try_again_says_it_once(server: ScriptedServer, capsys: Capture) -> None:
    details = (
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL"),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1)),
    )
    text = "the queue is full; try again in a moment"
    server.unary_error = lambda context: abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text, *details)
    assert motet(server, "status") == exits.EXHAUSTED
    assert capsys.readouterr().err == "motet: the queue is full; try again in a moment [QUEUE_FULL]\n"


def test_words_of_a_prompt_are_joined(server: ScriptedServer) -> None:
    server.scripts.extend([playing([1]), playing([1])])
    assert motet(server, "generate", "hello", "small", "world", "--max-tokens", "1") == 0
    assert motet(server, "generate", "--token-ids", "3", "4", "5") == 0
    assert server.requests[0].text == "hello small world" and list(server.requests[1].token_ids.ids) == [3, 4, 5]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--logprobs", "2"), "--logprobs: is printed as JSON only; add --json"),
        (("--prompt-logprobs", "2"), "--prompt-logprobs: is printed as JSON only; add --json"),
        (("--n", "100"), "--n: 100 completions at temperature 0 are equal; add --temperature"),
        (("--n", "2", "--temperature", "0"), "--n: 2 completions at temperature 0 are equal"),
        (("--best-of", "3"), "--best-of: 3 completions at temperature 0 are equal"),
    ],
)
def test_flags_without_effect_are_refused(
    server: ScriptedServer, capsys: Capture, flags: tuple[str, ...], complaint: str
) -> None:
    assert motet(server, "generate", *flags, "hi") == exits.REFUSED
    assert complaint in capsys.readouterr().err and server.requests == []


def test_digest_may_be_given_by_its_first_digits(server: ScriptedServer, capsys: Capture) -> None:
    one, other, third = "ab12cd34" * 8, "ab12cd35" * 8, "ab12cd34ff" + "0" * 54
    server.version_digests = [one, other, third]
    server.adapters["pirate"] = make_adapter("pirate")
    assert motet(server, "adapters", "activate", "pirate", "ab12cd35") == 0
    assert server.adapters["pirate"].active_version.digest == other
    server.scripts.append(playing([1]))
    assert motet(server, "generate", "--adapter", "pirate", "--adapter-digest", "ab12cd34ff0", "hi") == 0
    assert server.requests[-1].adapter_digest == third
    capsys.readouterr()
    assert motet(server, "adapters", "activate", "pirate", "ab12cd34") == exits.REFUSED
    assert "VERSION: ab12cd34 begins the digests of 2 versions of 'pirate'" in capsys.readouterr().err
    assert motet(server, "adapters", "activate", "pirate", "ffffffff") == exits.NOT_FOUND
    assert "`motet adapters versions pirate` shows them" in capsys.readouterr().err
    for wrong in ("ab12cd3", "AB12CD35", "ab12cd3g"):
        assert motet(server, "generate", "--adapter", "pirate", "--adapter-digest", wrong, "hi") == exits.REFUSED
        assert "give @NUMBER, @LABEL, or 8 to 64 digits of its digest" in capsys.readouterr().err


def test_digest_in_full_is_sent_as_it_is(server: ScriptedServer) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    assert motet(server, "adapters", "activate", "pirate", "ef" * 32) == 0
    assert len(server.requests) == 1


def test_missing_server_part_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(server_parts, "CHECKOUT", tmp_path)
    for command in ("control-plane", "worker", "gateway", "up"):
        assert main([command, "--model", "x"]) == exits.FAILED
        extra = "worker" if command == "worker" else "server"
        assert f"not installed: pip install 'motet[{extra}]'" in capsys.readouterr().err


def test_wrong_command_line_ends_with_usage(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == exits.USAGE
    assert "PROMPT" in capsys.readouterr().err


def test_command_line_without_a_command_says_which_there_are(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == exits.USAGE
    names = (
        "generate, embed, classify, tokenize, detokenize, model, adapters, status, top, workers, audit, keys, convert, "
    )
    names += "config, doctor, store, up, control-plane, worker, gateway"
    assert capsys.readouterr().err == f"motet: no command; give one of {names}; see motet --help\n"


@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "soon"])
@pytest.mark.parametrize("command", [("generate", "hi", "--timeout-s"), ("status", "--watch", "--interval-s")])
def test_time_that_is_none_is_refused(capsys: Capture, command: tuple[str, ...], value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, value])
    assert caught.value.code == exits.USAGE
    expected = f"{command[-1]}: {value}: seconds above 0 and at most 1e+06 are expected"
    assert expected in capsys.readouterr().err


def test_text_that_is_not_utf_8_is_refused(server: ScriptedServer, capsys: Capture) -> None:
    assert motet(server, "generate", "a\udcffb") == exits.REFUSED
    assert "not valid UTF-8" in capsys.readouterr().err and server.requests == []


@pytest.mark.parametrize("flags", [("--adapter", ""), ("--adapter=",), ("--adapter", "a", "--adapter", "")])
@pytest.mark.parametrize("more", [(), ("--lora-task", "7")])
def test_known_bug_the_base_model_responds_instead_of_an_adapter_whose_name_is_empty(
    flags: tuple[str, ...], more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", *flags, *more]) == 3
    assert "--adapter: is empty; give a name, or leave the flag out" in capsys.readouterr().err
