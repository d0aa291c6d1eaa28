"""The one way in which every program refuses a command line, and the one form of sizes."""

from __future__ import annotations

import pytest
from motet.command_line import Parser, byte_size, parse_bytes, size


def refusal(parser: Parser, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_reason_comes_on_one_line_without_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="motet worker")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--arena", type=byte_size)
    assert refusal(parser, ["--rows", "x"], capsys) == (
        "motet worker: --rows: invalid int value: 'x'; see motet worker --help\n"
    )
    assert refusal(parser, ["--nonsense"], capsys) == (
        "motet worker: unrecognized arguments: --nonsense; see motet worker --help\n"
    )
    assert refusal(parser, ["--arena", "1GB"], capsys) == (
        "motet worker: --arena: '1GB' is not a valid size in bytes: write 1048576, 512KiB, 64MiB or 2GiB; "
        "see motet worker --help\n"
    )


def test_parsers_of_commands_refuse_alike(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="motet")
    parser.add_subparsers(required=True, metavar="COMMAND").add_parser("status")
    assert (
        refusal(parser, ["status", "--x"], capsys)
        == "motet status: unrecognized arguments: --x; see motet status --help\n"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("512KiB", 1 << 19), ("64MiB", 1 << 26), ("2GiB", 2 << 30), ("1 TiB", 1 << 40)],
)
def test_byte_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "1GB", "1XB", "0x10"])
def test_what_is_no_byte_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512KiB"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"]
