"""The table of the kernels' times: every op has rows, peers are tried, another project's kernels are let in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import bench, works_attention, works_layer, works_lora
from benchmarks.kernels.peer_module import PeerRefused, load_peer
from benchmarks.kernels.work import LLAMA_8B, SMALL, Made, Model, Work
from benchmarks.kernels.works import works

CPU = torch.device("cpu")
OPS = {
    "store_kv",
    "rope_and_store_kv",
    "rms_norm",
    "gated_activation",
    "fp8_linear",
    "fp8_rows",
    "row_linear",
    "rows_linear",
    "copy_blocks",
    "swap_blocks",
    "paged_attention",
    "cross_attention",
    "encoder_attention",
    "add_lora",
    "add_lora_embedding",
    "add_lora_group",
    "lora_shrink",
    "lora_expand",
    "expand_and_gate",
    "sample",
    "token_logprobs",
}


def write_peer(directory: Path, source: str) -> Path:
    (directory / "motet_peer.py").write_text(source)
    return directory


def rms_norm_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark consist of one small row."""

    def only(*_: Any, **__: Any) -> Any:
        yield works_layer.norm_work(SMALL, 4, CPU, torch.float32)

    monkeypatch.setattr(bench, "works", only)


@pytest.fixture(autouse=True)
def any_device_has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's rows are listed here without one."""
    for part in (works_attention, works_layer):
        monkeypatch.setattr(part, "fp8_refusal", lambda _: None)


def test_every_op_has_a_row_on_a_cpu_and_on_a_gpu() -> None:
    """Rows are made without their inputs."""
    rows = [(work.op, work.name) for work in works(CPU, torch.float32, is_short=False)]
    assert {op for op, _ in rows} == OPS
    assert max(Counter(rows).values()) == 1, "two rows have one name"
    short = [(work.op, work.name) for work in works(CPU, torch.float32, is_short=True)]
    assert set(short) < set(rows)
    assert all(work.num_bytes > 0 for work in works(CPU, torch.float32, is_short=False))
    on_gpu = {work.op for work in works(torch.device("cuda"), torch.bfloat16, is_short=True)}
    assert on_gpu == OPS


def test_rows_with_a_target_come_before_those_that_a_limit_may_cut() -> None:
    ops = [work.op for work in works(torch.device("cuda"), torch.bfloat16, is_short=True)]
    assert max(ops.index(op) for op in ("lora_shrink", "add_lora_group", "paged_attention", "sample")) < ops.index(
        "store_kv"
    )


def test_rows_that_only_a_gpu_gets_run_on_tiny_sizes_too() -> None:
    """Their inputs fit their ops."""
    tiny = Model(256, 64, 4, 2, 64, 32)
    to_cpu = (CPU, torch.float32)
    rows = [
        works_layer.store_fp8_work(tiny, 16, *to_cpu, per_token_head=True),
        works_attention.decode_fp8_work(tiny, 2, 40, *to_cpu, per_token_head=True),
        works_attention.decode_sparse_work(tiny, 1, 2048, *to_cpu),
    ]
    with torch.inference_mode():
        for work in rows:
            made = work.make()
            returned = made.ours()
            assert returned is None or bool(torch.isfinite(returned).all())  # type: ignore[arg-type]


def test_the_bytes_of_a_decode_are_its_keys_and_values_once() -> None:
    rows = {work.name: work for work in works(torch.device("cuda"), torch.bfloat16, is_short=True)}
    decode, fp8 = rows["decode 64 x 1024"], rows["decode 64 x 1024, FP8"]
    keys_and_values = 2 * 64 * 1024 * LLAMA_8B.num_kv_heads * LLAMA_8B.dim
    queries_and_results = 2 * 64 * LLAMA_8B.num_heads * LLAMA_8B.dim * 2
    assert decode.num_bytes == 2 * keys_and_values + queries_and_results
    assert fp8.num_bytes == keys_and_values + queries_and_results
    # Of 128 blocks of 64 keys at the end of 8192, each head sees the 16 last and one in 8 of the others.
    assert rows["sparse decode 16 x 8192"].flops == 4 * 16 * 32 * 128 * (16 + 14) * 64


def test_a_peer_that_raises_or_returns_other_values_is_left_out_and_listed() -> None:
    ours = torch.arange(4.0)

    def fails() -> None:
        raise NotImplementedError("no such kernel on this device\nlong trace")

    class Foreign:
        name = "foreign"

        def call(self, op: str, arguments: dict[str, Any]) -> Any:
            return {"right": lambda: ours + 0.01, "wrong": lambda: ours + 1, "short": lambda: ours[1:]}.get(op)

    for op, reason in (("right", None), ("wrong", "returns other values: 1 away"), ("short", "returns (3,), we (4,)")):
        peers = {"torch": lambda: ours + 5, "lacking": fails}
        work = Work(op, "row", 1 << 30, 0, lambda peers=peers: Made(lambda: ours, {}, dict(peers)))  # type: ignore[misc]
        calls = work.prepare(CPU, Foreign())
        assert work.refused["lacking"] == "NotImplementedError: no such kernel on this device"
        assert calls.keys() == {"ours", "torch"} | ({"foreign"} if reason is None else set())
        assert work.refused.get("foreign", "").startswith(reason or "")


PADDED_LORA = """
import torch
NAME = "theirs"
def call(op, arguments):
    y, slots, scaling = arguments.get("y"), arguments["token_slots"], arguments.get("scaling")
    a, b = arguments.get("a"), arguments.get("b")
    def add(y, h, b):
        y += torch.bmm(h[:, None], b[slots])[:, 0] * scaling[slots, None]
    def shrink(x, a):
        return torch.bmm(a[slots], x[:, :, None])[:, :, 0]
    def group():
        column = 0
        for one, other in zip(a, b):
            add(y[:, column : column + other.shape[2]], shrink(arguments["x"], one), other)
            column += other.shape[2]
    return {
        "add_lora": lambda: add(y, shrink(arguments["x"], a), b),
        "add_lora_group": group,
        "lora_shrink": lambda: shrink(arguments["x"], a),
        "lora_expand": lambda: add(y, arguments["h"], b),
        "add_lora_embedding": lambda: add(y, a[slots, :, arguments["token_ids"]], b),
    }[op]
"""


@torch.inference_mode()
def test_every_lora_row_can_be_given_to_another_project_and_is_compared(tmp_path: Path) -> None:
    """One peer written to the text serves all of them; one that does nothing serves none."""
    tiny, to_cpu = Model(256, 64, 4, 2, 64, 32), (CPU, torch.float32)
    padded = load_peer(write_peer(tmp_path, PADDED_LORA))

    class Idle:
        name = "idle"

        def call(self, op: str, arguments: dict[str, Any]) -> Any:
            return lambda: None

    def rows() -> list[Work]:
        return [
            works_lora.module_work(256, 2, 8, 4, *to_cpu),
            works_lora.mixed_work(256, (8, 8, 16), *to_cpu),
            works_lora.half_work(256, 2, 8, 4, *to_cpu, is_expand=False),
            works_lora.half_work(256, 2, 8, 4, *to_cpu, is_expand=True),
            works_lora.group_work(tiny, 2, 8, 4, *to_cpu),
            works_lora.embedding_work(tiny, 2, 8, 4, *to_cpu),
        ]

    for work in rows():
        work.num_bytes = 1 << 30  # one copy of the inputs
        assert "theirs" in work.prepare(CPU, padded), work.refused
    for work in rows():
        work.num_bytes = 1 << 30
        assert "idle" not in work.prepare(CPU, Idle())
        assert "returns" in work.refused["idle"]


def test_a_peer_that_cannot_make_its_call_is_left_out_and_named() -> None:
    class Broken:
        name = "broken"

        def call(self, op: str, arguments: dict[str, Any]) -> Any:
            return arguments["a"]

    work = Work("add_lora", "row", 1, 0, lambda: Made(lambda: None, {}))
    assert work.prepare(CPU, Broken()).keys() == {"ours"}
    assert work.refused == {"broken": "KeyError: 'a'"}


def test_outputs_have_their_values_back_after_peers_were_tried() -> None:
    y = torch.zeros(3)
    made = Made(lambda: y.add_(1), {}, {"torch": lambda: y.add_(5)}, (y,))
    Work("op", "row", 1 << 30, 0, lambda: made).prepare(CPU, None)
    assert not y.any()


def test_another_projects_kernels_are_timed_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rms_norm_row(monkeypatch)
    (tmp_path / "their_kernels.py").write_text("from torch.nn.functional import rms_norm\n")
    source = """
from their_kernels import rms_norm
NAME = "theirs"
def call(op, arguments):
    if op != "rms_norm":
        return None
    x, weight, residual = arguments["x"], arguments["weight"], arguments["residual"]
    return lambda: rms_norm(residual.add_(x), weight.shape, weight, arguments["eps"])
"""
    report = tmp_path / "report.json"
    where = ["--peer", str(write_peer(tmp_path, source)), "--json", str(report)]
    assert bench.main(["--device", "cpu", "--dtype", "float32", "--repeats", "2", *where]) == 0
    written = json.loads(report.read_text())
    assert written["rows"][0]["peers"].keys() == {"add, rms_norm", "theirs"}
    assert written["peers_refused"] == []
    assert "theirs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "holds no motet_peer.py"),
        ("NAME = 'x'", "must define NAME"),
        ("def call(op, arguments): ...", "must define NAME"),
        ("import nothing_of_this_name", "failed to load: ModuleNotFoundError"),
    ],
)
def test_a_directory_without_a_usable_peer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str | None, says: str
) -> None:
    if source is not None:
        write_peer(tmp_path, source)
    assert bench.main(["--device", "cpu", "--peer", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_a_peer_that_returns_no_call_is_named(tmp_path: Path) -> None:
    peer = load_peer(write_peer(tmp_path, "NAME = 'x'\ndef call(op, arguments): return 3"))
    with pytest.raises(PeerRefused, match=r"peer x: call\('sample', ...\) returned a int"):
        peer.call("sample", {})


def test_rows_past_the_limit_are_left_out_and_reported_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rms_norm_row(monkeypatch)
    assert bench.main(["--device", "cpu", "--dtype", "float32", "--repeats", "2", "--limit-s", "0"]) == bench.INCOMPLETE
    assert "incomplete: 1 rows were left out after 0 s" in capsys.readouterr().out


def test_an_op_of_no_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rms_norm_row(monkeypatch)
    assert bench.main(["--device", "cpu", "--dtype", "float32", "--repeats", "2", "--op", "none"]) == 2
    assert "no op is called none" in capsys.readouterr().err
