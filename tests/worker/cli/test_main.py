"""The `atoll-worker` command: every refusal says what to do, with its own exit code, no traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import atoll
from atoll.errors import AccessDenied, ConnectionFailed, ProtocolMismatch, UsageError
from atoll.federated import Floors
from hostos.command_line import run
from hostos.units import parse_size
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import Authority, Identity, JoinToken, new_token, presented_in, server_credentials
from tests.interrupts import interrupted, own_session
from tests.patience import HUNG_S
from worker.cli import main as cli
from worker.cli import running
from worker.config import WorkerConfig, make_config, remember
from worker.control.calls import answer
from worker.control.enroll import join
from worker.daemon import Daemon
from worker.hosting.contained.sandbox import Sandbox


class Door(rpc.EntryServicer):
    """An entry port that can be of another version or refuse tokens."""

    def __init__(self, authority: Authority | None) -> None:
        self.authority = authority
        self.protocol = PROTOCOL_VERSION
        self.token = ""
        self.enrolled = 0

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        return pb.HelloReply(protocol=self.protocol, version="9.9", time_s=time.time(), work_port=7701)

    def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollReply:
        if self.authority is None:
            return pb.EnrollReply(worker="w-000001", work_port=7701)
        if presented_in(context.invocation_metadata()) != self.token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "join token is not known; ask for a new one")
        self.enrolled += 1
        certificate = self.authority.sign(request.csr_pem, "w-000001")
        return pb.EnrollReply(
            worker="w-000001",
            certificate_pem=certificate,
            ca_pem=self.authority.certificate_pem,
            work_port=7701,
        )


class Entry:
    """A running Door on a loopback port."""

    def __init__(self, folder: Path, *, tls: bool = True) -> None:
        self.authority = Authority.open(folder / "ca") if tls else None
        self.door = Door(self.authority)
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        rpc.add_EntryServicer_to_server(self.door, self.server)
        if self.authority is None:
            self.port = self.server.add_insecure_port("127.0.0.1:0")
        else:
            credentials = server_credentials(self.authority.server_identity(), mutual=False)
            self.port = self.server.add_secure_port("127.0.0.1:0", credentials)
            self.token = new_token(self.authority)
            self.door.token = self.token.presented
        self.server.start()


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    started = Entry(tmp_path / "coordinator")
    yield started
    started.server.stop(None).wait()


def config_for(entry: Entry, folder: Path, token: JoinToken | None = None, **more: Any) -> WorkerConfig:
    return WorkerConfig(
        host="127.0.0.1",
        port=entry.port,
        token=token.encode() if token else "",
        state_dir=folder / "worker",
        connect_timeout_s=0.0,
        **more,
    )


def never(_: float) -> bool:
    return False


# ---------------------------------------------------------------- entering


def test_a_token_is_exchanged_for_an_identity_once(entry: Entry, tmp_path: Path):
    member = join(config_for(entry, tmp_path, entry.token), never)
    assert (member.worker, member.work_address) == ("w-000001", "127.0.0.1:7701")
    assert abs(member.clock_offset_s) < 5.0
    key = tmp_path / "worker" / "identity" / "key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    again = join(config_for(entry, tmp_path), never)
    assert again.worker == "w-000001"
    assert entry.door.enrolled == 1


def test_a_wrong_token_is_refused_and_no_identity_is_left(entry: Entry, tmp_path: Path):
    assert entry.authority is not None
    with pytest.raises(AccessDenied, match="ask for a new one"):
        join(config_for(entry, tmp_path, new_token(entry.authority)), never)
    assert Identity.load(tmp_path / "worker" / "identity") is None


def test_a_token_of_another_coordinator_is_told_from_a_wrong_one(entry: Entry, tmp_path: Path):
    other = Authority.open(tmp_path / "other")
    with pytest.raises(AccessDenied, match="another coordinator runs there"):
        join(config_for(entry, tmp_path, new_token(other)), never)


def test_an_identity_of_another_coordinator_makes_way_for_a_new_token(entry: Entry, tmp_path: Path):
    join(config_for(entry, tmp_path, entry.token), never)
    other = Entry(tmp_path / "second")
    try:
        member = join(config_for(other, tmp_path, other.token), never)
    finally:
        other.server.stop(None).wait()
    assert member.identity is not None
    assert member.identity.ca_pem == other.token.ca_pem


def test_without_token_and_identity_the_command_to_run_is_named(entry: Entry, tmp_path: Path):
    with pytest.raises(AccessDenied, match="--token TOKEN"):
        join(config_for(entry, tmp_path), never)


def test_another_protocol_version_says_which_side_to_update(entry: Entry, tmp_path: Path):
    entry.door.protocol = PROTOCOL_VERSION + 1
    with pytest.raises(ProtocolMismatch, match=f"protocol {PROTOCOL_VERSION + 1}.*update the older"):
        join(config_for(entry, tmp_path, entry.token), never)


def test_nobody_answering_names_the_address(entry: Entry, tmp_path: Path):
    entry.server.stop(None).wait()
    with pytest.raises(ConnectionFailed, match=rf"no coordinator answers at 127\.0\.0\.1:{entry.port}"):
        join(config_for(entry, tmp_path, entry.token), never)


def test_tls_against_a_plain_coordinator_is_explained(tmp_path: Path, entry: Entry):
    plain = Entry(tmp_path / "plain", tls=False)
    try:
        with pytest.raises(AccessDenied, match="--insecure"):
            join(config_for(plain, tmp_path, entry.token), never)
    finally:
        plain.server.stop(None).wait()


def test_insecure_needs_no_token(tmp_path: Path):
    plain = Entry(tmp_path / "plain", tls=False)
    try:
        member = join(config_for(plain, tmp_path, insecure=True), never)
    finally:
        plain.server.stop(None).wait()
    assert member.identity is None
    assert list(member.metadata) == [("atoll-worker", "w-000001")]


# ---------------------------------------------------------------- configuration


def test_a_join_by_a_token_that_names_no_coordinator_reports_that(tmp_path: Path):
    here = {"state_dir": tmp_path}
    with pytest.raises(UsageError, match="no coordinator given and none remembered"):
        make_config(here, {})
    for given, environment in (({"token": "atoll1_abc"}, {}), ({}, {"ATOLL_TOKEN": "atoll1_abc"})):
        with pytest.raises(UsageError, match=r"the token names no coordinator.*give the address too"):
            make_config(here | given, environment)


def test_a_later_join_remembers_everything_but_the_token(tmp_path: Path):
    given = {
        "host": "192.0.2.7", "port": 7700, "token": "secret", "memory_bytes": 4 << 30, "threads": 3,
        "sandbox": "require",
        "advertise": (("203.0.113.5", 9000),), "state_dir": tmp_path,
    }  # fmt: skip
    remember(make_config(given, {}))
    again = make_config({"state_dir": tmp_path}, {})
    assert (again.host, again.memory_bytes, again.threads) == ("192.0.2.7", 4 << 30, 3)
    assert again.sandbox == "require"
    assert again.advertise == (("203.0.113.5", 9000),)
    assert again.token == ""
    assert "secret" not in (tmp_path / "settings.toml").read_text()


def test_a_sandbox_is_wanted_in_one_of_three_ways(tmp_path: Path):
    assert make_config({"host": "h", "state_dir": tmp_path}, {}).sandbox == "auto"
    with pytest.raises(UsageError, match="--sandbox 'on'; give auto, off or require"):
        make_config({"host": "h", "sandbox": "on", "state_dir": tmp_path}, {})


def test_without_the_sandbox_that_is_required_nobody_joins(
    tmp_path: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "worker.hosting.contained.sandbox.probe", lambda device: Sandbox("", why_not="no bubblewrap here")
    )
    config = replace(config_for(entry, tmp_path, entry.token), sandbox="require")
    with pytest.raises(UsageError, match="--sandbox require, but"):
        Daemon(config).run()
    assert entry.door.enrolled == 0


def test_a_worker_that_is_asked_to_leave_while_its_device_starts_ends_without_an_error(
    tmp_path: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
):
    daemon = Daemon(config_for(entry, tmp_path, entry.token))
    monkeypatch.setattr("worker.hosting.host.ComputeHost.start", lambda *_: daemon.leave("Ctrl+C"))
    daemon.run()
    assert entry.door.enrolled == 1


def test_a_join_without_tls_is_asked_for_each_time(tmp_path: Path):
    remember(make_config({"host": "h", "insecure": True, "threads": 3, "state_dir": tmp_path}, {}))
    again = make_config({"state_dir": tmp_path}, {})
    assert (again.host, again.threads, again.insecure) == ("h", 3, False)


def test_what_an_older_version_remembered_of_insecure_is_dropped_with_a_word(
    tmp_path: Path, entry: Entry, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "worker.json"
    file.write_text(json.dumps({"host": "127.0.0.1", "port": entry.port, "threads": 3, "insecure": True}))
    assert run(cli.app, ["join", "--state-dir", str(tmp_path)]) == 6
    shown = capfd.readouterr().err
    assert "was --insecure, which is no longer remembered: this one uses TLS" in shown
    assert "no join token given" in shown
    # A join with a token is no contradiction any more, and forgets the old setting.
    config = make_config({"state_dir": tmp_path, "token": entry.token.encode()}, {})
    assert join(config, never).identity is not None
    remember(config)
    assert not file.exists()
    assert "insecure" not in (tmp_path / "settings.toml").read_text()


def test_floors_that_were_lowered_are_remembered_for_that_coordinator_alone(tmp_path: Path) -> None:
    lowered = {"host": "one.example.org", "min_clients": 1, "min_batch": 2, "state_dir": tmp_path}
    remember(make_config(lowered, {}))
    assert make_config({"state_dir": tmp_path}, {}).floors == Floors(batch=2, clients=1)
    assert make_config({"state_dir": tmp_path, "host": "other.example.org"}, {}).floors == Floors()
    with pytest.raises(UsageError, match="--min-steps = 0"):
        make_config({"host": "h", "min_steps": 0, "state_dir": tmp_path}, {})


def test_the_token_may_come_from_the_environment(tmp_path: Path):
    config = make_config({"host": "h", "state_dir": tmp_path}, {"ATOLL_TOKEN": "s3cret"})
    assert config.token == "s3cret"
    assert "s3cret" not in repr(config)


def test_a_damaged_memory_counts_as_absent(tmp_path: Path):
    (tmp_path / "worker.json").write_text('{"host": 7, "threads": "many"}')
    with pytest.raises(UsageError, match="no coordinator given"):
        make_config({"state_dir": tmp_path}, {})


@pytest.mark.parametrize(
    ("text", "bytes_"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("123", 123)]
)
def test_sizes_are_read_as_people_write_them(text: str, bytes_: int):
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "many", "4 GiB more", "-1"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    "wrong",
    [{"device": "tpu"}, {"threads": -1}, {"memory_bytes": 5}, {"port": 0}, {"max_upload_mbit": float("nan")}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]):
    with pytest.raises(UsageError):
        WorkerConfig(**{"host": "h", **wrong})


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["join"], 2, "no coordinator given"),
        (["join", "h:1", "--memory", "lots"], 2, "4GiB"),
        (["join", "h:1", "--token", "nonsense"], 6, "not a join token"),
        (["join", "h:1", "--device", "tpu"], 2, "auto, cpu, cuda"),
        (["join", "h:1", "--insecure", "--token", "x"], 2, "leave one of them out"),
        (["leave"], 2, "no worker runs"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_usage_has_its_exit_code_and_a_remedy(
    arguments: list[str], code: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    if arguments[0] in ("join", "leave"):
        arguments = [*arguments, "--state-dir", str(tmp_path)]
    assert run(cli.app, arguments) == code
    shown = capfd.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["join", "doctor", "leave", "status"])
def test_help_shows_an_example(command: str, capfd: pytest.CaptureFixture[str]):
    assert run(cli.app, [command, "--help"]) == 0
    assert f"atoll-worker {command}" in capfd.readouterr().out


def test_status_tells_scripts_what_is_joined(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    remember(make_config({"host": "192.0.2.7", "state_dir": tmp_path}, {}))
    assert run(cli.app, ["status", "--json", "--state-dir", str(tmp_path)]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["coordinator"] == "192.0.2.7:7700"
    assert facts["process"] is None


def test_version_is_the_packages(capfd: pytest.CaptureFixture[str]):
    assert run(cli.app, ["version"]) == 0
    assert capfd.readouterr().out.strip() == atoll.__version__


def test_scripts_get_versions_and_the_process_that_was_asked_to_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run(cli.app, ["version", "--json"]) == 0
    versions = {"atoll": atoll.__version__, "protocol": str(PROTOCOL_VERSION)}
    assert json.loads(capfd.readouterr().out) == versions
    monkeypatch.setattr(running, "ask_to_leave", lambda folder: 4711)
    assert run(cli.app, ["leave", "--json", "--state-dir", str(tmp_path)]) == 0
    assert json.loads(capfd.readouterr().out) == {"process": 4711}


def test_two_daemons_may_not_share_a_state_folder(tmp_path: Path):
    with running.only_one(tmp_path):
        assert running.running_process(tmp_path) == os.getpid()
        with pytest.raises(UsageError, match="another worker"), running.only_one(tmp_path):
            pass
    assert running.running_process(tmp_path) is None


@pytest.mark.parametrize("gone", [True, False], ids=["nobody there", "never answers"])
def test_a_worker_that_waits_for_its_coordinator_leaves_at_once(tmp_path: Path, entry: Entry, gone: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HUNG_S)
        command = [
            sys.executable, "-m", "worker.cli", "join", f"127.0.0.1:{listener.getsockname()[1]}", "--token",
            entry.token.encode(), "--state-dir", str(tmp_path / "w"), "--device", "cpu",
        ]  # fmt: skip
        with own_session(command, stderr=subprocess.PIPE, text=True) as process:
            accepted = listener.accept()[0]
            if gone:
                accepted.close()
                listener.close()
            assert interrupted(process) == 0
            _, shown = process.communicate()
            accepted.close()
    assert "Traceback" not in shown


def test_a_call_that_is_not_answered_ends_when_its_caller_stops():
    class Silent:
        cancelled = False

        def result(self, timeout: float) -> None:
            assert timeout <= 1.0
            raise grpc.FutureTimeoutError

        def cancel(self) -> None:
            self.cancelled = True

    looks = iter([False, False, True])
    call = Silent()
    with pytest.raises(ConnectionFailed, match="stopped"):
        answer(call, lambda _: next(looks))
    assert call.cancelled
    assert next(looks, None) is None


def test_commands_that_do_not_join_work_without_torch(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b\n1,2\n3,4\n")
    added = ["data", "add", "t", str(table), "--schema", "x:float32=a|scale:1/2", "--schema", "y:int64=b"]
    known = [["data", "list"], ["data", "show", "t", "--verify"], ["apps", "list"], ["status"]]
    away = ["doctor", "127.0.0.1:1", "--token", "", "--device", "cpu"]
    code = (
        "import json, sys\n"
        "from hostos.command_line import run\n"
        "from worker.cli import main\n"
        "codes = [run(main.app, arguments) for arguments in json.loads(sys.argv[1])]\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] == 'torch']\n"
        "mapped = 'libtorch' in open('/proc/self/maps').read() if sys.platform == 'linux' else False\n"
        "print(json.dumps([codes, loaded, mapped]))"
    )
    commands = [[*words, "--state-dir", str(tmp_path / "state"), "--json"] for words in (added, *known, away)]
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    codes, loaded, mapped = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0, 0, 0, 5], done.stderr
    assert loaded == []
    assert not mapped
    assert '"matmul_gflops"' in done.stdout, "doctor has the device's facts all the same"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_of_a_failure_shows_no_values_of_variables(as_json: bool) -> None:
    program = f"""
import structlog
from worker.cli.main import start_log

def fail(token):
    raise KeyError("a mistake of ours")

start_log({as_json})
try:
    fail("of " + "nobodys business")
except KeyError:
    structlog.get_logger().exception("device.failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "a mistake of ours" in done.stderr
    assert "of nobodys business" not in done.stderr
