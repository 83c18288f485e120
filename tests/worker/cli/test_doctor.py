"""The doctor finds what stands between this machine and the fleet, and says what to do."""

from __future__ import annotations

import io
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hostos.command_line import run
from protos import atoll_control_pb2 as pb
from protos.credentials import Authority, fingerprint, new_token
from protos.relay_tickets import NONCE_BYTES, greeting
from tests.worker.cli.test_main import Entry, config_for
from worker.cli import doctor
from worker.cli import main as cli
from worker.cli.doctor import Mark, Report, examine, show
from worker.config import WorkerConfig
from worker.control.enroll import join
from worker.hosting.contained.protections import Protections
from worker.hosting.contained.sandbox import Sandbox
from worker.machine.device import Device, DeviceRates, machine_memory, memory_limit
from worker.machine.facts import DeviceFacts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "ask_facts", _facts)  # what it is stands in tests/worker/machine
    monkeypatch.setattr(
        doctor, "protections", lambda device, sandbox: Protections(sandbox.why_not, sandbox.remedy, "", True)
    )
    monkeypatch.setattr("worker.hosting.contained.sandbox.probe", lambda device: Sandbox("/usr/bin/bwrap"))


def _facts(config: WorkerConfig) -> DeviceFacts:
    free, total = machine_memory()
    limit = memory_limit(config.memory_bytes, free, total, "this machine")
    return DeviceFacts(Device("cpu", 0, "a processor", 2, total, limit), DeviceRates(50.0, 10.0), {})


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    started = Entry(tmp_path / "coordinator")
    door: Any = started.door
    door.reachable, door.skew_s, door.relays = True, 0.0, []

    def echo(chunks: Iterator[pb.EchoChunk], context: Any) -> Iterator[pb.EchoChunk]:
        first = next(chunks)
        yield pb.EchoChunk(data=bytes(first.wanted_bytes))
        yield pb.EchoChunk(received_bytes=sum(len(chunk.data) for chunk in chunks))

    def hello(request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        relays = [pb.Address(port=port) for port in door.relays]
        time_s = time.time() + door.skew_s
        return pb.HelloReply(protocol=door.protocol, version="9.9", time_s=time_s, relays=relays)

    door.Echo, door.Hello = echo, hello
    door.Reach = lambda request, context: pb.ReachReply(host="203.0.113.9", reachable=door.reachable)
    started.server.stop(None).wait()
    again = _with_methods(tmp_path, door)
    yield again
    again.server.stop(None).wait()


def _with_methods(folder: Path, door: Any) -> Entry:
    """The methods are bound when the servicer is added: serve the changed door."""
    from concurrent import futures

    import grpc

    from protos import atoll_control_pb2_grpc as rpc
    from protos.credentials import server_credentials

    entry = object.__new__(Entry)
    entry.authority = Authority.open(folder / "coordinator" / "ca")
    entry.door = door
    entry.token = new_token(entry.authority)
    door.token = entry.token.presented
    entry.server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_EntryServicer_to_server(door, entry.server)
    credentials = server_credentials(entry.authority.server_identity(), mutual=False)
    entry.port = entry.server.add_secure_port("127.0.0.1:0", credentials)
    entry.server.start()
    return entry


def marks(report: Report) -> dict[str, Mark]:
    return {finding.check: finding.mark for finding in report.findings}


def test_a_fit_machine_learns_what_it_would_hold_and_carry(entry: Entry, tmp_path: Path):
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    assert report.fit
    assert report.exit_code == 0
    assert set(marks(report).values()) == {Mark.OK}
    assert "million parameters" in report.findings[-1].found
    figures = report.as_json()["figures"]
    for name in ("rtt_s", "down_bps", "up_bps", "matmul_gflops", "memory_limit_bytes", "clock_offset_s"):
        assert name in figures
    assert not (tmp_path / "worker" / "identity").exists()


def test_a_closed_port_is_a_note_with_the_way_to_open_it(entry: Entry, tmp_path: Path):
    door: Any = entry.door
    door.reachable = False
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    inbound = next(finding for finding in report.findings if finding.check == "inbound")
    assert inbound.mark is Mark.NOTE
    assert "a forwarded port" in inbound.fix
    assert report.fit


def way(report: Report) -> tuple[str, Mark, str]:
    found = next(finding for finding in report.findings if finding.check == "way to peers")
    return report.figures["way"], found.mark, found.found


def test_a_machine_that_is_reached_is_joined_directly(entry: Entry, tmp_path: Path):
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    assert way(report) == ("direct", Mark.OK, "direct: they dial this machine, or it dials them")


def test_a_closed_machine_meets_others_at_a_relay_that_greets(entry: Entry, tmp_path: Path):
    door: Any = entry.door
    door.reachable = False
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door.relays = [1, listener.getsockname()[1]]
        relay = threading.Thread(target=greet, args=(listener,))
        relay.start()
        report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
        relay.join()
    relays = [finding for finding in report.findings if finding.check == "relay"]
    assert [finding.mark for finding in relays] == [Mark.NOTE, Mark.OK]
    assert "open that port" in relays[0].fix
    kind, mark, words = way(report)
    assert (kind, mark) == ("relayed", Mark.OK)
    assert f"the relay 127.0.0.1:{door.relays[1]}, at most" in words


def greet(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(greeting(bytes(NONCE_BYTES)))


def test_a_closed_machine_without_a_relay_hears_what_is_missing(entry: Entry, tmp_path: Path):
    config = replace(config_for(entry, tmp_path, entry.token), inbound=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        door: Any = entry.door
        door.relays = [silent.getsockname()[1]]
        silent.close()
        report = examine(config, lambda what: None)
    assert way(report)[:2] == ("outbound", Mark.NOTE)
    assert "inbound" not in marks(report)
    assert report.fit


def test_protections_are_shown_and_one_that_is_missing_is_a_note(entry: Entry, tmp_path: Path):
    config = config_for(entry, tmp_path, entry.token)
    report = examine(config, lambda what: None)
    assert report.figures["protections"] == "own process, bubblewrap, memory by control group"
    found = {finding.check: finding.found for finding in report.findings}
    assert "no network" in found["sandbox"]
    assert "control group" in found["memory bound"]
    report = examine(replace(config, sandbox="off"), lambda what: None)
    assert marks(report)["sandbox"] is Mark.NOTE
    assert "no sandbox (switched off by --sandbox off)" in report.figures["protections"]
    assert report.fit


def test_a_sandbox_that_is_required_and_not_there_makes_unfit(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        doctor, "probe", lambda device: Sandbox("", why_not="none is here", remedy="install it")
    )
    config = replace(config_for(entry, tmp_path, entry.token), sandbox="require")
    report = examine(config, lambda what: None)
    missing = next(finding for finding in report.findings if finding.check == "sandbox")
    assert (missing.mark, missing.found) == (Mark.BAD, "none: none is here")
    assert "not fit to join yet: sandbox" in report.findings[-1].found


def test_a_clock_that_is_days_off_makes_unfit(entry: Entry, tmp_path: Path):
    door: Any = entry.door
    door.skew_s = 2 * 86400.0
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    assert marks(report)["clock"] is Mark.BAD
    assert report.exit_code == 1
    assert "not fit to join yet: clock" in report.findings[-1].found


def test_nobody_at_the_port_has_the_exit_code_of_join(entry: Entry, tmp_path: Path):
    entry.server.stop(None).wait()
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    assert report.exit_code == 5
    assert "atoll serve" in report.findings[-2].found


def test_a_token_of_another_coordinator_has_the_exit_code_of_join(entry: Entry, tmp_path: Path):
    stranger = new_token(Authority.open(tmp_path / "other"))
    report = examine(config_for(entry, tmp_path, stranger), lambda what: None)
    assert report.exit_code == 6


def test_without_a_token_all_is_told_but_what_takes_one(entry: Entry, tmp_path: Path):
    report = examine(config_for(entry, tmp_path), lambda what: None)
    found = {finding.check: finding for finding in report.findings}
    assert {check for check, f in found.items() if f.mark is not Mark.OK} == {"identity", "rates"}
    assert found.keys() >= {"device", "memory", "reachable", "versions", "round trip", "clock"}
    assert "NOT verified" in found["identity"].found
    assert "atoll token create" in found["identity"].fix
    assert "million parameters" in found["verdict"].found
    assert f"atoll-worker join 127.0.0.1:{entry.port} --token TOKEN" in found["verdict"].found
    assert report.exit_code == 0
    assert report.figures["coordinator_verified"] is False
    assert entry.door.enrolled == 0


def test_without_a_token_the_shown_certificate_is_the_one_of_the_port(entry: Entry, tmp_path: Path):
    report = examine(config_for(entry, tmp_path), lambda what: None)
    shown = ssl.get_server_certificate(("127.0.0.1", entry.port))
    told = next(finding.found for finding in report.findings if finding.check == "identity")
    assert fingerprint(shown.encode()) in told


def test_only_a_token_or_an_identity_verifies_the_coordinator(entry: Entry, tmp_path: Path):
    config = config_for(entry, tmp_path, entry.token)
    assert examine(config, lambda what: None).figures["coordinator_verified"] is True
    join(config, lambda seconds: False)
    again = examine(config_for(entry, tmp_path), lambda what: None)
    assert again.figures["coordinator_verified"] is True
    assert marks(again)["identity"] is Mark.OK


def test_without_a_token_a_port_without_tls_is_refused_with_the_way_to_look(tmp_path: Path):
    plain = Entry(tmp_path / "plain", tls=False)
    try:
        report = examine(config_for(plain, tmp_path), lambda what: None)
    finally:
        plain.server.stop(None).wait()
    assert report.exit_code == 6
    assert "--insecure" in report.findings[-2].found
    assert marks(report)["reachable"] is Mark.OK


def test_without_a_token_the_command_prints_what_it_found(
    entry: Entry, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    arguments = ["doctor", f"127.0.0.1:{entry.port}", "--state-dir", str(tmp_path / "w"), "--device", "cpu"]
    assert run(cli.app, [*arguments, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["fit"] is True
    assert told["figures"].keys() >= {"rtt_s", "holds_parameters", "coordinator_version"}


def test_another_protocol_has_the_exit_code_of_join(entry: Entry, tmp_path: Path):
    entry.door.protocol += 1
    report = examine(config_for(entry, tmp_path, entry.token), lambda what: None)
    assert report.exit_code == 7


def test_too_little_memory_makes_unfit(entry: Entry, tmp_path: Path):
    report = examine(config_for(entry, tmp_path, entry.token, memory_bytes=100 << 20), lambda what: None)
    assert marks(report)["memory"] is Mark.BAD


def test_people_see_a_line_a_check_and_what_to_do(entry: Entry, tmp_path: Path):
    door: Any = entry.door
    door.reachable = False
    text = io.StringIO()
    show(examine(config_for(entry, tmp_path, entry.token), lambda what: None), Console(file=text, width=200))
    assert "round trip" in text.getvalue()
    assert "-> fine: others are dialled from here" in text.getvalue()


@pytest.mark.parametrize(
    ("gpu", "packages", "refused", "said"),
    [
        (False, 0, None, "not measured: this system has no counter"),
        (False, 0, Path("/sys/e"), "not measured: only root may read /sys/e"),
        (True, 0, Path("/sys/e"), "measured: the GPU's; only root may read /sys/e"),
        (True, 2, None, "measured: the GPU's and its share of the processors'"),
    ],
)
def test_counters_of_energy_are_named_once(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, packages: int, refused: Path | None, said: str
):
    class Found:
        def __init__(self) -> None:
            self.refused = refused

        def __len__(self) -> int:
            return packages

    monkeypatch.setattr(doctor, "Packages", Found)
    report, figures = doctor.Report("lab:7700"), dict[str, Any]()
    doctor._examine_energy(gpu, report, figures)
    assert [(f.check, f.mark, f.found) for f in report.findings] == [("energy", Mark.OK, said)]
    assert figures["energy"] == {"gpu": gpu, "packages": packages}
