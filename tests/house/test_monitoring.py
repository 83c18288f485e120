"""What watches a fleet beside the page: rules and boards of metrics that exist, as Prometheus reads them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from protos import telemetry

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
BOARD = ROOT / "deploy" / "grafana" / "atoll.json"
KNOWN = {metric.name: metric for metric in telemetry.METRICS}
NAMED = re.compile(r"\batoll_\w+")


def expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    board = json.loads(BOARD.read_text())
    return [rule["expr"] for group in groups for rule in group["rules"]] + [
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    ]


def test_rules_and_panels_are_of_metrics_that_there_are_and_no_metric_is_left_out_of_the_board() -> None:
    named = {name for expression in expressions() for name in NAMED.findall(expression)}
    assert named - KNOWN.keys() == set()
    assert KNOWN.keys() - set(NAMED.findall(BOARD.read_text())) == set()


def test_conditions_are_on_labels_that_the_metric_has() -> None:
    for expression in expressions():
        for name, conditions in re.findall(r"(atoll_\w+)\{([^}]*)\}", expression):
            labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", conditions)
            assert set(labels) <= set(KNOWN[name].labels), expression


def test_panels_have_ids_of_their_own_and_lie_beside_each_other() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_alert_names_what_to_do() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 5
    for alert in alerts:
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["remedy"]
        assert alert["labels"]["severity"] in ("page", "ticket")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")
@pytest.mark.parametrize(
    "what", [("rules", RULES), ("config", ROOT / "deploy" / "prometheus" / "prometheus.yml")]
)
def test_prometheus_reads_the_files(what: tuple[str, Path]) -> None:
    command = ["promtool", "check", what[0], str(what[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
