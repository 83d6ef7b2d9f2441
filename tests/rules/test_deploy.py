"""deploy/: every file is well formed, and says what the program understands."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

yaml = pytest.importorskip("yaml", reason="needs the extra 'serve'")
pytest.importorskip("prometheus_client", reason="needs the extra 'serve'")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from tessera.adapt.history import LoadView  # noqa: E402
from tessera.cli import app  # noqa: E402
from tessera.cli.serve_options import config_values  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402
from tessera.serve.records import DeviceView, Snapshot  # noqa: E402

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
YAMLS = sorted(DEPLOY.glob("*.yaml"))
METRIC = re.compile(r"\btessera:\w+")
SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name: str, kind: str) -> Any:
    return next(document for document in documents(name) if document["kind"] == kind)


def parsed(words: list[str]) -> dict[str, Any]:
    """Options of a `tessera serve` command line."""
    return dict(SERVE.make_context("serve", words).params)


def metric_names() -> set[str]:
    snapshot = Snapshot(
        model="m", policy="p", policies=("p",), devices=(DeviceView("d", 0.0, 0),),
        links=(("a", "b", 0.0, 0),), running=0, waiting=0, load=LoadView(),
    )  # fmt: skip
    metrics = Metrics("m", lambda: snapshot)
    text = metrics.render().decode()
    families = list(text_string_to_metric_families(text))
    found = {sample.name for family in families for sample in family.samples}
    for family in families:  # a histogram without observations has no sample
        found |= {
            f"{family.name}_{part}" for part in ("bucket", "sum", "count") if family.type == "histogram"
        }
    return found


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.name))
def test_yaml_is_clean(path: Path) -> None:
    linter = pytest.importorskip("yamllint.linter", reason="needs yamllint")
    from yamllint.config import YamlLintConfig

    rules = {
        "document-start": "disable", "line-length": {"max": 120}, "braces": {"max-spaces-inside": 0},
        "comments": {"min-spaces-from-content": 1},
    }  # fmt: skip
    config = YamlLintConfig(json.dumps({"extends": "default", "rules": rules}))
    assert [] == [str(problem) for problem in linter.run(path.read_text(), config)]
    assert all(documents(path.name))


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yaml"])
def test_metrics_exist(name: str) -> None:
    used = set(METRIC.findall((DEPLOY / name).read_text()))
    assert used
    assert set() == used - metric_names()


def test_dashboard_has_panels() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers)) >= 12
    charts = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(
        target["expr"].count("(") == target["expr"].count(")") for p in charts for target in p["targets"]
    )
    (source,) = documents("grafana-sources.yaml")[0]["datasources"]
    assert {source["uid"]} == {panel["datasource"]["uid"] for panel in charts}


def test_alerts_have_what_prometheus_needs() -> None:
    rules = [rule for group in documents("alerts.yaml")[0]["groups"] for rule in group["rules"]]
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["expr"].count("(") == rule["expr"].count(")")
    assert len(rules) == len({rule["alert"] for rule in rules})
    if tool := shutil.which("promtool"):
        subprocess.run([tool, "check", "rules", DEPLOY / "alerts.yaml"], check=True)


def test_configuration_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(of_kind("kubernetes.yaml", "ConfigMap")["data"]["serve.yaml"])
    for one in (DEPLOY / "serve.yaml", path):
        assert {"model", "drain"} <= config_values(one, SERVE).keys()
        assert 8000 == parsed(["--config", str(one)])["port"]


def test_stops_wait_for_the_drain(tmp_path: Path) -> None:
    """What ends the service gives it longer than its drain."""
    drain = config_values(DEPLOY / "serve.yaml", SERVE)["drain"]
    unit = (DEPLOY / "tessera.service").read_text()
    compose = documents("compose.yaml")[0]["services"]["tessera"]
    pod = of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert drain < int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    assert drain < int(compose["stop_grace_period"].removesuffix("s"))
    assert drain + pause < pod["terminationGracePeriodSeconds"]


def test_kubernetes_probes_and_safety() -> None:
    pod = of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "/health" == container[probe]["httpGet"]["path"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["enableServiceLinks"], "TESSERA_PORT would be an option"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    command, option, path = container["args"]
    assert ("serve", "--config", "/etc/tessera/serve.yaml") == (command, option, path)
    selector = of_kind("kubernetes.yaml", "Service")["spec"]["selector"]
    assert (
        selector.items()
        <= of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )


def test_kuberay_runs_a_command_that_exists() -> None:
    job = of_kind("kuberay.yaml", "RayJob")["spec"]
    program, command, *words = job["entrypoint"].split()
    options = parsed(words)
    assert ("tessera", "serve", "auto") == (program, command, options["ray"])
    groups = {group["groupName"] for group in job["rayClusterSpec"]["workerGroupSpecs"]}
    assert groups == {word.split(":")[1] for word in options["devices"].split(",")}


def test_dockerfile_has_both_variants() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: dict[str, list[list[str]]] = {}
    for line in lines:
        if line[0] == "FROM":
            stages[line[1].split(" AS ")[1]] = stages_of = []
        elif stages:
            stages_of.append(line)
    for name in ("cpu", "cuda"):
        words = dict(line for line in stages[name] if line[0] in ("USER", "CMD", "ENTRYPOINT"))
        assert int(words["USER"]) > 0
        assert ["tessera"] == json.loads(words["ENTRYPOINT"])
        assert ["serve", "--config", "/etc/tessera/serve.yaml"] == json.loads(words["CMD"])
    assert any("HEALTHCHECK" == line[0] and "/health" in line[1] for line in stages["base"])
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((DEPLOY.parent / word).exists() for word in copied.split())


def test_compose_is_local_and_limited() -> None:
    compose = documents("compose.yaml")[0]
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", []):
            if volume.startswith("./") and "models" not in volume:
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
    assert {"cpu", "cuda"} == {
        service["build"]["target"] for service in compose["services"].values() if "build" in service
    }


def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "tessera.service"
    text = (DEPLOY / "tessera.service").read_text()
    unit.write_text(
        re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text)
    )  # the program need not be installed
    done = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "tessera.service" in line]
    assert [] == complaints
    command = re.findall(r"ExecStart=\S+/tessera serve (.*)", text)[0].split()
    assert "--config" == command[0]
