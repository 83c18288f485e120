"""A first app, as somebody runs it who read one page: few commands, again at once, and without a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from coordinator.cli.processes import Processes
from coordinator.client.client import connect
from coordinator.flower import detached
from tests.coordinator.flower.flower_apps import write_app
from tests.patience import HUNG_S, eventually

NODES = 2
SERVER = """
import time
from pathlib import Path

def run(grid, context):
    hold = context.run_config["hold"]
    print("asking", flush=True)
    replies = ask(grid, "query")
    while hold and not Path(hold).exists():
        time.sleep(0.01)
    found = sorted(reply["m"]["partition"] for reply in said(replies))
    Path("REPORT.md").write_text(f"{found}\\n")
    print("asked", found, flush=True)
    return found
"""
CLIENT = """
app = ClientApp()

@app.query()
def query(message, context):
    facts = MetricRecord({"partition": context.node_config["partition-id"]})
    return Message(RecordDict({"m": facts}), reply_to=message)
"""


class Typed:
    """Commands as they are typed in an app's folder, and their number."""

    def __init__(self, processes: Processes, app: Path, state: Path) -> None:
        self.processes, self.app, self.state = processes, app, state
        self.commands = 0
        self.out = f"out={json.dumps(str(app / 'final_model.json'))}"
        self.address = self.token = ""

    def daemon(self, name: str, *words: str) -> str:
        self.commands += 1
        self.processes.daemon(name, "", ["-m", *words])
        return self.processes.first_line(name)

    def started(self) -> None:
        """`atoll serve` and `atoll-worker join`, of which the former prints what the latter needs."""
        listen = ["serve", "--listen", "127.0.0.1:0", "--state-dir", str(self.state), "--json"]
        served = json.loads(self.daemon("coordinator", "coordinator.cli", *listen))
        join = ["join", served["address"], "--token", served["join_token"], "--listen", "127.0.0.1:0"]
        join += ["--device", "cpu", "--state-dir", str(self.state.with_name("worker")), "--log-json"]
        join += ["--allow-apps", "--accept-app", "any", "--app-nodes", str(NODES), "--sandbox", "off"]
        self.commands += 1
        self.processes.daemon("worker", "", ["-m", "worker.cli", *join])

    def flower(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.commands += 1
        return subprocess.run(
            self.line(*words), capture_output=True, text=True, timeout=HUNG_S, check=False, cwd=self.app
        )

    def line(self, *words: str) -> list[str]:
        state = ["--state-dir", str(self.state)]
        return [sys.executable, "-P", "-m", "coordinator.cli", "flower", *words, *state]

    def run(self, *more: str, hold: Path | str = "") -> list[str]:
        config = f"{self.out} hold={json.dumps(str(hold))}"
        return [
            "run",
            str(self.app),
            "--nodes",
            str(NODES),
            "--run-config",
            config,
            "--wait",
            str(HUNG_S),
            *more,
        ]

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.flower("list", "--json").stdout)
        return found


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Typed]:
    app = write_app(tmp_path, "first", SERVER, CLIENT, 'hold = ""')
    with Processes(tmp_path) as processes:
        yield Typed(processes, app, tmp_path / "coordinator")


def test_a_first_app_takes_three_commands_and_one_that_writes_results_runs_twice(typed: Typed) -> None:
    typed.started()
    first = typed.flower(*typed.run())
    assert first.returncode == 0, first.stderr[-3000:] + typed.processes.log("worker")
    assert typed.commands == 3
    results = typed.app / "final_model.json", typed.app / "REPORT.md"
    assert [json.loads(results[0].read_text()), results[1].exists()] == [list(range(NODES)), True]
    again = typed.flower(*typed.run())
    assert again.returncode == 0, again.stderr[-3000:]
    hashes = {
        line.rsplit(" ", 1)[1]
        for done in (first, again)
        for line in done.stderr.splitlines()
        if "hash" in line
    }
    assert len(hashes) == 1


@pytest.mark.slow
def test_a_detached_run_is_listed_read_and_stopped(typed: Typed, tmp_path: Path) -> None:
    typed.started()
    go, never = tmp_path / "go", tmp_path / "never"
    begun = typed.flower(*typed.run("--detach", "--json", hold=go))
    assert begun.returncode == 0, begun.stderr[-3000:]
    run = json.loads(begun.stdout)["run"]
    eventually(
        lambda: [(r["run"], r["stage"], r["here"]) for r in typed.listed()] == [(run, "running", True)]
    )
    # What it prints can be read meanwhile, and by its first digits.
    folder = detached.find(typed.state, run[:8])
    assert folder is not None
    eventually(lambda: b"asking" in b"".join(folder.output()))
    assert "asking" in typed.flower("logs", run[:8]).stdout
    go.touch()
    followed = typed.flower("logs", run, "--follow")
    assert f"asked {list(range(NODES))}" in followed.stdout
    (ended,) = typed.listed()
    assert (ended["stage"], ended["code"], ended["nodes"]) == ("done", 0, NODES)
    # One is ended where it runs.
    begun = typed.flower(*typed.run("--detach", hold=never))
    assert begun.returncode == 0, begun.stderr[-3000:]
    second = begun.stdout.strip()
    assert typed.flower("stop", second).returncode == 0
    assert [r["stage"] for r in typed.listed() if r["run"] == second] == ["stopped"]


@pytest.mark.slow
def test_a_run_of_a_terminal_elsewhere_is_stopped_by_its_number(typed: Typed, tmp_path: Path) -> None:
    typed.started()
    terminal = subprocess.Popen(
        typed.line(*typed.run(hold=tmp_path / "never")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=typed.app,
    )
    with terminal, connect(state_dir=typed.state) as client:
        eventually(lambda: [facts for facts in client.app_runs() if facts.nodes])
        (other,) = [r for r in typed.listed() if not r["here"]]
        assert other["owner"] == "owner"
        # Its ServerApp is in a loop of its own and asks for nothing: it ends all the same.
        assert typed.flower("stop", other["run"]).returncode == 0
        said, _ = terminal.communicate(timeout=HUNG_S)
        assert client.app_runs() == []
    assert terminal.returncode != 0
    assert "stopped by its owner" in said


@pytest.mark.slow
def test_a_detached_run_that_cannot_begin_says_so_in_the_terminal(typed: Typed) -> None:
    typed.started()
    with connect(state_dir=typed.state) as client:
        eventually(lambda: client.status().workers)  # there is one, of two nodes
    refused = typed.flower("run", str(typed.app), "--nodes", "9", "--detach")
    assert refused.returncode == 4
    assert "of 9 nodes" in refused.stderr
    (ended,) = typed.listed()
    assert ended["stage"] == "failed"
