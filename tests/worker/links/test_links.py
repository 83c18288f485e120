"""Links: tensors arrive once, as declared, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from atoll.errors import StorageError
from atoll.opdag import TensorMeta
from compressors.base import Packet
from tests.patience import HUNG_S
from tests.worker.links.hub import Hub, Port
from worker.links.codecs import StageCodecs
from worker.links.links import Links, LinksAborted
from worker.transport.contract import PeerLost
from worker.transport.frames import NOT_HERE, Direction, MessageKey

META = TensorMeta((2, 3), "float32")
TENSOR = torch.arange(6, dtype=torch.float32).reshape(2, 3)


@dataclass(frozen=True)
class Coming:
    key: MessageKey
    peer: str = "w-a"
    meta: TensorMeta = META


def pair() -> tuple[Port, Links, Port, Links]:
    hub = Hub()
    a, b = hub.port("w-a"), hub.port("w-b")
    return a, Links(a, "job", 3), b, Links(b, "job", 3)


def key(
    step: int = 0, micro: int = 0, edge: int = 7, direction: Direction = Direction.FORWARD, version: int = 3
) -> MessageKey:
    return MessageKey("job", version, step, micro, edge, direction)


def waits(run: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that runs ``run`` and keeps what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            run()
        except (PeerLost, LinksAborted) as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (3, 4, 2)])
def test_a_tensor_arrives_bit_equal(dtype: str, shape: tuple[int, ...]) -> None:
    _, sender, _, receiver = pair()
    meta = TensorMeta(shape, dtype)
    tensor = torch.arange(meta.elements).reshape(shape).to(getattr(torch, dtype))
    receiver.expect([Coming(key(), meta=meta)])
    sender.send("w-b", key(), tensor)
    got = receiver.receive(key(), 1)
    assert got is not None
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)


def test_a_zero_gradient_arrives_as_none_and_carries_no_payload() -> None:
    _, sender, _, receiver = pair()
    mark = key(direction=Direction.BACKWARD)
    receiver.expect([Coming(mark)])
    sender.send("w-b", mark, None)
    assert receiver.receive(mark, 1) is None


def test_the_received_tensor_shares_the_assembly_buffer() -> None:
    _, _, _, receiver = pair()
    receiver.expect([Coming(key())])
    buffer = receiver.expect_buffer("w-a", key(), 24)
    assert buffer is not None
    buffer[:] = TENSOR.numpy().tobytes()
    receiver.deliver("w-a", key(), Packet("none", META).header, buffer)
    got = receiver.receive(key(), 1)
    buffer[:4] = b"\0\0\x80\x3f"
    assert got is not None
    assert got[0, 0] == 1.0


def test_a_duplicate_is_dropped_while_the_first_is_unread() -> None:
    _, sender, _, receiver = pair()
    receiver.expect([Coming(key())])
    sender.send("w-b", key(), TENSOR)
    sender.send("w-b", key(), TENSOR + 1)
    got = receiver.receive(key(), 1)
    assert got is not None
    assert torch.equal(got, TENSOR)
    with pytest.raises(TimeoutError):
        receiver.receive(key(), 0)


def test_a_step_that_is_run_again_is_served_again() -> None:
    _, sender, _, receiver = pair()
    receiver.expect([Coming(key())])
    for _ in range(2):
        sender.send("w-b", key(), TENSOR)
        assert receiver.receive(key(), 1) is not None


def test_after_the_step_its_messages_are_late() -> None:
    _, sender, _, receiver = pair()
    receiver.expect([Coming(key()), Coming(key(step=1))])
    receiver.step_done(0)
    sender.send("w-b", key(), TENSOR)
    sender.send("w-b", key(step=1), TENSOR)
    assert receiver.receive(key(step=1), 1) is not None
    receiver.expect([Coming(key())])
    with pytest.raises(KeyError):
        receiver.receive(key(), 0)


def test_a_packet_of_another_shape_is_its_senders_fault() -> None:
    _, sender, _, receiver = pair()
    receiver.expect([Coming(key())])
    sender.send("w-b", key(), TENSOR.T)
    with pytest.raises(PeerLost, match="the plan says") as lost:
        receiver.receive(key(), 1)
    assert lost.value.peer == "w-a"


@pytest.mark.parametrize("header", [b"", b"\x01", b"\xff" * 40])
def test_a_damaged_packet_header_is_its_senders_fault(header: bytes) -> None:
    _, _, _, receiver = pair()
    receiver.expect([Coming(key())])
    buffer = receiver.expect_buffer("w-a", key(), 24)
    assert buffer is not None
    receiver.deliver("w-a", key(), header, buffer)
    with pytest.raises(PeerLost, match="packet header") as lost:
        receiver.receive(key(), 1)
    assert lost.value.peer == "w-a"


def test_a_payload_that_its_codec_cannot_decode_is_its_senders_fault() -> None:
    _, _, _, receiver = pair()
    receiver.expect([Coming(key())])
    buffer = receiver.expect_buffer("w-a", key(), 20)
    assert buffer is not None
    receiver.deliver("w-a", key(), Packet("none", META).header, buffer)
    with pytest.raises(PeerLost, match="20 bytes") as lost:
        receiver.receive(key(), 1)
    assert lost.value.peer == "w-a"


def test_a_fault_of_the_readers_own_decoding_names_nobody() -> None:
    class Lost(StageCodecs):
        def decode(self, peer: str, key: MessageKey, packet: Packet) -> torch.Tensor | None:
            raise KeyError("the positions that the value had")

    hub = Hub()
    sender, receiver = Links(hub.port("w-a"), "job", 3), Links(hub.port("w-b"), "job", 3, Lost())
    receiver.expect([Coming(key())])
    sender.send("w-b", key(), TENSOR)
    with pytest.raises(KeyError, match="positions"):
        receiver.receive(key(), 1)


def test_a_waiting_reader_wakes_when_the_sender_is_lost() -> None:
    _, _, _, receiver = pair()
    receiver.expect([Coming(key())])
    thread, raised = waits(lambda: receiver.receive(key(), 60))
    receiver.lost("w-other", "does not matter")
    receiver.lost("w-a", "silent for 1.6 s")
    thread.join(HUNG_S)
    assert isinstance(raised[0], PeerLost)
    assert (raised[0].peer, raised[0].reason) == ("w-a", "silent for 1.6 s")


def test_what_arrived_before_the_sender_was_lost_is_still_read() -> None:
    _, sender, _, receiver = pair()
    receiver.expect([Coming(key())])
    sender.send("w-b", key(), TENSOR)
    receiver.lost("w-a", "left")
    assert receiver.receive(key(), 1) is not None


def test_abort_ends_a_wait_for_a_tensor_and_for_a_full_queue() -> None:
    wire, sender, _, receiver = pair()
    receiver.expect([Coming(key())])
    wire.full = True
    waiting = [
        (links, waits(run))
        for links, run in (
            (receiver, lambda: receiver.receive(key(), 60)),
            (sender, lambda: sender.send("w-b", key(), TENSOR)),
        )
    ]
    for links, (thread, raised) in waiting:
        links.abort("released")
        thread.join(HUNG_S)
        assert isinstance(raised[0], LinksAborted)


def test_who_is_lost_can_be_sent_nothing_until_the_plan_is_reconfigured() -> None:
    _, sender, _, receiver = pair()
    sender.lost("w-b", "killed")
    with pytest.raises(PeerLost):
        sender.send("w-b", key(1), TENSOR)
    sender.abort("the plan is reconfigured")
    late, again = key(1), key(1, version=4)
    receiver.expect([Coming(late)])
    for links in (sender, receiver):
        links.reconfigure(4, 1, StageCodecs())
    receiver.expect([Coming(again)])
    assert receiver.expect_buffer("w-a", late, 24) is None
    sender.send("w-b", again, TENSOR)
    got = receiver.receive(again, 1)
    assert got is not None
    assert torch.equal(got, TENSOR)
    receiver.expect([Coming(key(0, version=4))])  # over: not taken
    assert receiver.expect_buffer("w-a", key(0, version=4), 24) is None
    with pytest.raises(ValueError, match="version 4 after 4"):
        receiver.reconfigure(4, 2, StageCodecs())


def test_what_is_sent_in_repeated_steps_is_recorded_alone() -> None:
    recorded: list[MessageKey] = []
    hub = Hub()
    hub.port("w-b")
    links = Links(
        hub.port("w-a"), "job", 3, record=lambda peer, key, *_: recorded.append(key), sends_from=(2, False)
    )
    for step in range(4):
        links.send("w-b", key(step), TENSOR)
    assert recorded == [key(0), key(1)]
    assert hub.port("w-a").sent == [key(2), key(3)]


def test_a_step_that_cannot_be_repeated_ends_every_wait_with_the_peers_words() -> None:
    _, _, _, receiver = pair()
    refusal = key(1, micro=NOT_HERE, direction=Direction.REPLAY)
    receiver.expect([Coming(key(1)), Coming(refusal)])
    receiver.deliver("w-a", refusal, b"step 1 is not\x1b[2J here", memoryview(b""))
    with pytest.raises(StorageError, match=r"w-a: step 1 is not.*here") as raised:
        receiver.receive(key(1), 1)
    assert "\x1b" not in str(raised.value)


def test_closing_an_old_plan_version_leaves_the_new_one_in_place() -> None:
    _, _, wire, old = pair()
    new = Links(wire, "job", 4)
    old.close()
    assert list(wire.receivers) == ["job"]
    assert wire.forgotten == [("job", 3)]
    new.close()
    assert not wire.receivers


def test_expecting_another_plans_message_is_our_own_mistake() -> None:
    _, _, _, receiver = pair()
    with pytest.raises(ValueError, match="version 3"):
        receiver.expect([Coming(key(version=4))])


def test_from_its_step_on_a_new_version_is_taken_and_the_old_one_is_stale() -> None:
    _, sender, _, receiver = pair()
    old, new = key(1), key(2, version=4)
    for links in (sender, receiver):
        links.relink(4, 2, StageCodecs())
    receiver.expect([Coming(old), Coming(new)])
    sender.send("w-b", old, TENSOR)
    sender.send("w-b", new, TENSOR + 1)
    assert receiver.receive(old, 1) is not None
    receiver.step_done(0)
    assert receiver.expect_buffer("w-a", key(1), 24) is not None
    receiver.step_done(1)
    assert receiver.expect_buffer("w-a", key(1), 24) is None
    got = receiver.receive(new, 1)
    assert got is not None
    assert torch.equal(got, TENSOR + 1)


def test_versions_only_rise() -> None:
    _, _, _, receiver = pair()
    with pytest.raises(ValueError, match="version 3 after 3"):
        receiver.relink(3, 2, StageCodecs())


def test_closing_forgets_every_version_that_was_taken() -> None:
    _, _, wire, links = pair()
    links.relink(5, 2, StageCodecs())
    links.close()
    assert wire.forgotten == [("job", 5)]
