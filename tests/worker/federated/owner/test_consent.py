"""What the daemon makes of an invitation: terms, words for the owner, a log of what left, clipping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import BadFrame, StorageError, UsageError
from atoll.federated import Federated
from atoll.secure import Secure
from protos import atoll_control_pb2 as pb
from protos.session import said_to_worker
from strategies import counted
from strategies.clipping import Clipping
from strategies.own.captured import with_own
from tests.strategies.own.tutorial import tutorial
from tests.worker.federated.test_participation import KEY, TRAINING, Server, context, order, same
from worker.blobs import BlobFile
from worker.cancel import Cancel
from worker.data.consent import ConsentStore
from worker.data.departures import MESSAGE, UPDATE, UPDATE_BEGINS, read_departures
from worker.data.policy import OPEN, Policy
from worker.data.registry import add_dataset, set_policy
from worker.federated.owner.consent import Consent
from worker.federated.owner.terms import Asked, graph_hash
from worker.federated.participation import Participation

FILE = BlobFile(Path("update"), "ab" * 32, 500)


def invitation(folder: Path, job: str = "job-1", rule: str = "fedavg", **options: Any) -> pb.Participate:
    """What a coordinator sends for the job of ``Server``."""
    joining = Server(folder / "server", rule, **options).joining()
    m = said_to_worker(replace(joining, job=job, version=1, training=TRAINING, owner="research")).participate
    assert m.HasField("eval_program")
    return m


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    table = tmp_path / "t.csv"
    table.write_text("x,y\n" + "1,0\n2,1\n" * 30)
    add_dataset(tmp_path / "state", "mine", table, ["image:float32=x", "label:int64=y"])
    return tmp_path / "state"


def test_an_invitation_waits_until_its_owner_accepts_it_or_its_graph(state_dir: Path, tmp_path: Path) -> None:
    consent, m = Consent(state_dir), invitation(tmp_path)
    answer = consent.judge(m)
    assert answer is not None
    assert (answer.job, answer.word, answer.graph) == ("job-1", "awaited", graph_hash(m))
    set_policy(state_dir, "mine", Policy((f"graph:{answer.graph}",)))
    assert [said.word for said in consent.changed()] == ["given"]
    assert consent.judge(m) is None
    assert consent.judge(invitation(tmp_path, "job-2", local_epochs=3)) is None, "the graph is the same"


def test_a_graph_is_another_with_other_ops_shapes_or_constants(tmp_path: Path) -> None:
    m = invitation(tmp_path)
    found = {graph_hash(m)}
    for change in ("op", "shape", "metric", "constant"):
        other = pb.Participate()
        other.CopyFrom(m)
        if change == "op":
            other.program.ops[0].node.target += "_"
        elif change == "shape":
            other.metas[0].meta.shape[0] += 1
        elif change == "metric":
            other.eval_program.metrics.add(name="rows", op=1)
        else:
            other.program.constants.append(other.tensors[0].name)
            other.tensors[0].blob = "ff" * 32
        found.add(graph_hash(other))
    assert len(found) == 5
    renamed = pb.Participate()
    renamed.CopyFrom(m)
    renamed.job = "job-7"
    assert graph_hash(renamed) in found


def test_the_words_name_all_that_leaves(tmp_path: Path) -> None:
    shown = dict(Asked(invitation(tmp_path, rule="scaffold", uplink="topk:8", min_clients=3)).facts(60))
    assert shown["submitted by"] == "research"
    assert "with the strategy's own (control)" in shown["each round"]
    assert shown["numbers"].startswith("samples and steps trained, mean loss, mean squared loss")
    assert shown["evaluation"] == (
        "each round the means of loss over the 6 samples that are held out of training"
    )
    assert shown["rounds"] == "10, each with all that hold the data"
    assert shown["summed with"] == "at least 2 other updates, by the coordinator"
    assert shown["coding"].startswith("topk:8, what is dropped is added to the next")


def test_the_words_name_what_masks_hide_and_what_they_do_not(tmp_path: Path) -> None:
    shown = dict(Asked(invitation(tmp_path, evaluate_every=0, secure=Secure())).facts(60))
    assert "66% of a round and more than half" in shown["secure aggregation"]
    assert shown["secure aggregation"].endswith("It certifies the members, and could make some up")
    assert shown["numbers"] == "samples and steps trained, times; no loss"
    assert shown["summed with"] == "other members' updates, before the coordinator can read any of them"
    assert shown["coding"] == "none: the update travels as masked whole numbers"
    assert "secure aggregation" not in dict(Asked(invitation(tmp_path)).facts(60))


def test_what_a_round_returns_beside_the_update_is_counted_in_words_and_refused_beyond_the_policy(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = invitation(tmp_path)
    shown = dict(Asked(m).facts(60))
    assert shown["statistics"].startswith("32 numbers a round beside the update, exact sums or means over 8")
    assert shown["statistics"].endswith(
        "samples of 65 values; as many as samples have values give them back, and 32 need no word of yours"
    )
    assert shown["buffers"] == "2 travel: norm.running_mean, norm.running_var"
    assert shown["in all"] == "about 350 numbers beside 10 updates, of data of 3,900 values"
    monkeypatch.setattr(counted, "SHARE", 3)
    set_policy(state_dir, "mine", OPEN)
    consent = Consent(state_dir)
    answer = consent.judge(m)
    assert answer is not None
    assert answer.word == "refused"
    assert "return 32 exact sums or means" in answer.reason
    assert "--allow-statistics 32" in answer.reason
    set_policy(state_dir, "mine", Policy(("any",), statistics=32))
    assert [said.word for said in consent.changed()] == ["given"]
    assert consent.joining(m).statistics == 32
    set_policy(state_dir, "mine", Policy(("any",), clip=1.0, noise=1.0))
    assert [said.word for said in consent.changed()] == ["given"], "noise lies on every one of them"


def test_what_stays_at_home_is_not_shown_as_leaving(tmp_path: Path) -> None:
    m = invitation(tmp_path, local=("*running*", "head.*"))
    shown = dict(Asked(m).facts(60))
    assert (shown["buffers"], shown["statistics"]) == ("none travel", "none beside the update")


def own_invitation(folder: Path, **options: Any) -> pb.Participate:
    tutorial()
    own = with_own(Federated("controls", options)).own
    return invitation(folder, rule="controls", own=own, options=options)


def test_a_strategy_that_is_its_owner_s_own_is_shown_by_its_formulas_and_is_a_part_of_the_graph(
    tmp_path: Path,
) -> None:
    m = own_invitation(tmp_path)
    asked = Asked(m)
    shown = dict(asked.facts(60))
    assert shown["strategy"] == (
        "controls: the job owner's own, by formulas: Control variates against the drift of clients"
    )
    assert shown["formulas"].startswith("each step new gradient = gradient + (c - c_i). after each round")
    assert "with the strategy's own (change)" in shown["each round"]
    assert "sends or keeps more" in asked.terms(60).unclippable
    ours = invitation(tmp_path, rule="scaffold")
    assert len({graph_hash(m), graph_hash(ours), graph_hash(own_invitation(tmp_path, server_lr=0.5))}) == 3


@pytest.mark.parametrize("forged", ["op", "name", "array", "many", "result", "value"])
def test_a_forged_strategy_is_refused_before_anything_is_asked_of_the_owner(
    state_dir: Path, tmp_path: Path, forged: str
) -> None:
    m = own_invitation(tmp_path)
    own = m.federated.own
    if forged == "op":
        own.gradient.ops[0].target = "aten.randn_like.default"
    elif forged == "name":
        m.federated.strategy = "fedavg"
    elif forged == "array":
        own.client[0] = "../c_i"
    elif forged == "many":
        for _ in range(300):
            own.after.ops.add().CopyFrom(own.after.ops[-1])
    elif forged == "result":
        own.after.results[0].op = 90
    else:
        own.gradient.ops[0].args[0].leaf.name = "image"
    with pytest.raises((BadFrame, UsageError)):
        Consent(state_dir).judge(m)
    assert ConsentStore(state_dir).known() == []


@pytest.mark.parametrize("broken", ["strategy", "metas", "federated"])
def test_an_invitation_that_cannot_be_judged_is_an_error_and_nothing_is_remembered(
    state_dir: Path, tmp_path: Path, broken: str
) -> None:
    m = invitation(tmp_path)
    if broken == "strategy":
        m.federated.strategy = "steal"
    elif broken == "metas":
        del m.metas[:]
    else:
        m.federated.min_clients = 0
    with pytest.raises((BadFrame, UsageError)):
        Consent(state_dir).judge(m)
    assert ConsentStore(state_dir).known() == []


def test_what_leaves_is_logged_also_where_it_breaks_off(state_dir: Path, tmp_path: Path) -> None:
    consent = Consent(state_dir, clock=lambda: 9.0)
    set_policy(state_dir, "mine", OPEN)
    assert consent.judge(invitation(tmp_path)) is None
    with pytest.raises(OSError, match="cut"), consent.departing("job-1", [FILE], lambda: 120):
        raise OSError("cut")
    with consent.departing("job-1", [FILE], lambda: 500):
        pass
    said = pb.FromWorker(update_ready=pb.UpdateReady(job="job-1", round=3, n_samples=54))
    consent.sends(said)
    consent.sends(pb.FromWorker(heartbeat=pb.Heartbeat(job="job-1")))
    consent.sends(pb.FromWorker(loaded=pb.Loaded(job="a-pipelines")))
    lines = list(read_departures(state_dir))
    assert [(line["kind"], line["bytes"]) for line in lines] == [
        (UPDATE_BEGINS, 0),
        (UPDATE, 120),
        (UPDATE_BEGINS, 0),
        (UPDATE, 500),
        (MESSAGE, said.ByteSize()),
    ]
    assert lines[-1]["round"] == 3


def test_only_a_gateway_that_the_owner_names_may_see_an_update_and_the_log_tells_who(
    state_dir: Path, tmp_path: Path
) -> None:
    own, other = "w-0123456789abcdef", "w-fedcba9876543210"
    consent, m = Consent(state_dir), invitation(tmp_path, gateways="auto")
    consent.judge(m)
    (asked,) = ConsentStore(state_dir).known()
    assert "Only one that your policy names" in dict(asked.facts)["gateways"]
    consent.discloses("mine", f"{own}/1", own)
    for allowed, error in (((), True), ((own,), True), ((other,), False), (("site",), False)):
        set_policy(state_dir, "mine", replace(OPEN, gateways=allowed))
        assert consent.joining(m).gateways == list(allowed)
        if error:
            with pytest.raises(UsageError, match="lets no gateway"):
                consent.discloses("mine", other, own)
        else:
            consent.discloses("mine", other, own)
    with consent.departing("job-1", [FILE], lambda: 500, other):
        pass
    assert [line["to"] for line in read_departures(state_dir)] == [other, other]
    with pytest.raises(UsageError, match="--gateway 'anybody'"):
        Policy(gateways=("anybody",))


def test_nothing_is_uploaded_of_a_job_that_was_refused_meanwhile(state_dir: Path, tmp_path: Path) -> None:
    consent = Consent(state_dir)
    consent.judge(invitation(tmp_path))
    with (
        pytest.raises(UsageError, match="may not send updates"),
        consent.departing("job-1", [FILE], lambda: 0),
    ):
        raise AssertionError("uploaded")
    assert list(read_departures(state_dir)) == []


def test_a_damaged_file_of_consents_refuses_every_invitation_in_words(
    state_dir: Path, tmp_path: Path
) -> None:
    set_policy(state_dir, "mine", OPEN)
    (state_dir / "consent").mkdir()
    (state_dir / "consent" / "requests.sqlite").write_bytes(b"no database" * 1000)
    consent = Consent(state_dir)
    with pytest.raises(StorageError, match="nothing of a federated job leaves"):
        consent.judge(invitation(tmp_path))
    with pytest.raises(StorageError), consent.departing("job-1", [FILE], lambda: 0):
        raise AssertionError("uploaded")


def test_numbers_about_the_data_do_not_leave_unlogged(state_dir: Path, tmp_path: Path) -> None:
    consent = Consent(state_dir)
    (state_dir / "departures").write_text("in the way")
    for said, leaves in (
        (pb.FromWorker(client_evaluated=pb.ClientEvaluated(job="job-1", round=1)), False),
        (pb.FromWorker(update_ready=pb.UpdateReady(job="job-1", round=1)), False),
        (pb.FromWorker(introduction=pb.Introduction(datasets=[pb.DatasetFacts(name="mine")])), False),
        (pb.FromWorker(client_failed=pb.ClientFailed(job="job-1", round=1)), True),
        (pb.FromWorker(heartbeat=pb.Heartbeat()), True),
    ):
        assert consent.sends(said) is leaves


def test_names_of_a_job_can_neither_hide_the_words_nor_move_a_terminals_cursor(tmp_path: Path) -> None:
    m = invitation(tmp_path)
    m.eval_program.metrics.add(name="\x1b[2K\rnone here" + "x" * 5000, op=1)
    shown = dict(Asked(m).facts(60))
    assert "\x1b" not in shown["evaluation"]
    assert "\r" not in shown["evaluation"]
    assert shown["evaluation"].endswith("over the 6 samples that are held out of training")
    assert len(shown["evaluation"]) < 300


# ---------------------------------------------------------------- clipping


def clipped(server: Server, folder: Path, clipping: Clipping, key: bytes = KEY) -> Participation:
    return Participation(server.joining(), context(server, folder), Cancel(), key, clipping)


def norm_of(delta: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in delta.values())))


def test_an_update_leaves_clipped_and_noised_and_the_same_order_gets_the_same_noise(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    model = server.broadcast()

    def sent(folder: str, clipping: Clipping, key: bytes = KEY) -> dict[str, Any]:
        client = clipped(server, tmp_path / folder, clipping, key)
        found = server.read(client.train(order(0, model), Cancel())).delta
        return {name: np.array(array) for name, array in found.items()}  # it lies in a file that is replaced

    bare = sent("bare", Clipping())
    bound = norm_of(bare) / 4
    assert norm_of(sent("clipped", Clipping(bound))) == pytest.approx(bound, rel=1e-5)
    noised = sent("noised", Clipping(bound, 0.5))
    assert same(noised, sent("again", Clipping(bound, 0.5)))
    other = sent("other", Clipping(bound, 0.5), bytes(32))
    size = sum(array.size for array in bare.values())
    assert norm_of({n: noised[n] - other[n] for n in noised}) == pytest.approx(
        bound * 0.5 * np.sqrt(2 * size), rel=0.2
    )


def test_a_strategy_whose_state_clipping_would_contradict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scaffold sends or keeps more"):
        clipped(Server(tmp_path / "server", "scaffold"), tmp_path / "w", Clipping(1.0))
