"""`atoll relay` as a process, and the relays of `atoll serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from coordinator.cli import main as cli
from coordinator.cli.fleet.relay import RelayOptions
from coordinator.config import CoordinatorConfig, Relaying
from coordinator.messages import instructions as do
from coordinator.server import serve
from hostos.command_line import run
from protos import relay_tickets as tickets
from tests.patience import HUNG_S
from worker.cli.doctor import greeted

USE = do.RelayUse(True, 0.0)
ROOT = Path(__file__).resolve().parents[4]


def test_a_relay_greets_shows_its_metrics_and_ends_when_asked(tmp_path: Path) -> None:
    tickets.made_key_file(tmp_path / "relay-key")
    command = ["relay", "--listen", "127.0.0.1:0", "--key", str(tmp_path / "relay-key"), "--metrics", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *command, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    with process:
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            host, _, port = found["address"].rpartition(":")
            assert greeted((host, int(port)))[1] == ""
            with urllib.request.urlopen(f"http://{found['metrics']}/metrics") as page:
                text = page.read().decode()
            assert "atoll_relay_bytes_total 0.0" in text
            assert 'atoll_relay_refused_total{cause="ticket"} 0.0' in text
            process.send_signal(signal.SIGTERM)
            assert process.wait(HUNG_S) == 0
        finally:
            process.kill()


def test_a_relay_without_its_key_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("", "abc", "zz" * 32):
        monkeypatch.setenv("ATOLL_RELAY_KEY", value)
        assert run(cli.app, ["relay", "--listen", "127.0.0.1:0"]) == UsageError.exit_code
        assert "a copy of `relay-key`" in " ".join(capsys.readouterr().err.split())


def test_the_options_of_serve_make_its_relays() -> None:
    assert RelayOptions().relaying(insecure=False) == Relaying(port=0)
    assert RelayOptions().relaying(insecure=True) == Relaying()
    options = RelayOptions(relay=["r.example.org", "192.0.2.1:9"], relay_mbit=8.0, relay_gib_a_day=2.0)
    assert options.relaying(insecure=False) == Relaying(
        0, (("r.example.org", 7702), ("192.0.2.1", 9)), 8e6, 2 << 30
    )
    assert RelayOptions(no_relay=True).relaying(insecure=False) == Relaying()
    with pytest.raises(UsageError, match="--no-relay"):
        RelayOptions(no_relay=True, relay_port=7702).relaying(insecure=False)


def test_an_insecure_coordinator_runs_no_relay(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would see what passes"):
        CoordinatorConfig(tmp_path, insecure=True, relaying=Relaying(port=0))


def started(folder: Path, **options: Any) -> Any:
    return serve(CoordinatorConfig(folder, entry_port=0, relaying=Relaying(**options)))


def test_a_coordinator_keeps_the_key_of_its_relay_and_names_it_to_workers(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        with started(tmp_path / "state", port=0) as running:
            port = running.started.relay_port
            assert greeted(("127.0.0.1", port))[1] == ""
            way = running.call(lambda server: server.shell.relays.way("w-a", "w-b", USE))
            assert list(way.addresses) == [("", port)]
            keys.append(tickets.key_file(tmp_path / "state" / "relay-key"))
            tickets.opened(keys[-1], way.ticket, 0.0)
        assert greeted(("127.0.0.1", port))[1] != ""
    assert keys[0] == keys[1]


def test_a_relay_port_that_is_taken_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="choose another port"):
            started(tmp_path / "asked", port=port)
