"""CoordinatorConfig: every bound and interval of the coordinator, checked once, with units."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import UsageError
from coordinator.sharing.policies import policy_of
from hostos.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class Adaptation:
    """When a running job's links deserve other codecs (``pipeline.link_policy``)."""

    change: float = 0.2  # against what the codecs were chosen for
    weight: float = 0.25  # of one sample in the smoothed rate
    jump: float = 0.25  # samples this far off, all on one side, ...
    jump_samples: int = 3  # ... so many in a row, are a new rate, not noise
    telling_s: float = 0.02  # a message must keep the line at work so long to tell its rate
    sample_bytes: int = 64 * 1024  # steps that carry less are taken together
    effect_steps: int = 3  # from a decision to the first step with its codecs
    distance_steps: int = 6  # between decisions: the rest is for seeing what the last one did
    suffers: float = 0.1  # of the step time: more shows that a link whose messages are short got slower
    gap: float = 0.02  # loss without codecs over loss through them, less one
    gap_cap: float = 0.7  # of the largest ratio in use

    def __post_init__(self) -> None:
        if not (0 < self.change < 1 and 0 < self.weight <= 1 and self.gap > 0 and 0 < self.gap_cap < 1):
            raise ValueError(f"{self}: shares lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class Liveness:
    """When silence means something (DESIGN section 10)."""

    heartbeat_s: float = 0.5
    suspect_after_s: float = 1.5
    dead_after_s: float = 2.0
    idle_patience: float = 5.0  # a worker without a stage may be silent so many times longer
    return_within_s: float = 0.3  # a broken connection may come back as if nothing had been
    heartbeats_per_s: float = 2000.0  # of all idle workers together

    def idle_heartbeat_s(self, workers: int) -> float:
        """Return the interval of a worker without a job in a fleet of so many.

        A third of what an idle worker may be silent is the most, however large the fleet.
        """
        most_s = self.suspect_after_s * self.idle_patience / 3
        return max(self.heartbeat_s, min(workers / self.heartbeats_per_s, most_s))

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_s < self.suspect_after_s < self.dead_after_s <= 3600:
            raise UsageError(
                f"heartbeat {self.heartbeat_s} s, suspect {self.suspect_after_s} s, dead "
                f"{self.dead_after_s} s; give three rising numbers from 0.01 to 3600"
            )
        if not 1.0 <= self.idle_patience <= 1000.0:
            raise UsageError(f"idle_patience = {self.idle_patience}; give 1 to 1000")
        if not self.heartbeats_per_s > 0:
            raise UsageError(f"heartbeats_per_s = {self.heartbeats_per_s}; give more than 0")
        if not 0 <= self.return_within_s <= self.dead_after_s:
            raise UsageError(
                f"return_within_s = {self.return_within_s}; give 0 to dead_after_s = {self.dead_after_s}"
            )


@dataclass(frozen=True, slots=True)
class Probing:
    """How much measuring a fleet bears."""

    seconds: float = 1.2  # of sending, one direction of one pair
    max_bytes: int = 64 * MIB
    answer_within_s: float = 20.0  # beyond the sending itself
    ops_answer_within_s: float = 300.0
    stale_after_s: float = 600.0  # older link figures are measured again before planning
    max_peers: int = 16  # a worker is probed against at most so many others
    probes_at_once: int = 32  # link probes of one fleet
    all_pairs_up_to: int = 12  # workers; of a larger fleet few pairs are measured, and those of plans
    few_peers: int = 2  # each worker of a large fleet is measured against so many when it comes
    survey_within_s: float = 60.0  # a job waits no longer for that
    planned_workers: int = 1000  # a plan chooses among at most so many
    ops_per_request: int = 4096
    attempts: int = 2

    def __post_init__(self) -> None:
        if self.probes_at_once < 2:
            raise UsageError(f"probes_at_once = {self.probes_at_once}; give at least 2")
        if not 0.05 <= self.seconds <= 60 or self.max_bytes < 65536 or self.max_peers < 1:
            raise UsageError(
                f"probe of {self.seconds} s, {self.max_bytes} bytes, {self.max_peers} peers; "
                "give 0.05 to 60 s, at least 65536 bytes and 1 peer"
            )
        if self.few_peers < 1 or self.planned_workers < 1 or not self.survey_within_s >= 0:
            raise UsageError(
                f"{self.few_peers} peers of each worker of a large fleet, {self.survey_within_s} s for that, "
                f"plans among {self.planned_workers} workers; give at least 1 peer, 0 s and 1 worker"
            )


@dataclass(frozen=True, slots=True)
class Relaying:
    """Relays for workers of which neither can be dialled."""

    port: int | None = None  # of this coordinator's own; 0: the one after the work port; None: it has none
    others: tuple[tuple[str, int], ...] = ()  # HOST, PORT of `atoll relay` elsewhere
    line_bps: float = 0.0  # that the own relay passes in all, and plans count on; 0: not bounded, as measured
    day_bytes: int = 0  # that the own relay passes in 24 hours; 0: not bounded
    ticket_s: float = 600.0  # a ticket may be shown so long; those in use are renewed at half of it
    ticket_bytes: int = 64 * GIB  # and carries so much
    ticket_connections: int = 32  # at once

    @property
    def used(self) -> bool:
        """There is a relay."""
        return self.port is not None or bool(self.others)

    def __post_init__(self) -> None:
        if not 0 <= (self.port or 0) <= 65535:
            raise UsageError(f"--relay-port {self.port}; give 1 to 65535")
        if not 0.0 <= self.line_bps < math.inf or self.day_bytes < 0:
            raise UsageError(
                f"a relay of {self.line_bps} bit/s and {self.day_bytes} bytes a day; give 0 (not bounded) "
                "or more"
            )
        if not 10.0 <= self.ticket_s <= 86_400.0 or self.ticket_bytes < MIB:
            raise UsageError(
                f"relay tickets of {self.ticket_s} s and {self.ticket_bytes} bytes; give 10 to 86400 s and "
                "at least 1 MiB"
            )


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """One coordinator process."""

    state_dir: Path
    host: str = "127.0.0.1"
    entry_port: int = 7700  # 0: any free one
    work_port: int = 0  # 0: entry_port + 1, or any free one when entry_port is 0
    advertise: str = ""  # what the join command names; "" = host
    insecure: bool = False  # no TLS, no tokens: loopback experiments only
    database_url: str = ""  # "" = SQLite in state_dir
    blobs_url: str = (
        ""  # "" = a folder in state_dir; another one; s3://BUCKET/PREFIX, the folder in front of it
    )
    metrics_port: int | None = None  # None: no metrics; 0: any free one
    metrics_host: str = "127.0.0.1"  # they have neither TLS nor a token
    liveness: Liveness = field(default_factory=Liveness)
    probing: Probing = field(default_factory=Probing)
    adaptation: Adaptation = field(default_factory=Adaptation)
    relaying: Relaying = field(default_factory=Relaying)
    concurrent_jobs: int = 16  # of stages; further ones wait in the queue
    policy: str = "srsf"  # who goes first: ``sharing.policies``
    concurrent_federations: int = 4  # the same of federated ones: each has a process of its own
    keep_checkpoints: int = 2
    max_message_bytes: int = 64 * MIB
    blob_quota_bytes: int = 512 * GIB
    max_blob_bytes: int = 64 * GIB
    unneeded_blob_s: float = 86_400.0  # so long an upload may wait for its job, or for its rest
    outgoing_messages: int = 1024  # queued for one worker; beyond it the session is closed
    join_token_lifetime_s: float = 7 * 86_400.0  # of the one in the printed join command; 0: no end
    join_token_uses: int = 100  # of the same; 0: any number
    certificate_lifetime_s: float = 365 * 86_400.0  # of workers' and the coordinator's own certificates
    max_workers: int = 4096  # enrolled, those that left included
    max_jobs: int = 10_000
    wrong_token_delay_s: float = 0.5
    wrong_tokens_at_once: int = 16  # that are answered late; further ones are refused at once
    calls_per_address: int = 64  # at once on the entry port, without the owner's token
    calls_per_worker: int = 64  # at once on the work port
    sessions_per_address: int = 512  # of workers; of IPv6 a /64; on this machine as many as there are
    connections_per_address: int = 256  # to the entry port; to the work port four for each session allowed
    handshake_within_s: float = 30.0  # from a connection to its TLS session
    idle_connection_s: float = 60.0  # so long the entry port keeps a connection without a call
    trace_bytes: int = 64 * MIB  # of spans kept for one job
    log_lines: int = 5000  # kept in memory for `atoll logs`
    join_token_copy: Path | None = None  # also kept there, for workers on this machine
    owner_token_copy: Path | None = None
    stop_within_s: float = 1.5
    keepalive_s: float = 10.0  # a silent connection is asked so often whether the other end is there
    keepalive_timeout_s: float = (
        20.0  # and is lost when no answer came by then; one may wait behind megabytes
    )

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("entry_port", self.entry_port, 0, 65535),
            ("work_port", self.work_port, 0, 65535),
            ("metrics_port", self.metrics_port or 0, 0, 65535),
            ("concurrent_jobs", self.concurrent_jobs, 1, 1000),
            ("join_token_lifetime_s", self.join_token_lifetime_s, 0, 10 * 365 * 86_400),
            ("join_token_uses", self.join_token_uses, 0, 10**6),
            ("sessions_per_address", self.sessions_per_address, 1, 10**6),
            ("connections_per_address", self.connections_per_address, 1, 10**6),
            ("certificate_lifetime_s", self.certificate_lifetime_s, 3600, 10 * 365 * 86_400),
            ("concurrent_federations", self.concurrent_federations, 1, 1000),
            ("keep_checkpoints", self.keep_checkpoints, 1, 1000),
            ("max_message_bytes", self.max_message_bytes, MIB, 2 * GIB - 1),
            ("blob_quota_bytes", self.blob_quota_bytes, MIB, 2**60),
            ("max_blob_bytes", self.max_blob_bytes, MIB, 2**50),
            ("outgoing_messages", self.outgoing_messages, 16, 10**6),
            ("max_workers", self.max_workers, 1, 10**5),
            ("wrong_tokens_at_once", self.wrong_tokens_at_once, 0, 10**4),
            ("calls_per_address", self.calls_per_address, 1, 10**5),
            ("calls_per_worker", self.calls_per_worker, 4, 10**5),
            ("max_jobs", self.max_jobs, 1, 10**6),
            ("trace_bytes", self.trace_bytes, 0, 2**40),
            ("log_lines", self.log_lines, 10, 10**6),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} = {value}; give a number from {low} to {high}")
        policy_of(self.policy)
        if not 60 <= self.unneeded_blob_s <= 1e9:
            raise UsageError(f"unneeded_blob_s = {self.unneeded_blob_s}; give 60 s or more")
        if not 0 <= self.wrong_token_delay_s <= 60 or not math.isfinite(self.stop_within_s):
            raise UsageError(f"wrong_token_delay_s = {self.wrong_token_delay_s}; give 0 to 60")
        if not (0.01 <= self.handshake_within_s <= 3600 and 0.01 <= self.idle_connection_s <= 1e6):
            raise UsageError(
                f"handshake_within_s = {self.handshake_within_s}, idle_connection_s = "
                f"{self.idle_connection_s}; give 0.01 to 3600, and 0.01 to 1e6"
            )
        if not (0.01 <= self.keepalive_s <= 3600 and 0.01 <= self.keepalive_timeout_s <= 3600):
            raise UsageError(
                f"keepalive_s = {self.keepalive_s}, keepalive_timeout_s = {self.keepalive_timeout_s}; "
                "give 0.01 to 3600"
            )
        if self.insecure and self.relaying.used:
            raise UsageError("--insecure without relays: one would see what passes it; leave either out")
        scheme, separator, _ = self.blobs_url.partition("://")
        if separator and scheme not in ("s3", "file"):
            raise UsageError(f"--blobs {self.blobs_url}: give a folder or s3://BUCKET/PREFIX")
        if self.insecure and self.host not in ("127.0.0.1", "::1", "localhost") and not self.advertise:
            raise UsageError(
                f"--insecure listens on {self.host} without any check of who joins; use 127.0.0.1, or name "
                "the address with --advertise to say that this is meant"
            )

    @property
    def max_calls(self) -> int:
        """Calls of one port at once, all callers together: gRPC refuses further ones."""
        return max(1024, 4 * self.max_workers)

    @property
    def journal_url(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir / 'journal.sqlite'}"

    @property
    def blob_dir(self) -> Path:
        in_state_dir = not self.blobs_url or self.blobs_url.startswith("s3://")
        return self.state_dir / "blobs" if in_state_dir else Path(self.blobs_url.removeprefix("file://"))

    @property
    def runs_dir(self) -> Path:
        return self.state_dir / "runs"

    @property
    def relay_key_path(self) -> Path:
        return self.state_dir / "relay-key"

    @property
    def owner_token_path(self) -> Path:
        return self.state_dir / "owner-token"

    @property
    def join_token_path(self) -> Path:
        return self.state_dir / "join-token"
