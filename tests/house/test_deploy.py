"""Manifests in deploy/: systemd's own check, a chart that is rendered and held against its schema."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from atoll.version import __version__
from docs.pages import reference

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "atoll"
UNIT = ROOT / "deploy" / "systemd" / "atoll-coordinator.service"
PLACE = re.compile(r"\{\{ \.(\w+(?:\.\w+)*)( \| quote)? \}\}")


def rendered(**values: Any) -> list[dict[str, Any]]:
    """The chart's manifests: it has values put in and no other function of Helm's templates but ``quote``."""
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, value in values.items():
        part, _, name = path.partition("_")
        found[part][name] = value
    jsonschema.validate(found, json.loads((CHART / "values.schema.json").read_text()))
    given = {"Values": found, "Release": {"Name": "atoll"}}

    def put(place: re.Match[str]) -> str:
        value: Any = given
        for name in place[1].split("."):
            value = value[name]
        return json.dumps(str(value)) if place[2] else str(value)

    texts = [PLACE.sub(put, path.read_text()) for path in sorted((CHART / "templates").glob("*.yaml"))]
    assert "{{" not in "".join(texts)
    return [one for text in texts for one in yaml.safe_load_all(text)]


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def test_the_charts_services_ports_and_selectors_fit_each_other() -> None:
    service, coordinator, worker = rendered()
    assert [m["kind"] for m in (service, coordinator, worker)] == ["Service", "StatefulSet", "Deployment"]
    labels = coordinator["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    [container] = pod(coordinator)["containers"]
    assert {p["targetPort"] for p in service["spec"]["ports"]} == {p["name"] for p in container["ports"]}
    assert coordinator["spec"]["replicas"] == 1
    assert worker["spec"]["replicas"] == 0
    [dialled] = [word for word in pod(worker)["containers"][0]["args"] if word.endswith(":7700")]
    assert dialled == f"{service['metadata']['name']}:7700"
    for manifest in (coordinator, worker):
        assert manifest["spec"]["selector"]["matchLabels"].items() <= (
            manifest["spec"]["template"]["metadata"]["labels"].items()
        )
        claimed = [claim["metadata"] for claim in manifest["spec"].get("volumeClaimTemplates", [])]
        volumes = {v["name"] for v in [*pod(manifest)["volumes"], *claimed]}
        assert {m["name"] for m in pod(manifest)["containers"][0]["volumeMounts"]} == volumes


def test_the_charts_pods_have_no_privilege_and_commands_that_are_understood() -> None:
    for manifest in rendered(workers_replicas=4)[1:]:
        assert pod(manifest)["securityContext"]["runAsNonRoot"]
        assert not pod(manifest)["automountServiceAccountToken"]
        [container] = pod(manifest)["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        understood(container["args"])


@pytest.mark.parametrize(("name", "value"), [("workers_replicas", -1), ("coordinator_serviceType", "Public")])
def test_values_that_cannot_be_are_refused_by_the_charts_schema(name: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        rendered(**{name: value})


def test_the_chart_is_of_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def understood(words: list[str]) -> None:
    commands = dict(reference.commands())
    commands[f"{words[0]} {words[1]}"].make_context(words[1], list(words[2:]))  # type: ignore[attr-defined]


def test_the_coordinators_unit_is_what_systemd_reads(tmp_path: Path) -> None:
    [line] = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.MULTILINE)
    words = shlex.split(line.replace("${ATOLL_LISTEN}", "0.0.0.0:7700").replace("${ATOLL_ADVERTISE}", "h"))
    understood([Path(words[0]).name, *words[1:]])
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text().replace("/opt/atoll/bin/atoll", sys.executable).replace("=atoll\n", "=root\n")
    )
    found = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert [text for text in found.stderr.splitlines() if UNIT.name in text] == []


def test_every_python_that_is_promised_is_tried_by_the_gate() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    [tried] = re.findall(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert promised == ["3.11", *tried.split()]


def test_without_the_locks_of_posix_modules_load_and_a_folder_is_refused_with_wsl(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import atoll, coordinator.cli.main, worker.cli.main, worker.daemon\n"
        "from pathlib import Path\n"
        "from hostos.files.folder_lock import FolderLock\n"
        f"FolderLock(Path({str(tmp_path)!r}) / 'lock', str)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (
        "UsageError: Atoll needs the file locks of Linux or macOS; on Windows run it in WSL" in found.stderr
    )
