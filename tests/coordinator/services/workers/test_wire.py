"""What workers say is bounded, and plain on a screen, before anybody reads it."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import BadFrame
from coordinator.messages import events as ev
from coordinator.services.workers.wire import introduction_from, message_from
from protos import atoll_control_pb2 as pb

HASH = "ab" * 32
ODD = "w\u202e\u2066\u2028\x1b[1m"


def test_an_introduction_cannot_turn_a_line_around_or_break_it() -> None:
    told = introduction_from(pb.Introduction(name=ODD, site=ODD, device=pb.DeviceFacts(kind=ODD, model=ODD)))
    assert (told.name, told.site) == ("w    [1m", "w    [1m")
    assert (told.kind, told.model) == ("w    [1m", "w    [1m")


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (
            {"update_ready": pb.UpdateReady(job="j", update=pb.BlobRef(hash=HASH), metrics={ODD: 1.0})},
            "name in",
        ),
        ({"ready": pb.StepReady(job="j", links=[pb.LinkGoodput(peer=ODD)])}, "peer"),
        ({"failed": pb.StageFailed(job="j", lost_peer=ODD)}, "lost_peer"),
        ({"link_probed": pb.LinkProbed(peer=ODD)}, "peer"),
        ({"peer_joined": pb.PeerJoined(peer=ODD, way="direct")}, "peer"),
    ],
)
def test_a_name_that_is_not_plain_is_refused(sent: dict[str, Any], what: str) -> None:
    with pytest.raises(BadFrame, match=rf"{what}.* holds control characters"):
        message_from(pb.FromWorker(**sent))


def test_digests_are_eight_bytes_or_none() -> None:
    digest = pb.StepDigest(gradients=bytes(range(8)))
    ready = message_from(pb.FromWorker(ready=pb.StepReady(job="j", digest=digest)))
    assert isinstance(ready, ev.StepReady)
    assert ready.digest == ev.Digest("0001020304050607", "")
    loaded = message_from(pb.FromWorker(loaded=pb.Loaded(job="j", repeated_digests=[digest] * 3)))
    assert isinstance(loaded, ev.Loaded)
    assert loaded.digests == (ready.digest,) * 3


@pytest.mark.parametrize("length", [1, 7, 9, 4096])
@pytest.mark.parametrize("field", ["gradients", "inputs"])
def test_a_digest_of_another_length_is_refused(field: str, length: int) -> None:
    digest = pb.StepDigest(**{field: bytes(length)})
    for sent in (
        {"ready": pb.StepReady(job="j", digest=digest)},
        {"loaded": pb.Loaded(job="j", repeated_digests=[digest])},
    ):
        with pytest.raises(BadFrame, match=f"Digest.{field} of {length} bytes"):
            message_from(pb.FromWorker(**sent))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_the_digest_of_a_total_has_sixteen_bytes(length: int) -> None:
    def said(size: int) -> pb.FromWorker:
        totals = [pb.OwnedTotal(owner=2, digest=bytes(range(size)))]
        return pb.FromWorker(ready=pb.StepReady(job="j", receipts=[pb.ExchangeReceipt(totals=totals)]))

    ready = message_from(said(16))
    assert isinstance(ready, ev.StepReady)
    assert ready.receipts[0].totals == {2: bytes(range(16)).hex()}
    with pytest.raises(BadFrame, match=f"RoundReceipt.totals of {length} bytes"):
        message_from(said(length))


def test_digests_of_more_steps_than_anybody_repeats_are_refused() -> None:
    many = pb.Loaded(job="j", repeated_digests=[pb.StepDigest()] * 8193)
    with pytest.raises(BadFrame, match=r"Loaded\.digests: 8193 entries"):
        message_from(pb.FromWorker(loaded=many))


def test_a_stage_that_lost_nobody_names_nobody() -> None:
    found = message_from(pb.FromWorker(failed=pb.StageFailed(job="j", reason="why\x07")))
    assert isinstance(found, ev.StageFailed)
    assert (found.reason, found.lost_peer) == ("why ", "")


def test_what_a_worker_holds_is_in_its_introduction() -> None:
    stage = pb.HeldStage(job="j", plan_version=3, step=12, loaded=True, ready=True)
    device = pb.DeviceFacts(kind="cpu")
    assert introduction_from(pb.Introduction(name="w", device=device, held=stage)).held == ev.Held(
        "j", 3, 12, True, True
    )
    assert introduction_from(pb.Introduction(name="w", device=device)).held is None
    with pytest.raises(BadFrame, match="job"):
        introduction_from(pb.Introduction(name="w", device=device, held=pb.HeldStage(job=ODD)))


def test_copies_that_a_worker_keeps_are_in_its_introduction_and_bounded() -> None:
    copy = pb.CopyHeld(job="j", name="j.3\x07", bytes=10, fetched_bytes=4, took_s=0.5)
    device = pb.DeviceFacts(kind="cpu")
    told = introduction_from(pb.Introduction(name="w", device=device, copies=[copy], copy_bytes=99))
    assert told.copies == (ev.CopyHeld("j", "j.3 ", 10, 4, 0.5),)
    assert told.copy_bytes == 99
    assert message_from(pb.FromWorker(copy_held=copy)) == told.copies[0]
    for wrong in (
        pb.CopyHeld(job=ODD),
        pb.CopyHeld(job="j", took_s=-1.0),
        pb.CopyHeld(job="j", bytes=1 << 60),
    ):
        with pytest.raises(BadFrame):
            message_from(pb.FromWorker(copy_held=wrong))


def test_a_guests_limits_are_bounded_and_none_of_them_is_unlimited() -> None:
    device = pb.DeviceFacts(kind="cpu")
    told = introduction_from(pb.Introduction(name="w", device=device))
    assert told.guest == ev.UNLIMITED
    limits = pb.GuestLimits(compute_share=0.5, upload_bps=1e6, paused="x" * 1000, apps_only=True)
    found = message_from(pb.FromWorker(heartbeat=pb.Heartbeat(guest=limits)))
    assert isinstance(found, ev.Heartbeat)
    assert (found.guest.compute_share, found.guest.upload_bps) == (0.5, 1e6)
    assert found.guest.download_bps == float("inf")
    assert len(found.guest.paused) <= 300
    assert found.guest.apps_only
    for wrong in (
        {"compute_share": 0.0},
        {"compute_share": float("nan")},
        {"compute_share": 1.0, "upload_bps": -1.0},
        {"compute_share": 1.0, "memory_limit_bytes": 5},
    ):
        with pytest.raises(BadFrame):
            message_from(pb.FromWorker(heartbeat=pb.Heartbeat(guest=pb.GuestLimits(**wrong))))


def test_how_a_peer_is_joined_is_one_of_three_words_or_none() -> None:
    for way in ("direct", "reversed", "relayed", ""):
        found = message_from(pb.FromWorker(peer_joined=pb.PeerJoined(peer="w", way=way, relay="r:1")))
        assert found == ev.PeerJoined("w", way, "r:1")
    with pytest.raises(BadFrame, match="joined 'by pigeon'"):
        message_from(pb.FromWorker(peer_joined=pb.PeerJoined(peer="w", way="by pigeon")))
