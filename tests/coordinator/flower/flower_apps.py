"""Small Flower apps in a folder, and a fleet that runs them, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from benchmarks.real_workers import LoopbackFleet
from coordinator.flower.launcher import AppCommand, Wish
from protos.app_bundle import make_bundle, with_overrides
from worker.apps.store import AppStore

PROJECT = """
[project]
name = "{name}"
version = "1.0.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
out = ""
{config}
"""

SERVER = """
import json
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def ask(grid, kind, content=None, timeout=None, nodes=None):
    records = content if content is not None else RecordDict()
    ids = list(grid.get_node_ids()) if nodes is None else nodes
    return list(grid.send_and_receive([Message(records, n, kind) for n in ids], timeout=timeout))


def said(replies):
    return [
        {"error": r.error.code, "reason": r.error.reason} if r.has_error()
        else {k: dict(v) for k, v in r.content.items() if not isinstance(v, ArrayRecord)}
        for r in replies
    ]


@app.main()
def main(grid, context):
    found = run(grid, context)
    with open(context.run_config["out"], "w") as file:
        json.dump(found, file)


"""

CLIENT = """
import os
import time
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

"""


def write_app(folder: Path, name: str, server: str, client: str, config: str = "") -> Path:
    """An app whose server defines ``run(grid, context)``, which returns what the test looks at."""
    package = folder / name / name
    package.mkdir(parents=True, exist_ok=True)
    (folder / name / "pyproject.toml").write_text(PROJECT.format(name=name, config=dedent(config)))
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(SERVER + dedent(server))
    (package / "client.py").write_text(CLIENT + dedent(client))
    return folder / name


def accept(fleet: LoopbackFleet, app: Path) -> None:
    """Every worker's owner says yes."""
    for n in range(fleet.workers):
        AppStore(fleet.state.parent / f"worker{n}").accept(make_bundle(app).hash)


def command(
    fleet: LoopbackFleet, app: Path, nodes: int = 0, wait_s: float = 0.0, **config: Any
) -> AppCommand:
    """A run of the app on the fleet."""
    bundle = make_bundle(app)
    items = [f"{key}={json.dumps(value)}" for key, value in config.items()]
    wish = Wish(app, bundle, with_overrides(bundle.spec.config, items), nodes, wait_s)
    return AppCommand(fleet.client.endpoint, wish)


def run(fleet: LoopbackFleet, app: Path, out: Path, nodes: int = 0, **config: Any) -> Any:
    """What the app's server found, and the run's events."""
    accept(fleet, app)
    with command(fleet, app, nodes, out=str(out), **config) as running:
        events: list[Mapping[str, Any]] = list(running.events())
    return json.loads(out.read_text()), events


def restart_coordinator(fleet: LoopbackFleet) -> None:
    """Kill the coordinator without a word and start it again where it was."""
    process = fleet._processes[0]
    process.kill()
    process.wait()
    fleet._spawn(
        "coordinator", "coordinator.cli", "serve", "--listen", fleet.client.endpoint.address,
        *fleet._state("coordinator"),
    )  # fmt: skip
    fleet._processes[0] = fleet._processes.pop()
