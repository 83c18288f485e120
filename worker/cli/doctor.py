"""Examination before joining: the way to the coordinator, this machine, and what is to be fixed.

Every check reports what it found in numbers and, where it is not well, the next move. Nothing is
changed: the token is looked at and not used up, no identity is made. Without a token the certificate
that the coordinator shows is taken as it is, and reported so: the greeting contains nothing secret.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import AccessDenied, AtollError, BadFrame, ConnectionFailed
from atoll.version import __version__
from hostos.net.addresses import join_address
from hostos.net.networks import open_listener
from hostos.units import counted, shown_size
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos import bounds
from protos.certificate_words import shown_certificate
from protos.credentials import Identity, JoinToken, fingerprint, read_token
from protos.grpc_errors import to_atoll_error
from protos.relay_tickets import GREETING_BYTES, nonce_of
from protos.short_tokens import ShortToken
from protos.text_limits import clean
from worker.control.calls import open_channel
from worker.control.greeting import greet
from worker.control.pinned import opened_token
from worker.hosting.contained.protections import protections
from worker.hosting.contained.sandbox import chosen, probe
from worker.machine.device import Device
from worker.machine.facts import ask_facts
from worker.machine.lent import lent_devices
from worker.machine.own_share import RESERVE_BYTES, held_bytes, memory_share
from worker.machine.sensors.energy import Packages

if TYPE_CHECKING:
    from rich.console import Console

    from worker.config import WorkerConfig

CONNECT_TIMEOUT_S = 5.0
RELAY_TIMEOUT_S = 3.0
MAX_RELAYS = 16
ECHO_TIMEOUT_S = 25.0
GREETINGS = 10
FIRST_BYTES = 128 << 10  # a first look at a rate, which sizes the measurement
MOST_BYTES = 48 << 20
RATE_SECONDS = 1.5
CHUNK_BYTES = 32 << 10  # the coordinator takes messages of newcomers up to 64 KiB
Metadata = tuple[tuple[str, str], ...]
SKEW_NOTED_S = 5.0
SKEW_TOO_MUCH_S = 12 * 3600.0  # certificates tolerate a day
STATE_BYTES_PER_PARAMETER = 16  # fp32 value, gradient and two AdamW moments
LEAST_FIT_BYTES = 64 << 20  # for a stage: with less a machine is of little use
STATE_SHARE = 0.6  # of the budget; activations and the program take the rest
SLOW_UPLINK_BPS = 5e6


class Mark(StrEnum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"  # works, but could be better
    BAD = "bad"  # joining would fail or be of no use


@dataclass(frozen=True, slots=True)
class Finding:
    """A check: what was found, and what to do where it is not well."""

    check: str
    mark: Mark
    found: str
    fix: str = ""


@dataclass
class Report:
    """Everything found; ``figures`` are for scripts, units last in their names."""

    coordinator: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    error: AtollError | None = None  # what stopped the examination

    def add(self, check: str, mark: Mark, found: str, fix: str = "") -> None:
        self.findings.append(Finding(check, mark, found, fix))

    @property
    def fit(self) -> bool:
        return all(finding.mark is not Mark.BAD for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 fit to join; the stopping error's own code; else 1."""
        if self.error is not None:
            return self.error.exit_code
        return 0 if self.fit else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "coordinator": self.coordinator,
            "fit": self.fit,
            "figures": self.figures,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(config: WorkerConfig, telling: Callable[[str], object]) -> Report:
    """Run every check that makes sense after the ones before it."""
    report = Report(config.entry_address)
    telling("looking at this machine")
    try:
        _examine_devices(config, report)
    except AtollError as error:
        report.add("device", Mark.BAD, str(error))
    telling(f"reaching {config.entry_address}")
    try:
        _examine_coordinator(config, report, telling)
    except AtollError as error:
        report.error = error
        report.add("coordinator", Mark.BAD, str(error))
    _conclude(config, report)
    return report


def show(report: Report, out: Console) -> None:
    """Print a line for each check, then what to do."""
    from rich.text import Text

    colours = {Mark.OK: "green", Mark.NOTE: "yellow", Mark.BAD: "red"}
    for finding in report.findings:
        mark = Text(f"{finding.mark:4}", style=colours[finding.mark])
        out.print(Text.assemble(mark, f" {finding.check:12} {finding.found}"), soft_wrap=True)
        if finding.fix:
            out.print(Text(f"{'':18}-> {finding.fix}"), soft_wrap=True)


# ---------------------------------------------------------------- this machine


def _examine_devices(config: WorkerConfig, report: Report) -> None:
    """Look at each device that would be lent; the figures of the first stand for a machine of one device."""
    each = [_examine_device(device, report) for device in lent_devices(config)]
    report.figures |= {**each[0], "devices": each}


def _examine_device(config: WorkerConfig, report: Report) -> dict[str, Any]:
    facts = ask_facts(config)
    device, rates = facts.device, facts.rates
    figures = {
        "device": device.kind,
        "model": device.model,
        "threads": device.threads,
        "memory_bytes": device.memory_bytes,
        "matmul_gflops": round(rates.matmul_gflops, 2),
        "memory_gbps": round(rates.memory_gbps, 2),
        "versions": facts.versions,
    }
    where = f"{device.kind.upper()} {device.model}, {counted(device.threads, 'thread')}"
    report.add(
        "device",
        Mark.OK,
        f"{where}: {rates.matmul_gflops:.1f} GFLOP/s in float32, {rates.memory_gbps:.1f} GB/s copied",
    )
    _examine_memory(device, config, report, figures)
    _examine_energy(facts.counts_energy, report, figures)
    _examine_protections(device, config, report)
    return figures


def _examine_memory(device: Device, config: WorkerConfig, report: Report, figures: dict[str, Any]) -> None:
    """Look at how the memory is shared between the worker itself and a stage."""
    own = device.own_bytes
    if device.kind == "cpu":  # this process stands for the daemon
        own += held_bytes() // config.parts + RESERVE_BYTES
    share = memory_share(config, device.kind, device.memory_limit_bytes, own)
    source = "--memory" if share.limited else "what is free, less a reserve"
    found = f"{share}; {shown_size(device.memory_bytes)} are there ({source})"
    figures |= {"memory_limit_bytes": max(0, share.planned_bytes), "own_memory_bytes": own}
    if share.stage_bytes < LEAST_FIT_BYTES:
        least = shown_size(own + LEAST_FIT_BYTES)
        report.add("memory", Mark.BAD, found, f"free some memory, or raise --memory: {least} at least")
    else:
        report.add("memory", Mark.OK, found)


def _examine_energy(counts: bool, report: Report, figures: dict[str, Any]) -> None:
    """Look at what of the machine's energy is counted; ``counts``: by the device itself."""
    packages = Packages()
    figures["energy"] = {"gpu": counts, "packages": len(packages)}
    found = ["the GPU's"] * counts + ["its share of the processors'"] * bool(packages)
    refused = f"only root may read {packages.refused}" if packages.refused is not None else ""
    if found:
        report.add("energy", Mark.OK, f"measured: {' and '.join(found)}{refused and f'; {refused}'}")
    else:
        report.add("energy", Mark.OK, f"not measured: {refused or 'this system has no counter'}")


def _examine_protections(device: Device, config: WorkerConfig, report: Report) -> None:
    """What stands between strangers' graphs and this machine."""
    required = config.sandbox == "require"
    sandbox = probe(device.kind) if required else chosen(config.sandbox, device.kind)
    found = protections(device.kind, sandbox)
    report.figures["protections"] = found.line()
    for one in found.words():
        mark = Mark.OK if not one.remedy else Mark.BAD if required else Mark.NOTE
        report.add(one.name, mark, one.found, one.remedy)


# ---------------------------------------------------------------- the coordinator


def _examine_coordinator(config: WorkerConfig, report: Report, telling: Callable[[str], object]) -> None:
    _connect(config, report)
    token, ca, verified = _trust(config, report)
    with open_channel(
        config.entry_address, ca, None, config.max_message_bytes, use_proxy=config.use_proxy
    ) as channel:
        stub = rpc.EntryStub(channel)
        reply = _greet(config, report, stub, ca)
        _meet_relays(config, report, reply)
        report.figures["coordinator_verified"] = verified
        if token is not None:
            report.add("identity", Mark.OK, "its certificate is the token's coordinator")
        if token is None and not config.insecure:
            report.add(
                "rates", Mark.NOTE, "not measured: that takes a join token", "give --token to measure them"
            )
            return
        telling("measuring both directions")
        _measure_rates(config, report, stub, token)
        if config.inbound:
            _reach_back(config, report, stub, token)
        _way_to_peers(config, report)


def _connect(config: WorkerConfig, report: Report) -> None:
    """Check name, route and port, each by itself."""
    if config.use_proxy:
        report.add("reachable", Mark.NOTE, "not tried: calls go by way of the environment's proxy")
        return
    try:
        started_s = time.perf_counter()
        with socket.create_connection((config.host, config.port), CONNECT_TIMEOUT_S) as connection:
            took_s = time.perf_counter() - started_s
            address = connection.getpeername()[0]
    except socket.gaierror:
        raise ConnectionFailed(
            f"{config.host} is not a known name; check the spelling, or use its address"
        ) from None
    except TimeoutError:
        raise ConnectionFailed(
            f"{config.entry_address} did not answer within {CONNECT_TIMEOUT_S:.0f} s: a firewall drops "
            "it, or the machine is off; ask the owner to open the port"
        ) from None
    except OSError as error:
        raise ConnectionFailed(
            f"{config.entry_address}: {error.strerror}; is `atoll serve` running there on that port?"
        ) from None
    report.add("reachable", Mark.OK, f"{config.entry_address} ({address}) opened in {took_s * 1e3:.1f} ms")


def _trust(config: WorkerConfig, report: Report) -> tuple[JoinToken | None, bytes | None, bool]:
    """The token, the certificate to check the coordinator against (None: no TLS), and whether that
    proves who it is. Raises AccessDenied, ConnectionFailed."""
    if config.insecure:
        report.add("identity", Mark.NOTE, "no TLS (--insecure)", "for experiments on this machine only")
        return None, None, False
    if config.token:
        given = read_token(config.token)
        token = opened_token(config, given) if isinstance(given, ShortToken) else given
        return token, token.ca_pem, True
    identity = Identity.load(config.identity_dir)
    if identity is not None:
        report.add(
            "identity", Mark.OK, f"joined before as {identity.name}, until {identity.expires():%Y-%m-%d}"
        )
        return None, identity.ca_pem, True
    if config.use_proxy:
        raise AccessDenied("behind a proxy the shown certificate cannot be looked at; give --token")
    shown = shown_certificate(config.entry_address)
    report.add(
        "identity",
        Mark.NOTE,
        "NOT verified: no token given, and this machine has not joined before; shown is a certificate with "
        f"SHA-256 {fingerprint(shown)}",
        "joining takes a token, which also proves who answers: `atoll token create` on the coordinator",
    )
    return None, shown, False


def _greet(config: WorkerConfig, report: Report, stub: Any, ca: bytes | None) -> pb.HelloReply:
    """Versions, clock and round trip; returns the last greeting. The first call also opens TLS and does not
    count."""
    greet(stub, config.entry_address, ca, CONNECT_TIMEOUT_S)
    trips, offsets = [], []
    for _ in range(GREETINGS):
        reply, took_s = greet(stub, config.entry_address, ca, CONNECT_TIMEOUT_S)
        trips.append(took_s)
        offsets.append(reply.time_s + took_s / 2 - time.time())
    rtt_s, skew_s = statistics.median(trips), statistics.median(offsets)
    version = clean(reply.version, 20)
    report.figures |= {
        "rtt_s": rtt_s,
        "clock_offset_s": skew_s,
        "coordinator_version": version,
        "protocol": reply.protocol,
    }
    report.add("versions", Mark.OK, f"coordinator atoll {version}, here {__version__}")
    report.add("round trip", Mark.OK, f"{rtt_s * 1e3:.1f} ms, median of {GREETINGS}")
    found = f"{abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'} the coordinator's"
    if abs(skew_s) > SKEW_TOO_MUCH_S:
        report.add("clock", Mark.BAD, found, "set this machine's clock: certificates would look invalid")
    elif abs(skew_s) > SKEW_NOTED_S:
        report.add("clock", Mark.NOTE, found, "switch on time synchronisation")
    else:
        report.add("clock", Mark.OK, found)
    return reply


def _meet_relays(config: WorkerConfig, report: Report, reply: pb.HelloReply) -> None:
    """Whether the relays greet, at which workers meet that cannot dial each other."""
    report.figures["relays"] = []
    for relay in relays_of(config, reply):
        name = join_address(*relay)
        took_s, why_not = greeted(relay)
        if why_not:
            report.add(
                "relay", Mark.NOTE, f"{name}: {why_not}", "ask the owner to open that port, or your firewall"
            )
        else:
            report.figures["relays"].append({"address": name, "greeted_s": took_s})
            report.add("relay", Mark.OK, f"{name} greets in {took_s * 1e3:.1f} ms")


def _way_to_peers(config: WorkerConfig, report: Report) -> None:
    """By which way other workers would be joined with this one."""
    reachable = config.inbound and report.figures.get("inbound_reachable", False)
    relays = [relay["address"] for relay in report.figures["relays"]]
    up_bps = report.figures.get("up_bps")
    report.figures["way"] = "direct" if reachable else "relayed" if relays else "outbound"
    if reachable:
        report.add("way to peers", Mark.OK, "direct: they dial this machine, or it dials them")
    elif relays:
        rate = f", at most {up_bps / 1e6:.1f} Mbit/s up" if up_bps else ""
        report.add(
            "way to peers",
            Mark.OK,
            f"direct to those that can be dialled, with the others through the relay {relays[0]}{rate}",
        )
    else:
        report.add(
            "way to peers",
            Mark.NOTE,
            "direct to those that can be dialled; there is no relay for the others",
            "have the owner run one: `atoll serve` without --no-relay",
        )


def _measure_rates(config: WorkerConfig, report: Report, stub: Any, token: JoinToken | None) -> None:
    """Both directions against the coordinator, each about RATE_SECONDS long."""
    metadata = token.metadata if token else ()
    rtt_s = report.figures["rtt_s"]
    for name, measure in (("down", _download_s), ("up", _upload_s)):
        try:
            first_bps = FIRST_BYTES * 8 / max(measure(stub, metadata, FIRST_BYTES) - rtt_s, 1e-4)
            size = int(min(MOST_BYTES, max(FIRST_BYTES, first_bps / 8 * RATE_SECONDS)))
            rate_bps = size * 8 / max(measure(stub, metadata, size) - rtt_s, 1e-4)
        except grpc.RpcError as error:
            raise to_atoll_error(error, config.entry_address) from None
        report.figures[f"{name}_bps"] = rate_bps
        found = f"{rate_bps / 1e6:.1f} Mbit/s ({size / 2**20:.1f} MiB)"
        if name == "up" and rate_bps < SLOW_UPLINK_BPS:
            report.add("rate up", Mark.NOTE, found, "close other uploads; plans will give it little to send")
        else:
            report.add(f"rate {name}", Mark.OK, found)


def _download_s(stub: Any, metadata: Metadata, nbytes: int) -> float:
    started_s = time.perf_counter()
    request = iter([pb.EchoChunk(wanted_bytes=nbytes)])
    arrived = sum(len(chunk.data) for chunk in stub.Echo(request, timeout=ECHO_TIMEOUT_S, metadata=metadata))
    if arrived < nbytes:
        raise ConnectionFailed(f"only {arrived} of {nbytes} bytes arrived")
    return time.perf_counter() - started_s


def _upload_s(stub: Any, metadata: Metadata, nbytes: int) -> float:
    def chunks() -> Iterator[pb.EchoChunk]:
        yield pb.EchoChunk()
        data = bytes(CHUNK_BYTES)
        for at in range(0, nbytes, CHUNK_BYTES):
            yield pb.EchoChunk(data=data[: min(CHUNK_BYTES, nbytes - at)])

    started_s = time.perf_counter()
    replies = stub.Echo(chunks(), timeout=ECHO_TIMEOUT_S, metadata=metadata)
    received = max((chunk.received_bytes for chunk in replies), default=0)
    if received < nbytes:
        raise ConnectionFailed(f"only {received} of {nbytes} bytes arrived")
    return time.perf_counter() - started_s


def _reach_back(config: WorkerConfig, report: Report, stub: Any, token: JoinToken | None) -> None:
    """Check that connections from outside arrive, seen from the coordinator."""
    try:
        listening = open_listener(config.listen_host, config.listen_port, 1)
    except OSError as error:
        report.add(
            "inbound", Mark.BAD, f"cannot listen on port {config.listen_port}: {error.strerror}",
            "choose another --listen port",
        )  # fmt: skip
        return
    with listening:
        port = listening.getsockname()[1]
        try:
            reply = stub.Reach(
                pb.ReachRequest(port=port), timeout=ECHO_TIMEOUT_S, metadata=token.metadata if token else ()
            )
        except grpc.RpcError as error:
            raise to_atoll_error(error, config.entry_address) from None
    report.figures["inbound_reachable"] = bool(reply.reachable)
    if reply.reachable:
        report.add("inbound", Mark.OK, f"the coordinator reaches {clean(reply.host, 60)}:{port}")
    else:
        report.add(
            "inbound",
            Mark.NOTE,
            f"nobody reaches {clean(reply.host, 60)}:{port} from outside ({clean(reply.error, 80)})",
            "fine: others are dialled from here or met at a relay; faster with a forwarded port, --listen "
            "and --advertise",
        )


# ---------------------------------------------------------------- the conclusion


def _conclude(config: WorkerConfig, report: Report) -> None:
    """Conclude what this machine would hold and carry, or that something is to be fixed first."""
    bad = [finding.check for finding in report.findings if finding.mark is Mark.BAD]
    if bad:
        report.add("verdict", Mark.BAD, f"not fit to join yet: {', '.join(dict.fromkeys(bad))}")
        return
    bytes_of = [device["memory_limit_bytes"] for device in report.figures["devices"]]
    parameters = [nbytes * STATE_SHARE / STATE_BYTES_PER_PARAMETER for nbytes in bytes_of]
    report.figures["holds_parameters"] = int(sum(parameters))
    shown = ", ".join(f"{count / 1e6:.{'0' if count > 1e7 else '2'}f}" for count in parameters)
    stages = "a stage" if len(parameters) == 1 else f"{len(parameters)} stages"
    text = f"would hold {stages} of about {shown} million parameters under AdamW"
    up_bps = report.figures.get("up_bps")
    if up_bps:
        mib_s = 2**20 * 8 / up_bps
        report.figures["send_s_per_mib"] = mib_s
        text += f" and send a boundary tensor of 1 MiB in {mib_s:.3g} s"
    # What let us look without it does not let us in.
    known = report.figures["coordinator_verified"] or config.insecure
    how = "atoll-worker join" if known else f"atoll-worker join {config.entry_address} --token TOKEN"
    report.add("verdict", Mark.OK, f"{text}; join with `{how}`")


# ---------------------------------------------------------------- relays


def relays_of(config: WorkerConfig, reply: pb.HelloReply) -> list[tuple[str, int]]:
    """The coordinator's relays as this machine dials them. Raises BadFrame."""
    listed = bounds.count("relays", list(reply.relays), MAX_RELAYS)
    return [
        (
            bounds.host("relay's host", a.host) if a.host else config.host,
            bounds.within("relay's port", a.port, 1, 65535),
        )
        for a in listed
    ]


def greeted(relay: tuple[str, int]) -> tuple[float, str]:
    """Seconds until a relay greeted, and "" or why it did not."""
    started_s = time.perf_counter()
    try:
        with socket.create_connection(relay, RELAY_TIMEOUT_S) as connection:
            connection.settimeout(RELAY_TIMEOUT_S)
            first = b""
            while len(first) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES - len(first))):
                first += more
            nonce_of(first)
    except TimeoutError:
        return 0.0, f"no answer within {RELAY_TIMEOUT_S:.0f} s: a firewall drops it"
    except (OSError, BadFrame) as error:
        return 0.0, clean(getattr(error, "strerror", None) or str(error), 80)
    return time.perf_counter() - started_s, ""
