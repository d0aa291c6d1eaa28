"""`motet up --http`, and the programs of README.md that use it, as they are printed."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import httpx

from benchmarks.system import Child
from tests.e2e.harness import ROOT
from tests.gateway.openai.conftest import WAIT_S, WORKER_FLAGS, Served
from tests.makers import make_checkpoint, make_tokenizer
from tests.secret_scan import ENVIRONMENT

README = (ROOT / "README.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"


def test_the_programs_of_the_readme_run_as_they_are_printed(served: Served) -> None:
    [commands] = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if ADDRESS in block]
    curl = commands[commands.index("curl ") :].replace(ADDRESS, served.gateway.url)
    said = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    completion, end = json.JSONDecoder().raw_decode(said)
    assert completion["choices"][0]["text"]
    assert json.loads(said[end:])["choices"][0]["message"]["role"] == "assistant"
    [program] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if ADDRESS in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace(ADDRESS, served.gateway.url), "README.md", "exec"), {})
    assert printed.getvalue()


def test_up_with_http_serves_completions(tmp_path: Path) -> None:
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "model", arch="llama"))
    arguments = ["-m", "motet", "up", str(checkpoint), "--http", "127.0.0.1:0", "--http-processes", "2"]
    arguments += ["--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--device", "cpu"]
    arguments += ["--data-dir", str(tmp_path / "data")]
    up = Child("up", [*arguments, *WORKER_FLAGS], tmp_path / "up.log", environment=ENVIRONMENT)
    try:
        # Worker and gateway get ready in any order.
        ready = re.compile(r"motet ready: (?:HTTP at (?P<http>\S+)|clients at )")
        found = [up.wait_ready(ready, 120.0)["http"] for _ in range(2)]
        address = next(http for http in found if http)
        with httpx.Client(base_url=f"http://{address}", timeout=240.0) as http:
            body = {"model": "model", "prompt": "The contract", "max_tokens": 2}
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 2
            assert "motet_gateway_processes 2.0" in http.get("/metrics").text
    finally:
        code = up.stop(60.0)
    assert code == 0, up.log_tail()
