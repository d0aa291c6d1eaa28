"""`motet config check` and `motet completion`: nothing is started, no server is called."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from motet.cli import exits, server_parts
from motet.cli.main import main

from tests.control_plane.server_processes import ROOT, checkpoint

Capture = pytest.CaptureFixture[str]


def config(tmp_path: Path, text: str) -> Path:
    model = checkpoint(tmp_path / "model")
    path = tmp_path / "motet.toml"
    path.write_text(f'[common]\nmodel = "{model}"\n{text}', encoding="utf-8")
    return path


def test_a_good_file_is_ok_for_each_part(tmp_path: Path, capsys: Capture) -> None:
    path = config(tmp_path, '[worker]\narena-bytes = "64MiB"\n[gateway]\nlisten = "127.0.0.1:0"\n')
    assert main(["config", "check", str(path)]) == exits.OK
    assert capsys.readouterr().out == "control-plane: ok\nworker: ok\ngateway: ok\n"


def test_the_example_of_the_repository_is_ok(tmp_path: Path, capsys: Capture) -> None:
    example = (ROOT / "deploy/motet.toml").read_text(encoding="utf-8")
    (tmp_path / "adapters").mkdir()
    path = tmp_path / "motet.toml"
    model = checkpoint(tmp_path / "model")
    path.write_text(example.replace("/models/base", str(model)).replace("/srv/adapters", str(tmp_path / "adapters")))
    assert main(["config", "check", str(path)]) == exits.OK, capsys.readouterr().err


def test_mistakes_of_all_parts_are_reported_at_once(tmp_path: Path, capsys: Capture) -> None:
    path = config(tmp_path, '[control-plane]\nlisten = "nowhere"\n[worker]\nnum-slots = 0\n[gateway]\nzebra = 1\n')
    assert main(["config", "check", str(path)]) == exits.REFUSED
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["control-plane", "worker", "gateway"]
    assert "--listen: 'nowhere' is not HOST:PORT" in lines[0] and "--num-slots: 0 is below 1" in lines[1]
    assert "[gateway] zebra: is not a flag of the gateway" in lines[2]


def test_a_part_without_settings_is_not_checked(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "motet.toml"
    path.write_text('[gateway]\nlisten = "127.0.0.1:0"\n', encoding="utf-8")
    assert main(["config", "check", str(path)]) == exits.OK
    assert f"worker: no settings in {path}\n" in capsys.readouterr().out


def test_a_part_that_is_not_installed_here_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One file may be for several machines; only where none of its parts is installed nothing was checked."""
    installed = server_parts.load

    def load(missing: tuple[str, ...], name: str) -> ModuleType:
        if name.startswith(missing):
            raise server_parts.ServerPartMissing(f"the server part of {name} is not installed")
        return installed(name)

    path = config(tmp_path, '[worker]\narena-bytes = "64MiB"\n')
    monkeypatch.setattr(server_parts, "load", partial(load, ("data_plane",)))
    assert main(["config", "check", str(path)]) == exits.OK
    shown = capsys.readouterr()
    assert "control-plane: ok" in shown.out and "worker: not checked: " in shown.err
    monkeypatch.setattr(server_parts, "load", partial(load, ("data_plane", "control_plane", "gateway")))
    assert main(["config", "check", str(path)]) == exits.FAILED


def test_no_toml_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "motet.toml"
    path.write_text("[worker", encoding="utf-8")
    assert main(["config", "check", str(path)]) == exits.REFUSED
    assert capsys.readouterr().err.startswith(f"motet config check: {path}: is not valid TOML: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["motet", "adap"], "adapters"),
        (["motet", "adapters", "act"], "activate"),
        (["motet", "generate", "--max-t"], "--max-tokens"),
        (["motet", "worker", "--arena-b"], "--arena-bytes"),
        (["motet", "up", "--ht"], "--http"),
        (["motet", "gateway", "--tls-k"], "--tls-key"),
        (["motet", "completion", "z"], "zsh"),
    ],
)
def test_bash_completes_commands_flags_and_choices(
    words: list[str], expected: str, bash_script: str, tmp_path: Path
) -> None:
    quoted = " ".join(f'"{word}"' for word in words)
    program = (
        f'{bash_script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_motet\necho "${{COMPREPLY[@]}}"'
    )
    shown = subprocess.run(
        [shutil.which("bash") or "bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert expected in shown.stdout.split(), (shown.stdout, shown.stderr)


@pytest.fixture(scope="module")
def bash_script() -> str:
    import io
    from contextlib import redirect_stdout

    with redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == exits.OK
    return out.getvalue()


def test_every_shell_gets_a_script_and_another_is_refused(capsys: Capture) -> None:
    for shell in ("zsh", "tcsh"):
        assert main(["completion", shell]) == exits.OK
        assert "motet" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "bash"]) == exits.FAILED
    assert "pip install 'motet[completion]'" in capsys.readouterr().err
