import hashlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save
from tenacity import Retrying

from atoll.errors import (
    AccessDenied,
    AtollError,
    BadFrame,
    ConnectionFailed,
    JobFailed,
    PlanError,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from coordinator.client.client import Client, connect
from coordinator.client.endpoint import Endpoint, find_endpoint, remember
from hostos.retries import retrying, stop_after_pauses
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos.credentials import Authority, new_token
from tests.coordinator.client.fake_owner import JOIN_TOKEN, FakeOwnerServer, Script


def _quick() -> Retrying:
    return retrying(stop_after_pauses(5.0), sleep=lambda seconds: None)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[FakeOwnerServer]:
    with FakeOwnerServer(script) as server:
        yield server


@pytest.fixture
def client(server: FakeOwnerServer) -> Iterator[Client]:
    with Client(server.endpoint, attempts=_quick) as client:
        yield client


# ---------------------------------------------------------------- finding the coordinator


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("no.such.host.invalid", False)],
)
def test_a_coordinator_on_this_machine_is_known_by_its_address(host: str, here: bool) -> None:
    assert Endpoint(host, 7700).here == here


def test_serve_is_remembered_for_commands_on_the_same_machine(tmp_path: Path) -> None:
    token = new_token(Authority.open(tmp_path / "ca"))
    (tmp_path / "owner-token").write_text(token.encode() + "\n")
    remember(tmp_path, "0.0.0.0", 7711, insecure=False)  # noqa: S104
    found = find_endpoint(state_dir=tmp_path)
    assert found.address == "127.0.0.1:7711"
    assert found.token == token
    assert token.presented not in repr(found)


def test_an_unknown_coordinator_names_the_missing_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--coordinator HOST:PORT and --token"):
        find_endpoint(state_dir=tmp_path)
    with pytest.raises(UsageError, match="give --token"):
        find_endpoint("lab:7700", state_dir=tmp_path)


def test_a_damaged_note_is_refused(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text('{"host": 3}')
    with pytest.raises(UsageError, match="damaged"):
        find_endpoint(state_dir=tmp_path)


# ---------------------------------------------------------------- failures


def test_an_unreachable_coordinator_is_told_with_its_address() -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:9.*atoll serve"):
        connect("127.0.0.1:9", insecure=True)


def test_another_protocol_version_says_which_side_is_older(script: Script, client: Client) -> None:
    script.protocol = PROTOCOL_VERSION + 1
    with pytest.raises(ProtocolMismatch, match="update this machine's atoll"):
        client.hello()


def test_the_owner_gets_in_over_tls_with_the_right_token_only(tmp_path: Path) -> None:
    script = Script()
    with FakeOwnerServer(script, tmp_path / "one") as server:
        with Client(server.endpoint) as client:
            assert client.status().version == "0.1.0"
        script.secret = "another"
        with Client(server.endpoint) as client, pytest.raises(AccessDenied, match="not the owner's token"):
            client.status()


def test_a_token_of_another_coordinator_is_recognised_by_its_authority(tmp_path: Path) -> None:
    foreign = new_token(Authority.open(tmp_path / "other"))
    with FakeOwnerServer(Script(), tmp_path / "one") as server:
        endpoint = Endpoint("127.0.0.1", server.port, foreign)
        with Client(endpoint) as client, pytest.raises(AccessDenied, match="another coordinator runs there"):
            client.hello()


def test_tls_towards_an_insecure_coordinator_says_so(server: FakeOwnerServer, tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", server.port, new_token(Authority.open(tmp_path)))
    with Client(endpoint) as client, pytest.raises((AccessDenied, ConnectionFailed)):
        client.hello()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, UsageError),
        (grpc.StatusCode.NOT_FOUND, UsageError),
        (grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
        (grpc.StatusCode.FAILED_PRECONDITION, PlanError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, StorageError),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolMismatch),
        (grpc.StatusCode.INTERNAL, AtollError),
    ],
)
def test_every_status_becomes_an_error_of_ours_with_the_servers_words(
    script: Script, client: Client, code: grpc.StatusCode, kind: type[AtollError]
) -> None:
    script.refuse["Status"] = (code, "2 GiB too few on w3")
    with pytest.raises(kind, match="2 GiB too few on w3"):
        client.status()


def test_the_servers_words_cannot_move_the_cursor(script: Script, client: Client) -> None:
    script.refuse["Status"] = (grpc.StatusCode.NOT_FOUND, "no job\x1b[2J\u202e\nat all")
    with pytest.raises(UsageError, match=r"^no job \[2J \nat all$"):
        client.status()


# ---------------------------------------------------------------- jobs


def _weights(script: Script) -> dict[str, torch.Tensor]:
    tensors = {"a.weight": torch.randn(3, 4), "b.count": torch.tensor(7), "half": torch.ones(2).bfloat16()}
    reply = pb.ResultReply(step=12, update=pb.JobUpdate(job="j-1", name="gpt"))
    for name, tensor in tensors.items():
        data = save({"value": tensor, "exp_avg": torch.zeros(1)})
        script.blobs[hashlib.sha256(data).hexdigest()] = data
        reply.tensors.add(name=name, blob=hashlib.sha256(data).hexdigest())
    reply.aliases.add(alias="head.weight", name="a.weight")
    script.result = reply
    return {**tensors, "head.weight": tensors["a.weight"]}


def test_export_writes_every_name_tied_ones_too(script: Script, client: Client, tmp_path: Path) -> None:
    torch.manual_seed(4711)
    expected = _weights(script)
    found = client.export("j-1", tmp_path / "out" / "model.safetensors")
    loaded = load_file(found.path)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert (found.step, found.tensors) == (12, 4)
    assert [path.name for path in found.path.parent.iterdir()] == ["model.safetensors"]


def test_export_refuses_a_checkpoint_with_a_hole(script: Script, client: Client, tmp_path: Path) -> None:
    _weights(script)
    script.result.aliases.add(alias="c", name="nowhere")
    with pytest.raises(StorageError, match=r"1 tensors .* the first is c"):
        client.export("j-1", tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_export_to_a_folder_that_cannot_be_written_is_told(
    script: Script, client: Client, tmp_path: Path
) -> None:
    _weights(script)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="give another -o"):
        client.export("j-1", tmp_path / "file" / "model.safetensors")


def test_watching_goes_on_after_a_restart_and_ends_with_the_job(script: Script, client: Client) -> None:
    script.updates = [pb.JobUpdate(job="j-1", state="running", step=n) for n in range(3)]
    script.updates.append(pb.JobUpdate(job="j-1", state="finished", step=3))
    script.break_after_chunks = 1
    steps = [update.step for update in client.watch("j-1")]
    assert steps == [0, 1, 0, 1, 2, 3]


def test_a_failed_job_raises_with_its_reason_and_what_is_left(script: Script, client: Client) -> None:
    script.updates = [
        pb.JobUpdate(job="j-1", state="failed", step=9, reason="loss is NaN", checkpoint_step=8)
    ]
    with pytest.raises(JobFailed, match="j-1 failed at step 9: loss is NaN; its checkpoint of step 8"):
        client.wait("j-1")


def test_spans_come_in_the_coordinators_time(script: Script, client: Client) -> None:
    spans = pb.Spans(job="j-1", plan_version=2, stage=1)
    spans.spans.add(kind="F", step=3, micro=1, start_s=105.0, end_s=105.5)
    script.chunks = [pb.TraceChunk(worker="w-1", clock_offset_s=-5.0, spans=spans)]
    [span] = client.trace("j-1")
    assert (span.start_s, span.end_s, span.stage, span.plan_version) == (100.0, 100.5, 1, 2)


def test_an_impossible_span_is_refused(script: Script, client: Client) -> None:
    spans = pb.Spans(job="j-1")
    spans.spans.add(kind="F", start_s=2.0, end_s=1.0)
    script.chunks = [pb.TraceChunk(worker="w-1", spans=spans)]
    with pytest.raises(BadFrame, match="w-1 sent a span"):
        client.trace("j-1")


def test_tokens_are_made_listed_and_revoked(client: Client) -> None:
    reply = client.create_token("lab", lifetime_s=60.0, max_uses=2)
    assert reply.token == JOIN_TOKEN
    client.revoke_token(reply.info.id)
    assert [info.revoked for info in client.tokens()] == [True]
    with pytest.raises(UsageError, match="no token t-9"):
        client.revoke_token("t-9")
