"""Settings in deploy/: every file of settings starts the parts that read it, and manifests name what is there.

`make check-deploy` checks the forms; this checks the contents against Motet.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from motet.cli import exits
from motet.cli.main import main

from tests.control_plane.server_processes import ROOT, checkpoint

DEPLOY = ROOT / "deploy"
MANIFESTS: list[dict[str, Any]] = [
    document for document in yaml.safe_load_all((DEPLOY / "kubernetes/motet.yaml").read_text()) if document
]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] in kinds]


CONFIG = of_kind("ConfigMap")[0]["data"]
WORKLOADS = of_kind("Deployment", "StatefulSet")
SETTINGS = {
    "compose": (DEPLOY / "compose/motet.toml").read_text(),
    "kubernetes": CONFIG["motet.toml"],
}


def with_files(text: str, tmp_path: Path) -> str:
    """The settings with a checkpoint and with files in place of those of a container."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("motet-control-plane", "motet-worker-0")
    files = {
        "tls.crt": issued.cert_chain_pems[0].bytes(),
        "tls.key": issued.private_key_pem.bytes(),
        "ca.crt": authority.cert_pem.bytes(),
        "workers": CONFIG["workers"].encode(),
        "keys.json": b'{"keys": []}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    model = checkpoint(tmp_path / "model")
    return re.sub(r'"/etc/motet/[^"]*/([^"/]+)"', rf'"{tmp_path}/\1"', text).replace('"/models/base"', f'"{model}"')


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_can_be_used_by_every_part(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "motet.toml"
    path.write_text(with_files(SETTINGS[name], tmp_path))
    code = main(["config", "check", str(path)])
    assert code == exits.OK, capsys.readouterr().err
    assert capsys.readouterr().out == "control-plane: ok\nworker: ok\ngateway: ok\n"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload["metadata"]["name"])
def test_a_pod_runs_without_rights_and_its_probes_name_its_ports(workload: dict[str, Any]) -> None:
    spec = workload["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        ports = {port["name"] for port in container["ports"]}
        for probe in (container[name] for name in container if name.endswith("Probe")):
            port = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
            assert port is None or port in ports
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claims


def test_a_pod_has_time_to_shut_down() -> None:
    drain_s = {
        part: float(re.search(r"drain-timeout-s = (\d+)", text)[1])  # type: ignore[index]
        for part, text in (
            (part, CONFIG["motet.toml"].split(f"[{part}]")[1].split("\n[")[0]) for part in ("control-plane", "gateway")
        )
    }
    for part, timeout_s in drain_s.items():
        (workload,) = (each for each in WORKLOADS if each["metadata"]["name"] == f"motet-{part}")
        spec = workload["spec"]["template"]["spec"]
        before_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= before_s + timeout_s + 10


def test_services_and_policies_name_ports_and_pods_that_are_there() -> None:
    pods = [workload["spec"]["template"] for workload in WORKLOADS]

    def ports_of(selector: dict[str, str]) -> set[str]:
        (pod,) = (pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items())
        return {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}

    for service in of_kind("Service"):
        found = ports_of(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= found
    for policy in of_kind("NetworkPolicy"):
        found = ports_of(policy["spec"]["podSelector"]["matchLabels"])
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} <= found
    for budget in of_kind("PodDisruptionBudget"):
        assert ports_of(budget["spec"]["selector"]["matchLabels"])
    assert {policy["metadata"]["name"] for policy in of_kind("NetworkPolicy")} == {
        workload["metadata"]["name"] for workload in WORKLOADS
    }, "each pod has a policy"


def test_the_workers_port_is_for_workers_only() -> None:
    (policy,) = (each for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "motet-control-plane")
    (rule,) = (rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "workers"}])
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    assert "namespaceSelector" not in source


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prometheus_reads_ports_that_the_services_of_each_profile_have(profile: str) -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    names = set[str]()
    for name, service in compose["services"].items():
        if profile in service.get("profiles", [profile]):
            names |= {name, *service.get("networks", {}).get("default", {}).get("aliases", [])}
    settings = tomllib.loads(SETTINGS["compose"])
    ports = {
        "control-plane": settings["control-plane"]["metrics-listen"],
        "worker": settings["worker"]["worker-metrics-listen"],
        "gateway": settings["gateway"]["listen"],
    }
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for each in job["static_configs"] for target in each["targets"]]
    assert sorted(targets) == sorted(f"{name}:{address.rpartition(':')[2]}" for name, address in ports.items())
    assert {target.partition(":")[0] for target in targets} <= names


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for workload in WORKLOADS:
        for container in workload["spec"]["template"]["spec"]["containers"]:
            if container["name"] != "redis":
                found.append((workload["metadata"]["name"], container["args"]))
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
        found.append((unit.name, shlex.split(line)[1:]))
    for file in sorted((DEPLOY / "images").glob("*.Dockerfile")):
        line = next(line for line in file.read_text().splitlines() if line.startswith("CMD "))
        found.append((file.name, yaml.safe_load(line.removeprefix("CMD "))))
    return found


@pytest.mark.parametrize(("place", "arguments"), commands(), ids=[place for place, _ in commands()])
def test_a_command_is_one_that_motet_has(
    place: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each flag is known: with a file that is not there, the file is what is wrong."""
    assert arguments[0] in ("control-plane", "worker", "gateway"), place
    with pytest.raises(SystemExit) as ended:
        main([word.replace("/etc/motet", str(tmp_path)) for word in arguments])
    assert ended.value.code == exits.USAGE
    assert re.search(r"--config: \S+motet\.toml cannot be read", capsys.readouterr().err)
