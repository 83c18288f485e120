"""A Flower app that brings a package runs where its owners allow it, on both sides; elsewhere it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("pip")

from hostos.packages.wheels import table_of
from tests.coordinator.flower.flower_apps import write_app
from tests.hostos.packages.made_wheels import make_wheel
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow

SERVER = """
import tinymath

def run(grid, context):
    replies = ask(grid, "query")
    return {"here": tinymath.twice(21), "there": said(replies)}
"""
CLIENT = """
import tinymath

app = ClientApp()

@app.query()
def query(message, context):
    where = {"twice": tinymath.twice(context.node_config["partition-id"] + 1)}
    return Message(RecordDict({"found": MetricRecord(where)}), reply_to=message)
"""


def test_a_package_reaches_the_serverapp_and_the_clientapps_where_it_is_allowed(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tinymath", {"tinymath.py": "def twice(x):\n    return 2 * x\n"})
    app = write_app(tmp_path, "brings", SERVER, CLIENT)
    with (app / "pyproject.toml").open("a") as file:
        file.write(table_of(tmp_path / "wheels"))
    out = tmp_path / "found.json"
    command = [sys.executable, "-P", "-m", "coordinator.cli", "flower", "simulate", str(app)]
    command += ["--nodes", "2", "--workers", "1", "--run-config", f'out="{out}"']
    environment = {**os.environ, "HOME": str(tmp_path)}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, env=environment)
    assert refused.returncode == 2
    assert "--packages DIR" in refused.stderr
    command += ["--packages", str(tmp_path / "wheels")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["here"] == 42
    assert [reply["found"]["twice"] for reply in found["there"]] == [2, 4]
