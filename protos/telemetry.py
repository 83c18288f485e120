"""Every event and metric name, in one place: logs, dashboards and tests share these words.

Events are ``subject.what_happened``; metrics end in their unit and list their labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Event(StrEnum):
    """Names of structured log events."""

    SERVER_STARTED = "server.started"
    SERVER_STOPPED = "server.stopped"
    SERVER_STALLED = "server.stalled"
    JOURNAL_REPLAYED = "journal.replayed"
    STORAGE_FAILED = "storage.failed"
    STORAGE_RECOVERED = "storage.recovered"
    TOKEN_CREATED = "token.created"  # noqa: S105 - a name
    TOKEN_REVOKED = "token.revoked"  # noqa: S105 - a name
    TOKEN_REFUSED = "token.refused"  # noqa: S105 - a name
    CERTIFICATE_RENEWED = "certificate.renewed"
    AUTHORITY_CHANGED = "authority.changed"
    CONNECTIONS_ENDED = "connections.ended"
    WORKER_ENROLLED = "worker.enrolled"
    WORKER_STATE = "worker.state"
    WORKER_SUSPECTED = "worker.suspected"
    WORKER_QUARANTINED = "worker.quarantined"
    WORKER_READMITTED = "worker.readmitted"
    WORKER_FORGOTTEN = "worker.forgotten"
    WORKER_KICKED = "worker.kicked"
    WORKER_LIMITED = "worker.limited"
    WORKER_LOG = "worker.log"
    SESSION_OPENED = "session.opened"
    SESSION_CLOSED = "session.closed"
    SESSION_REFUSED = "session.refused"
    LINK_PROBED = "link.probed"
    LINK_CHANGED = "link.changed"
    PEER_JOINED = "peer.joined"
    RELAY_STARTED = "relay.started"
    RECONFIGURED = "job.reconfigured"
    STAGE_KILLED = "stage.killed"
    STANDBY_CHOSEN = "standby.chosen"
    STANDBY_DROPPED = "standby.dropped"
    LINKS_JUDGED = "links.judged"
    OPS_PROBED = "ops.probed"
    JOB_SUBMITTED = "job.submitted"
    JOB_STATE = "job.state"
    JOB_FORGOTTEN = "job.forgotten"
    PLAN_MADE = "plan.made"
    PLAN_FAILED = "plan.failed"
    FLEET_JUDGED = "fleet.judged"
    MESSAGE_DROPPED = "message.dropped"
    EVALUATED = "job.evaluated"
    LOSS_ODD = "loss.odd"
    ROUND_CLOSED = "round.closed"
    ROUND_MET = "round.met"
    CLIENT_DROPPED = "client.dropped"
    CLIENT_UNFIT = "client.unfit"
    CONSENT_AWAITED = "consent.awaited"
    CONSENT_GIVEN = "consent.given"
    CONSENT_REFUSED = "consent.refused"
    CHECK_BEGUN = "check.begun"
    STEPS_CHECKED = "steps.checked"
    WORK_REJECTED = "work.rejected"
    CHECKPOINT_STORED = "checkpoint.stored"
    CHECKPOINT_TORN = "checkpoint.torn"
    COPY_KEPT = "copy.kept"
    COPY_NOT_KEPT = "copy.not_kept"
    SNAPSHOT_KEPT = "snapshot.kept"
    SNAPSHOT_NOT_KEPT = "snapshot.not_kept"
    WEIGHTS_HELD = "weights.held"
    WEIGHTS_GATHERED = "weights.gathered"
    WEIGHTS_NOT_SENT = "weights.not_sent"
    BLOBS_DELETED = "blobs.deleted"
    APP_OPENED = "app.opened"
    APP_BEGUN = "app.begun"
    APP_REFUSED = "app.refused"
    APP_NODE_LOST = "app.node_lost"
    APP_ENDED = "app.ended"


@dataclass(frozen=True, slots=True)
class Metric:
    """An exported figure; the name ends in its unit."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


WORKERS = Metric("atoll_workers", "Workers by membership state", ("state",))
JOBS = Metric("atoll_jobs", "Jobs by state", ("state",))
STEPS = Metric("atoll_steps_total", "Steps committed", ("job",))
CREDIT_STEPS = Metric(
    "atoll_credit_steps", "Steps of all workers in 400 days, useful, discarded or pending", ("kind",)
)
CREDIT_SECONDS = Metric("atoll_credit_compute_seconds", "Computing of those steps", ("kind",))
CREDIT_ENERGY = Metric(
    "atoll_credit_energy_joules", "Energy of those steps, of workers whose machine measures it", ("kind",)
)
STEP_SECONDS = Metric("atoll_step_seconds", "Time from one commit to the next", ("job",))
COMMIT_SECONDS = Metric("atoll_commit_seconds", "Coordinator's share of a step", ("job",))
LOSS = Metric("atoll_loss_nats", "Training loss of the last committed step", ("job",))
ROUNDS = Metric("atoll_federated_rounds_total", "Rounds of federated jobs that are closed", ("job",))
ROUND_CLIENTS = Metric(
    "atoll_federated_clients",
    "Clients of the newest closed round, asked, answered or refused",
    ("job", "outcome"),
)
ROUND_SECONDS = Metric("atoll_federated_round_seconds", "Time that the newest closed round took", ("job",))
EPSILON = Metric("atoll_federated_epsilon", "Privacy that a private job has spent, at its delta", ("job",))
LINK_RATE = Metric("atoll_link_rate_bps", "Smoothed payload rate between workers", ("source", "target"))
LINK_RATIO = Metric(
    "atoll_link_compression_ratio",
    "Dense bytes over bytes sent in the last step",
    ("source", "target", "codec"),
)
RELAY_BYTES = Metric("atoll_relay_bytes_total", "Bytes that this coordinator's relay has passed")
RELAY_CONNECTIONS = Metric(
    "atoll_relay_connections", "Connections at the relay, waiting or joined", ("state",)
)
RELAY_REFUSED = Metric("atoll_relay_refused_total", "Connections that the relay refused", ("cause",))
LAG_SECONDS = Metric("atoll_event_loop_lag_seconds", "Longest delay of the event loop in the last minute")
APPEND_SECONDS = Metric("atoll_journal_append_seconds", "Longest write of the journal in the last minute")
DISK_FREE = Metric("atoll_disk_free_bytes", "Free on the disk of the coordinator's state folder")
DROPPED = Metric("atoll_messages_dropped_total", "Late, duplicate or stale messages", ("kind",))

METRICS = (
    WORKERS,
    JOBS,
    STEPS,
    CREDIT_STEPS,
    CREDIT_SECONDS,
    CREDIT_ENERGY,
    STEP_SECONDS,
    COMMIT_SECONDS,
    LOSS,
    ROUNDS,
    ROUND_CLIENTS,
    ROUND_SECONDS,
    EPSILON,
    LINK_RATE,
    LINK_RATIO,
    RELAY_BYTES,
    RELAY_CONNECTIONS,
    RELAY_REFUSED,
    LAG_SECONDS,
    APPEND_SECONDS,
    DISK_FREE,
    DROPPED,
)
