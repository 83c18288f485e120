"""What the coordinator says is bounded before it is believed."""

from __future__ import annotations

import pytest

from atoll.errors import BadFrame
from atoll.exchange import Exchange, Receipt
from atoll.messages.from_worker import Goodput
from atoll.messages.to_worker import KeepCopies, PeerLink, RankPeer, StageCopy
from atoll.plan import LinkSpec, Mask
from protos import atoll_control_pb2 as pb
from protos.convert import to_proto
from protos.relay_tickets import TICKET_BYTES
from protos.session import to_coordinator
from worker.compute.reports import step_ready
from worker.links.codec_use import CodecUse
from worker.session import events
from worker.session import wire as messages
from worker.stage.reports import StageReport, StepReport
from worker.transport.contract import Paths, RelayOffer

LINK = LinkSpec(0, 1, "topk", 8.0, Mask.NONE, "the slowest link")


def commit(version: int = 2, first_step: int = 7, link: LinkSpec = LINK, **changes: object) -> pb.ToWorker:
    relink = pb.Relink(plan_version=version, first_step=first_step, links=[to_proto(link)])
    fields: dict[str, object] = {"job": "j", "plan_version": 1, "step": 5, "gradient_scale": 1.0, **changes}
    return pb.ToWorker(commit=pb.StepCommit(relink=relink, **fields))  # type: ignore[arg-type]


def test_a_commit_carries_new_links_and_the_wish_for_a_coded_evaluation() -> None:
    event = messages.event_from(commit(evaluate=True, evaluate_coded=True))
    assert isinstance(event, events.StepCommit)
    assert event.relink is not None
    assert (event.relink.version, event.relink.first_step, event.relink.links) == (2, 7, (LINK,))
    assert event.evaluate_coded


def test_a_welcome_carries_the_term_of_its_coordinator() -> None:
    event = messages.event_from(pb.ToWorker(welcome=pb.Welcome(worker="w", heartbeat_s=0.5, term=7)))
    assert event == events.Welcome("w", 0.5, 0.0, 7)


def test_a_commit_without_new_links_leaves_them_as_they_are() -> None:
    plain = pb.ToWorker(commit=pb.StepCommit(job="j", plan_version=1, step=5, gradient_scale=1.0))
    event = messages.event_from(plain)
    assert isinstance(event, events.StepCommit)
    assert event.relink is None
    assert not event.evaluate_coded


@pytest.mark.parametrize(
    "wrong",
    [
        commit(version=1),
        commit(first_step=6),
        commit(first_step=0),
        commit(first_step=1 << 63),
        commit(link=LinkSpec(0, 1, "topk", 0.5)),
        commit(link=LinkSpec(0, 1, "topk", float("nan"))),
        commit(link=LinkSpec(0, 1, "", 2.0)),
        commit(link=LinkSpec(0, 1, "x" * 5000, 2.0)),
        commit(link=LinkSpec(0, 9999, "topk", 2.0)),
        commit(link=LinkSpec(0, 1, "topk", 2.0, reason="y" * 20_000)),
    ],
)
def test_new_links_beyond_a_bound_are_refused_and_the_job_hears_why(wrong: pb.ToWorker) -> None:
    with pytest.raises(BadFrame) as refused:
        messages.event_from(wrong)
    answer = messages.refusal(wrong, str(refused.value))
    assert (answer.job, answer.version, answer.step) == ("j", 1, 5)


def test_a_steps_report_says_what_the_codecs_did_for_each_peer() -> None:
    report = StepReport(4, StageReport((1.5,), (), True), 0.1, 0.2, 0.0, 0.0)
    goodputs = [Goodput(peer, 10, 0.5, 0.01, quickest_bps=4e6) for peer in ("w-a", "w-b")]
    use = {"w-a": CodecUse(dense_bytes=80, wire_bytes=9, encode_s=0.25, decode_s=0.125)}
    ready = messages.measured(step_ready("j", 1, report, False, use), goodputs, 0.25)
    told = {link.peer: (link.n_bytes, link.dense_bytes, link.encode_s, link.decode_s) for link in ready.links}
    assert told == {"w-a": (10, 80, 0.25, 0.125), "w-b": (10, 0, 0.0, 0.0)}
    assert [link.quickest_bps for link in ready.links] == [4e6, 4e6]
    assert ready.handling_s == 0.25  # of the report's own 0 and the daemon's


def test_digests_travel_with_a_step() -> None:
    report = StepReport(4, StageReport((), (), True, b"gradient"), 0.1, 0.2, 0.0, 0.0, inputs=b"messages")
    ready = to_coordinator(step_ready("j", 1, report, False, {})).ready
    assert (ready.digest.gradients, ready.digest.inputs) == (b"gradient", b"messages")


def test_the_receipt_of_a_round_travels_with_the_digest_of_each_owners_total() -> None:
    receipt = Receipt(3, 0, (0, 2), (0, 2), 1.0, 10, 20, "ab" * 16, totals={0: "01" * 16, 2: "02" * 16})
    report = StepReport(4, StageReport((), (), True), 0.1, 0.2, 0.0, 0.0, receipts={7: receipt})
    found = to_coordinator(step_ready("j", 1, report, False, {})).ready.receipts[0]
    assert (found.round, list(found.included), found.digest) == (3, [0, 2], "ab" * 16)
    assert {total.owner: total.digest for total in found.totals} == {0: b"\1" * 16, 2: b"\2" * 16}


@pytest.mark.parametrize(
    "sent",
    [
        pb.ToWorker(dismiss=pb.Dismiss(reason="go\u202e\x1b[2J")),
        pb.ToWorker(release=pb.Release(job="j", plan_version=1, reason="go\u202e\x1b[2J")),
        pb.ToWorker(discard=pb.StepDiscard(job="j", plan_version=1, step=3, reason="go\u202e\x1b[2J")),
        pb.ToWorker(round_taken=pb.RoundTaken(job="j", round=1, reason="go\u202e\x1b[2J")),
    ],
)
def test_reasons_are_plain_before_they_are_logged(sent: pb.ToWorker) -> None:
    assert getattr(messages.event_from(sent), "reason") == "go  [2J"  # noqa: B009 - of four kinds


def test_a_peer_with_a_name_that_turns_a_line_around_is_refused() -> None:
    with pytest.raises(BadFrame, match=r"worker 'w.u202e' holds control characters"):
        messages.event_from(pb.ToWorker(expect_peer=pb.ExpectPeer(peer=pb.PeerAddress(worker="w\u202e"))))


def test_what_codecs_did_for_a_peer_that_was_not_measured_is_left_out() -> None:
    report = StepReport(4, StageReport((1.5,), (), True), 0.1, 0.2, 0.0, 0.0)
    ready = step_ready("j", 1, report, False, {"w-a": CodecUse(dense_bytes=80)})
    ready = messages.measured(ready, [Goodput("w-b", 10, 0.5, 0.01, quickest_bps=4e6)], 0.0)
    assert [(link.peer, link.dense_bytes) for link in ready.links] == [("w-b", 0)]


# ---------------------------------------------------------------- reconfigurations and replays

ADDRESS = pb.PeerAddress(worker="w-b", addresses=[pb.Address(host="10.0.0.2", port=7000)])


def moved(**changes: object) -> pb.ToWorker:
    fields = {"job": "j", "plan_version": 3, "base_version": 1, "step": 7, **changes}
    peers = fields.pop("peers", [pb.RankPeer(rank=1, peer=ADDRESS, dial=True)])
    return pb.ToWorker(reconfigure=pb.Reconfigure(peers=peers, **fields))  # type: ignore[arg-type]


def test_a_reconfiguration_carries_its_message_and_the_new_neighbours() -> None:
    sent = moved()
    peers = (RankPeer(1, PeerLink("w-b", Paths((("10.0.0.2", 7000),), dial=True))),)
    event = messages.event_from(sent)
    assert event == events.Reconfigure("j", 3, 1, 7, peers, sent.reconfigure)
    assert event.message is sent.reconfigure  # left out of comparisons


@pytest.mark.parametrize(
    "wrong",
    [
        moved(job=""),
        moved(plan_version=1),
        moved(step=1 << 63),
        moved(peers=[pb.RankPeer(peer=pb.PeerAddress(worker="w\u202e"))]),
    ],
)
def test_a_reconfiguration_beyond_a_bound_is_refused_and_the_job_hears_why(wrong: pb.ToWorker) -> None:
    with pytest.raises(BadFrame) as refused:
        messages.event_from(wrong)
    assert "reconfigure" in messages.ANSWERED
    answer, sent = messages.refusal(wrong, str(refused.value)), wrong.reconfigure
    assert (answer.job, answer.version, answer.step) == (sent.job, sent.plan_version, sent.step)  # type: ignore[union-attr]


def replayed(**changes: object) -> pb.ToWorker:
    eras = [pb.PlanEra(plan_version=1, first_step=0), pb.PlanEra(plan_version=2, first_step=6)]
    fields = {"first_step": 5, "eras": eras, "gradient_scales": [1.0, 0.5], "stores": [6], **changes}
    assign = pb.Assign(job="j", plan_version=3, first_step=7, replay=pb.Replay(**fields))  # type: ignore[arg-type]
    return pb.ToWorker(assign=assign)


def test_an_assignment_says_which_versions_the_repeated_steps_had() -> None:
    event = messages.event_from(replayed())
    assert isinstance(event, events.Assign)
    assert event.eras == ((0, 1), (6, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        replayed(first_step=7),
        replayed(gradient_scales=[1.0]),
        replayed(gradient_scales=[1.0, float("nan")]),
        replayed(gradient_scales=[1.0, -1.0]),
        replayed(first_step=0, gradient_scales=[1.0] * 8),
        replayed(stores=[5]),
        replayed(stores=[8]),
        replayed(eras=[]),
        replayed(eras=[pb.PlanEra(plan_version=1, first_step=6)]),
        replayed(eras=[pb.PlanEra(plan_version=3, first_step=0)]),
        replayed(eras=[pb.PlanEra(plan_version=1), pb.PlanEra(plan_version=2, first_step=7)]),
        replayed(eras=[pb.PlanEra(plan_version=2), pb.PlanEra(plan_version=1, first_step=6)]),
        replayed(eras=[pb.PlanEra(plan_version=1), pb.PlanEra(plan_version=2)]),
        replayed(eras=[pb.PlanEra(plan_version=1, links=[to_proto(LinkSpec(0, 1, "topk", 0.5))])]),
    ],
)
def test_a_replay_beyond_a_bound_is_refused(wrong: pb.ToWorker) -> None:
    with pytest.raises(BadFrame):
        messages.event_from(wrong)


def heard(*steps: tuple[int, bool, int], standby: bool = False, **changes: object) -> pb.ToWorker:
    """A peer's own steps and rounds that its stage repeats: step, whether it is its own, version."""
    commits = [
        pb.StepCommit(job="j", plan_version=version, step=step, gradient_scale=1.0, own=own)
        for step, own, version in steps
    ]
    assign = pb.Assign(job="j", plan_version=3, first_step=8, joining=True)
    assign.plan.exchange.CopyFrom(to_proto(Exchange("diloco", every=3)))
    assign.program.n_stages, assign.training.steps = 2, 20
    assign.replay.CopyFrom(pb.Replay(first_step=5, standby=standby, commits=commits, **changes))  # type: ignore[arg-type]
    return pb.ToWorker(assign=assign)


OWN = ((5, True, 1), (5, False, 1), (6, True, 1), (7, True, 2), (8, True, 2))


def test_a_peers_own_steps_and_rounds_are_repeated_in_their_order() -> None:
    """A round has the number of the last step before it, and a version may begin with one."""
    event = messages.event_from(heard(*OWN))
    assert isinstance(event, events.Assign)
    assert event.joining
    assert event.eras == ((5, 1), (7, 2))
    event = messages.event_from(heard((5, True, 1), (5, False, 2), (6, True, 2), (7, True, 2), (8, True, 2)))
    assert isinstance(event, events.Assign)
    assert event.eras == ((5, 1), (6, 2))
    assert isinstance(messages.event_from(heard(standby=True)), events.Assign)
    early = ((5, True, 1), (8, False, 1))  # of a peer that was late
    assert isinstance(messages.event_from(heard(*early)), events.Assign)


@pytest.mark.parametrize(
    "wrong",
    [
        heard(),
        heard((4, True, 1)),
        heard((9, True, 1)),
        heard((5, True, 1), (5, True, 1)),
        heard((5, False, 1), (5, False, 1)),
        heard((6, True, 1), (5, False, 1)),
        heard((5, True, 2), (6, True, 1)),
        heard((5, True, 3)),
        heard(*OWN, gradient_scales=[1.0]),
        heard(*OWN, eras=[pb.PlanEra(plan_version=1)]),
    ],
)
def test_own_steps_out_of_order_are_refused(wrong: pb.ToWorker) -> None:
    with pytest.raises(BadFrame):
        messages.event_from(wrong)


def kept(**changes: object) -> pb.ToWorker:
    fields = {"job": "j", "name": "j.3.0-5", "blobs": [pb.BlobRef(hash="ab" * 32, size=10)], **changes}
    return pb.ToWorker(keep_copies=pb.KeepCopies(copies=[pb.StageCopy(**fields)]))  # type: ignore[arg-type]


def test_copies_to_keep_are_named_and_bounded() -> None:
    asked = messages.event_from(kept())
    assert asked == KeepCopies((StageCopy("j", "j.3.0-5", {"ab" * 32: 10}),))
    for wrong in (kept(name=""), kept(job=""), kept(blobs=[pb.BlobRef(hash="../x", size=1)])):
        with pytest.raises(BadFrame):
            messages.event_from(wrong)


def test_who_computes_is_not_told_who_keeps_copies() -> None:
    holder = pb.ExpectPeer(
        peer=pb.PeerAddress(worker="w-2", addresses=[pb.Address(host="h", port=7)]), dial=True
    )
    message = replayed()
    message.assign.holders.append(holder)
    event = messages.event_from(message)
    assert isinstance(event, events.Assign)
    (found,) = event.holders
    assert (found.worker, found.paths.addresses, found.paths.dial) == ("w-2", (("h", 7),), True)
    assert not event.message.holders


def test_a_commit_says_from_where_on_messages_may_be_wanted_and_never_of_steps_to_come() -> None:
    plain = pb.StepCommit(job="j", plan_version=1, step=5, gradient_scale=1.0, replay_from=6)
    assert getattr(messages.event_from(pb.ToWorker(commit=plain)), "replay_from") == 6  # noqa: B009
    plain.replay_from = 7
    with pytest.raises(BadFrame):
        messages.event_from(pb.ToWorker(commit=plain))


# ---------------------------------------------------------------- relays


def relay(**changes: object) -> pb.RelayWay:
    fields: dict[str, object] = {
        "addresses": [pb.Address(port=7702), pb.Address(host="192.0.2.1", port=7702)],
        "ticket": bytes(TICKET_BYTES),
        "key": bytes(32),
        "dial": True,
        "after_s": 2.5,
        "lasts_s": 600.0,
        **changes,
    }
    return pb.RelayWay(**fields)  # type: ignore[arg-type]


def test_the_way_by_relays_reaches_the_daemon_and_its_key_no_further() -> None:
    offer = RelayOffer((("", 7702), ("192.0.2.1", 7702)), bytes(TICKET_BYTES), bytes(32), True, 2.5, 600.0)
    peer = pb.PeerAddress(worker="w-b", addresses=[pb.Address(host="192.0.2.2", port=1)], relay=relay())
    expected = messages.event_from(pb.ToWorker(expect_peer=pb.ExpectPeer(peer=peer, dial=True)))
    assert expected == PeerLink("w-b", Paths((("192.0.2.2", 1),), True, offer))
    assign = pb.Assign(job="j", plan_version=1, peers=[pb.RankPeer(rank=1, peer=peer)])
    assigned = messages.event_from(pb.ToWorker(assign=assign))
    assert isinstance(assigned, events.Assign)
    assert assigned.peers[0].link.paths.relay == offer
    assert not assigned.message.peers[0].peer.HasField("relay"), "what computes is given no key"


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": b"short"},
        {"key": b""},
        {"addresses": [pb.Address(host="unix:/etc/x", port=1)]},
        {"addresses": [pb.Address(port=0)]},
        {"addresses": [pb.Address(port=1)] * 17},
        {"after_s": -1.0},
        {"lasts_s": float("nan")},
    ],
)
def test_a_way_by_relays_out_of_bounds_is_refused(wrong: dict[str, object]) -> None:
    peer = pb.PeerAddress(worker="w-b", relay=relay(**wrong))
    with pytest.raises(BadFrame):
        messages.event_from(pb.ToWorker(expect_peer=pb.ExpectPeer(peer=peer)))
