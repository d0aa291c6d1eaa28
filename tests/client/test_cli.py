"""The command line against a scripted server: what it prints and how it ends."""

from __future__ import annotations

import argparse
import io
import json
import re
import signal
import subprocess
import sys

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from motet.cli import exits, server_parts
from motet.cli.main import main
from motet.cli.status import run_status
from motet.errors import ERROR_BY_CODE
from motet.v1 import types_pb2

from tests.client.scripted_server import (
    DIGEST,
    ScriptedServer,
    abort,
    delta,
    finished,
    playing,
    started,
)

Capture = pytest.CaptureFixture[str]


def motet(server: ScriptedServer, *argv: str) -> int:
    return main(["--server", server.target, *argv])


def test_generate_streams_text(server: ScriptedServer, capsys: Capture) -> None:
    server.scripts.append(playing([1, 2, 3], per_delta=2))
    assert motet(server, "generate", "--adapter", "pirate", "--max-tokens", "3", "--seed", "4", "hi") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("<1><2><3>\n", "")
    request = server.requests[0]
    assert (request.text, request.adapter, request.stopping.max_tokens, request.sampling.seed) == ("hi", "pirate", 3, 4)
    assert not request.sampling.HasField("temperature") and not request.stopping.HasField("ignore_eos")


def test_generate_says_so_when_a_completion_has_no_text(server: ScriptedServer, capsys: Capture) -> None:
    """As of a server without a tokenizer."""

    server.scripts.append(lambda request, context: iter([started(), delta(0, [5, 6], ""), finished(2)]))
    assert motet(server, "generate", "--token-ids", "7") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        "motet: the completion has 2 tokens and no text; --json prints their ids\n",
    )


def test_generate_json_prints_one_line_per_event(server: ScriptedServer, capsys: Capture) -> None:
    server.scripts.append(playing([1, 2, 3], per_delta=2))
    assert motet(server, "generate", "--json", "hi") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["started", "delta", "delta", "finished"]
    assert events[0]["adapter_digest"] == DIGEST
    assert [event["token_ids"] for event in events[1:3]] == [[1, 2], [3]]
    assert events[3]["finish_reason"] == "length" and events[3]["usage"]["completion_tokens"] == 3


def test_generate_prints_several_completions_as_they_end(server: ScriptedServer, capsys: Capture) -> None:
    completions = (
        started(n=2, best_of=1),
        delta(0, [5], "one", index=1),
        finished(1, index=1, score=-0.5),
        delta(0, [6, 7], "two"),
        finished(2, score=-0.25),
    )
    server.scripts.extend([lambda *_: iter(completions), lambda *_: iter(completions)])
    flags = ["--beams", "3", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "--tenant", "team"]
    assert motet(server, "generate", *flags, "--stats", "hi") == 0
    captured = capsys.readouterr()
    assert captured.out == "[1] one  (score -0.5000)\n[0] two  (score -0.2500)\n"
    assert "3 generated, ended by length" in captured.err
    beams = server.requests[0].decoding.beam_search
    assert (beams.width, beams.length_penalty, beams.early_stopping, server.tenants) == (3, 0.5, True, ["team"])
    assert motet(server, "generate", "--json", *flags, "hi") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["event"], event.get("index")) for event in events[1:]] == [
        ("delta", 1),
        ("finished", 1),
        ("delta", 0),
        ("finished", 0),
    ]


def test_generate_takes_every_sampling_flag(server: ScriptedServer, capsys: Capture) -> None:
    logprob = types_pb2.TokenLogprobs(token_id=5, logprob=-0.5, rank=1)
    server.scripts.append(lambda *_: iter((started(), delta(0, [5], "a", logprobs=[logprob]), finished(1))))
    flags = (
        *("--min-p", "0.5", "--repetition-penalty", "1.5", "--presence-penalty", "-1", "--frequency-penalty", "1"),
        *("--logit-bias", "7=-2.5", "--logit-bias", "9=1", "--logprobs", "2", "--prompt-logprobs", "0"),
        *("--min-tokens", "3", "--best-of", "4", "--temperature", "0.5", "--priority", "-5"),
    )
    assert motet(server, "generate", "--json", *flags, "hi") == 0
    request = server.requests[0]
    assert request.sampling == types_pb2.SamplingParams(
        temperature=0.5,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={7: -2.5, 9: 1.0},
        logprobs=2,
        prompt_logprobs=0,
    )
    assert (request.stopping.min_tokens, request.decoding.best_of, request.priority) == (3, 4, -5)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[1]["logprobs"] == [{"token_id": 5, "logprob": -0.5, "rank": 1, "top": [], "token": ""}]
    assert motet(server, "generate", "--length-penalty", "2", "hi") == exits.REFUSED
    assert "--beams" in capsys.readouterr().err


def test_generate_reads_the_prompt_from_standard_input(
    server: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.scripts.append(playing([1]))
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert motet(server, "generate", "--stats", "-") == 0
    assert server.requests[0].text == "from a pipe"
    assert "4 prompt tokens (2 cached), 1 generated, ended by length, seed 11" in capsys.readouterr().err


def test_generate_takes_chat_and_token_ids(server: ScriptedServer) -> None:
    server.scripts.extend([playing([1]), playing([1])])
    assert motet(server, "generate", "--system", "be brief", "hi") == 0
    assert motet(server, "generate", "--token-ids", "3, 4 5") == 0
    chat, tokens = server.requests
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert list(tokens.token_ids.ids) == [3, 4, 5]


def test_server_may_be_named_behind_the_command_or_by_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["adapters", "list", "--server", server.target]) == 0
    monkeypatch.setenv("MOTET_SERVER", server.target)
    assert main(["adapters", "list"]) == 0
    assert len(server.requests) == 2


def test_error_is_one_line_with_fields_and_its_exit_code(server: ScriptedServer, capsys: Capture) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="page_size", description="is 5000; at most 1000")
    details = (
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.ErrorInfo(reason="FIELD_INVALID"),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=3)),
    )
    server.unary_error = lambda context: abort(context, grpc.StatusCode.INVALID_ARGUMENT, "bad\nrequest", *details)
    assert motet(server, "status") == exits.REFUSED
    assert capsys.readouterr().err == (
        "motet: bad request; page_size: is 5000; at most 1000; try again in 3 s [FIELD_INVALID]\n"
    )


@pytest.mark.parametrize("code", [code for code in ERROR_BY_CODE if code is not grpc.StatusCode.UNAVAILABLE])
def test_every_error_has_an_exit_code_that_help_documents(
    server: ScriptedServer, capsys: Capture, code: grpc.StatusCode
) -> None:
    server.unary_error = lambda context: abort(context, code, "no", error_details_pb2.ErrorInfo(reason="A_REASON"))
    exit_code = motet(server, "status")
    captured = capsys.readouterr()
    assert captured.err == "motet: no [A_REASON]\n" and captured.out == ""
    assert exit_code != 0 and f"\n  {exit_code} " in exits.HELP


def fill_status(server: ScriptedServer) -> None:
    status = server.status
    status.server_version = "0.1.0"
    status.model.name = "tiny"
    status.model.max_model_len = 512
    status.queues.num_waiting = 3
    status.adapters.num_registered = 5
    status.adapters.num_host_cached = 4
    status.adapters.host_cache_available = True
    status.workers.add(
        worker_id="w0",
        device="cpu",
        num_blocks=64,
        max_model_len=256,
        num_blocks_held=8,
        num_blocks_cached=4,
        prefix_query_tokens=200,
        prefix_hit_tokens=50,
        num_adapters_loaded=2,
        arena_used_bytes=3 << 20,
        arena_bytes=8 << 20,
    )


def test_status_shows_workers_queues_blocks_and_tiers(server: ScriptedServer, capsys: Capture) -> None:
    fill_status(server)
    assert motet(server, "status") == 0
    text = capsys.readouterr().out
    assert "model tiny" in text and "context 512 tokens" in text
    worker = next(line for line in text.splitlines() if line.startswith("w0"))
    assert worker.split()[6] == "25%"
    assert worker.split()[:6] == ["w0", "cpu", "0", "0", "256", "8+4/64"]
    arena = next(line for line in text.splitlines() if line.startswith("arena of w0"))
    assert arena.split()[3:] == ["2", "3.0", "MiB", "8.0", "MiB"]
    assert "adapters (5 registered)" in text


def test_status_without_a_worker_yet_says_that_the_context_is_not_known(
    server: ScriptedServer, capsys: Capture
) -> None:
    assert motet(server, "status") == 0
    assert "context not known before a worker attaches" in capsys.readouterr().out


def test_status_shows_tenants(server: ScriptedServer, capsys: Capture) -> None:
    server.status.tenants.add(
        tenant="a",
        weight=2.5,
        num_requests=3,
        max_running_requests=4,
        num_queued_tokens=17,
        num_tokens_left=50,
        tokens_per_minute=600,
        num_requests_left=2,
        requests_per_minute=30,
        num_rejected=7,
    )
    server.status.tenants.add(tenant="b", weight=1)
    server.status.num_other_tenants = 12
    assert motet(server, "status") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out[out.index("tenants") :].splitlines()[2:4]]
    assert lines == [
        ["a", "2.5", "3/4", "17", "50/600", "2/30", "0", "7", "0", "0"],
        ["b", "1", "0", "0", "0", "0", "0", "0"],
    ]
    assert "and 12 less busy ones" in out


def test_status_of_a_tenant_shows_its_use_and_no_empty_tables(server: ScriptedServer, capsys: Capture) -> None:
    server.status.own_tenant_only = True
    server.status.tenants.add(tenant="acme", num_requests=3, max_running_requests=4)
    server.status.adapters.num_registered = 2
    assert motet(server, "status") == 0
    out = capsys.readouterr().out
    assert "acme" in out and "3/4" in out and "2 that you may read" in out
    assert not any(part in out for part in ("WORKER", "workers", "WAITING", "TIER", "host cache"))


def test_status_shows_where_each_worker_s_memory_went(server: ScriptedServer, capsys: Capture) -> None:
    server.status.workers.add(worker_id="old")
    assert motet(server, "status") == 0
    assert "LARGEST STEP" not in capsys.readouterr().out
    gib = 1 << 30
    parts = {"memory_bytes": 80 * gib, "weights_bytes": 16 * gib, "arena_bytes": 2 * gib, "kv_bytes": 50 * gib}
    server.status.workers.add(
        worker_id="w0", **parts, step_memory_bytes=3 * gib, headroom_bytes=gib, pinned_bytes=4 * gib
    )
    server.status.workers.add(worker_id="w1", **parts)
    assert motet(server, "status") == 0
    out = capsys.readouterr().out
    lines = out[out.index("memory\n") :].splitlines()[1:4]
    assert [name in lines[0] for name in ("DEVICE", "WEIGHTS", "LARGEST STEP", "PINNED", "GRAPHS")] == [True] * 5
    assert re.split(r"  +", lines[1]) == [
        *("w0", "80.0 GiB", "16.0 GiB", "2.0 GiB", "3.0 GiB", "50.0 GiB", "0 B", "4.0 GiB", "0 B", "1.0 GiB"),
    ]
    assert "not measured" in lines[2] and lines[2].startswith("w1")


def test_status_without_workers_says_so(server: ScriptedServer, capsys: Capture) -> None:
    assert motet(server, "status") == 0
    text = capsys.readouterr().out
    assert "none attached" in text and "host cache (not responding)" in text
    server.status.adapters.host_cache_error = "Redis refuses: no"
    assert motet(server, "status") == 0
    assert "host cache (not responding: Redis refuses: no)" in capsys.readouterr().out


def test_status_json_and_watch(server: ScriptedServer, capsys: Capture) -> None:
    fill_status(server)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    left_out = dict.fromkeys(["tls_ca", "tls_cert", "tls_key", "api_key_file", "insecure"])
    arguments = argparse.Namespace(server=server.target, **left_out, json=True, watch=True, interval_s=1.5)
    with pytest.raises(KeyboardInterrupt):
        run_status(arguments, sleep=sleep)
    lines = capsys.readouterr().out.splitlines()
    assert naps == [1.5] * 3
    assert [json.loads(line)["workers"][0]["num_blocks"] for line in lines] == [64] * 3


def subprocess_motet(server: ScriptedServer, *argv: str) -> subprocess.Popen[str]:
    environment = server_parts.child_environment() | {"MOTET_SERVER": server.target}
    # Tests that a shell started in its background ignore Ctrl-C, and their children would too.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "motet", *argv],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, former)


def test_ctrl_c_cancels_the_request_and_ends_with_130(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "first\n")))
    with subprocess_motet(server, "generate", "hi") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == exits.INTERRUPTED
        assert process.stderr.read() == "motet: cancelled\n"
    assert server.cancelled.wait(10)


def test_reader_that_leaves_is_no_traceback(server: ScriptedServer) -> None:
    server.scripts.append(playing(list(range(4000)), per_delta=4))
    with subprocess_motet(server, "generate", "hi") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == exits.BROKEN_PIPE
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            ("generate",),
            "--max-tokens --temperature --top-k --top-p --seed --stop --stop-token-id --cache-salt --request-id "
            "--timeout-s --adapter --adapter-digest",
        ),
        (("adapters", "add"), "--display-name"),
        (("status",), "--interval-s"),
        (("control-plane",), "--adapter-root --no-reflection"),
    ],
)
def test_help_says_defaults(capsys: Capture, command: tuple[str, ...], flags: str) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    entries = [" ".join(entry.split()) for entry in capsys.readouterr().out.split("\n  -")]
    for flag in flags.split():
        (entry,) = [entry for entry in entries if entry.split()[0] == flag.removeprefix("-")]
        assert "default" in entry, entry


def test_empty_completion_still_ends_its_line(server: ScriptedServer, capsys: Capture) -> None:
    server.scripts.append(lambda request, context: iter([started(), finished(0)]))
    assert motet(server, "generate", "hi") == 0
    assert capsys.readouterr().out == "\n"
