"""WorkerConfig: every setting of a worker process, checked once, with units.

What was given to a join that succeeded is remembered in the settings file of the state folder, so that a
later ``atoll-worker join`` needs no arguments. The token is never stored: the certificate replaces it; nor is
--insecure, which must be given each time.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.federated import Floors
from hostos.files.folder_version import claim_version
from hostos.files.private_files import state_folder
from hostos.net.addresses import DEFAULT_PORT, join_address
from hostos.units import parse_size
from protos.app_bundle import ConfigValue
from protos.app_signing import SCHEME, checked_publisher
from protos.short_tokens import ShortToken, is_short
from protos.text_limits import plain
from worker.manners.settings_file import OLDER_FILE, SETTINGS_FILE, read_settings, write_settings

ANY_APP = "any"
TOKEN_VARIABLE = "ATOLL_TOKEN"  # noqa: S105 - a variable's name
FOLDER_VERSION = 2  # raised as docs/decisions/023-versions-of-wire-and-disk.md says; 2: consent in SQLite
OLDEST_FOLDER = 1  # read as it is
# What a worker may have left in its state folder, by which the folder is known as one.
_KEPT = (
    "identity", SETTINGS_FILE, OLDER_FILE, "running", "blobs", "compute", "data", "apps", "federated", "log",
    "codec_speed.json", "consent", "departures", "send_log", "devices", "weights",
)  # fmt: skip
_FLOORS = ("min_batch", "min_samples", "min_steps", "min_clients")
REMEMBERED = (
    "host", "port", "name", "device", "devices", "threads", "memory_bytes", "gpu_memory_bytes", "stage_bytes",
    "listen_host", "listen_port", "advertise", "inbound", "site", "max_upload_mbit", "kept_bytes",
    "node_config", "use_proxy", "sandbox", "send_log_bytes", "copy_bytes", "app_nodes", "app_env",
    "app_packages", "app_packages_bytes", *_FLOORS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker process. Sizes in bytes, times in seconds, rates in Mbit/s."""

    host: str  # of the coordinator's entry port
    port: int = DEFAULT_PORT
    token: str = field(default="", repr=False)
    name: str = ""  # "" = this machine's name
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    devices: str = ""  # several, as ``worker.machine.lent`` reads them; "" = device alone
    number: int = 0  # of the device among several; not remembered
    threads: int = 0  # of compute; 0 = all physical cores that this process may use
    memory_bytes: int = 0  # of the whole worker; 0 = what is free now for a stage, less a reserve
    gpu_memory_bytes: int = 0  # the same of a GPU's memory; 0 = memory_bytes
    stage_bytes: int = 0  # the planner's figure, no bound; 0 = what these leave
    parts: int = 1  # devices that share what is the machine's; not remembered
    listen_host: str = "0.0.0.0"  # noqa: S104 - peers come from anywhere; TLS asks who they are
    listen_port: int = 0  # 0 = any free one
    advertise: tuple[tuple[str, int], ...] = ()  # where peers reach us; empty = found out
    inbound: bool = True  # False: we open every connection
    site: str = ""  # machines behind one uplink give the same
    state_dir: Path = field(default_factory=lambda: default_state_dir())
    insecure: bool = False  # never remembered
    use_proxy: bool = False  # reach coordinator and peers by way of the environment's proxy
    sandbox: str = "auto"  # of what computes: auto | off | require
    log_json: bool = False
    max_upload_mbit: float = 0.0  # of checkpoints; 0 = unlimited
    cache_bytes: int = 20 << 30
    kept_bytes: int = 20 << 30  # of what strategies and codecs of federated jobs keep between rounds
    send_log_bytes: int = 1 << 30  # of what stages sent, for who takes over a neighbour; 0 = none
    copy_bytes: int = 4 << 30  # of copies of stages, kept while idle for who takes one over; 0 = none
    connect_timeout_s: float = 15.0  # for the first contact; afterwards we try for ever
    peer_timeout_s: float = 30.0  # until every neighbour of a plan is connected
    leave_timeout_s: float = 1.2  # from the wish to leave to the end of the process
    feed_ahead_steps: int = 3
    feed_bytes: int = 256 << 20
    max_message_bytes: int = 64 << 20  # of one control message
    outgoing_messages: int = 4096  # queued for the coordinator while it is away
    allow_apps: bool = False  # run the Python of Flower apps that were accepted here; never remembered
    apps_only: bool = False  # and nothing else: what computes jobs is not started; never remembered
    accept_apps: tuple[str, ...] = ()  # hashes, publishers or ANY_APP, accepted for this process only
    app_nodes: int = 1  # that this machine may be in a run of an app, each with data and state of its own
    app_env: tuple[str, ...] = ()  # variables of ours that apps see, beside those that all do
    app_packages: str = ""  # folder or index of the wheels that apps bring; "" = none is installed
    app_packages_bytes: int = 2 << 30  # of these, installed
    node_config: tuple[tuple[str, ConfigValue], ...] = ()  # given to apps as Context.node_config
    app_cache_bytes: int = 8 << 30  # of arrays that apps were sent
    min_batch: int = Floors().batch  # samples in every mean that leaves; this and the next of ``Floors``
    min_samples: int = Floors().samples
    min_steps: int = Floors().steps
    min_clients: int = Floors().clients

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu(\+cpu)*|cuda(:\d{1,3}(\+cuda:\d{1,3})*)?", self.device):
            raise UsageError(f"--device {self.device!r}; give auto, cpu, cuda or cuda:N")
        if self.sandbox not in ("auto", "off", "require"):
            raise UsageError(f"--sandbox {self.sandbox[:60]!r}; give auto, off or require")
        if not self.host or any(c.isspace() or c == "/" for c in self.host):
            raise UsageError(f"coordinator {self.host!r}; write HOST:PORT, for example 192.0.2.7:7700")
        for name, value, low, high in (
            ("port", self.port, 1, 65535),
            ("--threads", self.threads, 0, 4096),
            ("--memory", self.memory_bytes, 0, 2**50),
            ("--gpu-memory", self.gpu_memory_bytes, 0, 2**50),
            ("--stage-memory", self.stage_bytes, 0, 2**50),
            ("--listen port", self.listen_port, 0, 65535),
            ("cache_bytes", self.cache_bytes, 0, 2**60),
            ("--kept", self.kept_bytes, 0, 2**60),
            ("--send-log-bytes", self.send_log_bytes, 0, 2**60),
            ("--copy-bytes", self.copy_bytes, 0, 2**60),
            ("app_cache_bytes", self.app_cache_bytes, 1 << 20, 2**60),
            ("--app-packages-bytes", self.app_packages_bytes, 1 << 20, 2**60),
            ("feed_ahead_steps", self.feed_ahead_steps, 2, 1000),
            ("outgoing_messages", self.outgoing_messages, 16, 10**6),
            ("--app-nodes", self.app_nodes, 1, 10_000),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} = {value}; give a number from {low} to {high}")
        _ = self.floors  # whose figures are checked where it is made
        if self.accept_apps and not self.allow_apps:
            raise UsageError("--accept-app without --allow-apps: no app would run; give both")
        if self.apps_only and not self.allow_apps:
            raise UsageError("--apps-only without --allow-apps: nothing would run here; give both")
        if self.apps_only and self.devices:
            raise UsageError("--apps-only with --devices: apps run beside one device; leave one out")
        for accepted in self.accept_apps:
            publisher = accepted.startswith(SCHEME) and checked_publisher(accepted) == accepted
            if not (accepted == ANY_APP or publisher or re.fullmatch(r"[0-9a-f]{64}", accepted)):
                raise UsageError(
                    f"--accept-app {accepted[:80]!r}; give the app's hash, 64 hexadecimal digits, a "
                    f"publisher as `atoll flower key` prints it, or {ANY_APP}"
                )
        for given in (self.memory_bytes, self.gpu_memory_bytes, self.stage_bytes):
            if 0 < given < 1 << 20:
                raise UsageError(f"--memory of {given} bytes; at least 1MiB is of any use")
        for variable in self.app_env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,199}", variable):
                raise UsageError(f"--app-env {variable[:80]!r}; give the name of an environment variable")
        if not math.isfinite(self.max_upload_mbit) or self.max_upload_mbit < 0:
            raise UsageError(f"--max-upload-mbit {self.max_upload_mbit}; give 0 (unlimited) or more")
        for text, what in ((self.name, "--name"), (self.site, "--site")):
            if len(text) > 60 or not plain(text):
                raise UsageError(f"{what} {text[:60]!r}; at most 60 printable characters")

    @property
    def floors(self) -> Floors:
        """The least of which this data owner lets anything leave."""
        return Floors(self.min_batch, self.min_samples, self.min_steps, self.min_clients)

    @property
    def entry_address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def shown_name(self) -> str:
        return self.name or socket.gethostname()[:60] or "worker"

    @property
    def identity_dir(self) -> Path:
        return self.state_dir / "identity"

    @property
    def blob_dir(self) -> Path:
        return self.state_dir / "blobs"

    @property
    def device_dir(self) -> Path:
        """The folder of what is kept for one device."""
        return self.state_dir / "devices" / str(self.number) if self.number else self.state_dir

    @property
    def send_log_dir(self) -> Path:
        return self.device_dir / "send_log"

    @property
    def max_upload_bytes_per_s(self) -> float | None:
        return self.max_upload_mbit * 125_000 or None

    @property
    def listen(self) -> tuple[str, int] | None:
        return (self.listen_host, self.listen_port) if self.inbound else None


def default_state_dir() -> Path:
    """Default folder of a worker's identity and blobs."""
    return Path.home() / ".local" / "state" / "atoll-worker"


def make_state_dir(state_dir: Path) -> None:
    """Make the state folder, open to this user alone. StorageError when that cannot be, or when it was
    written by another version."""
    state_folder(state_dir, _KEPT)
    claim_version(state_dir, FOLDER_VERSION, _KEPT, OLDEST_FOLDER)


def make_config(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> WorkerConfig:
    """Return the configuration from options (None: not given), what was remembered, and ATOLL_TOKEN.

    UsageError names an option that is missing.
    """
    options = {name: value for name, value in given.items() if value is not None}
    state_dir = Path(options.get("state_dir") or default_state_dir()).expanduser()
    remembered = _recall(state_dir)
    if "host" not in options:
        # A token that is given now names its coordinator; one that stands in the environment only the first.
        standing = "" if "host" in remembered else environment.get(TOKEN_VARIABLE, "")
        options |= _address_in(options.get("token") or standing)
    if "host" in options and remembered.get("host") not in (None, options["host"]):
        # Another coordinator: its own answers, this machine's limits; floors were lowered for one.
        remembered = {k: v for k, v in remembered.items() if k not in ("port", "site", *_FLOORS)}
    if "device" in options or "devices" in options:
        remembered = {k: v for k, v in remembered.items() if k not in ("device", "devices")}
    if "device" in options and options.get("devices"):
        raise UsageError("--device and --devices contradict each other; give one of them")
    merged = {**remembered, **options, "state_dir": state_dir}
    if "host" not in merged:
        raise _unnamed(options.get("token") or environment.get(TOKEN_VARIABLE, ""))
    merged.setdefault("token", environment.get(TOKEN_VARIABLE, ""))
    return WorkerConfig(**merged)


def _unnamed(token: str) -> UsageError:
    """Return the error of a join that names no coordinator."""
    if token:
        return UsageError(
            "the token names no coordinator, as those do that `atoll serve` prints; copy it whole, or give "
            "the address too: `atoll-worker join HOST:PORT`"
        )
    return UsageError(
        "no coordinator given and none remembered; run `atoll-worker join HOST:PORT --token TOKEN` "
        "as `atoll serve` prints it"
    )


def _address_in(token: str) -> dict[str, Any]:
    """The coordinator's address in a token, as fields of the configuration; none in a long one. Raises
    AccessDenied for a short one that is damaged."""
    given = ShortToken.decode(token) if is_short(token) else None
    return {"host": given.host, "port": given.port} if given is not None and given.host else {}


def remember(config: WorkerConfig) -> None:
    """Keep the settings of a join that succeeded. StorageError when the disk refuses."""
    values = {name: value for name, value in asdict(config).items() if name in REMEMBERED}
    change_settings(config.state_dir, values)


def change_settings(state_dir: Path, changes: Mapping[str, Any]) -> None:
    """Change settings in the file, None: back to the default. UsageError for a file that cannot be read,
    StorageError when the disk refuses."""
    before = {name: value for name, value in read_settings(state_dir).items() if name != "insecure"}
    make_state_dir(state_dir)
    write_settings(state_dir, {**before, **changes})


def with_insecure_check(config: WorkerConfig) -> WorkerConfig:
    """``--insecure`` and a token contradict each other: the token's CA would not be checked."""
    if config.insecure and config.token:
        raise UsageError("--insecure joins without TLS and takes no --token; leave one of them out")
    return config


def was_insecure(state_dir: Path) -> bool:
    """True when an older version, which did remember it, kept --insecure here; the next join drops it."""
    return read_settings(state_dir).get("insecure") is True


def _recall(state_dir: Path) -> dict[str, Any]:
    """The settings that an earlier join left, and what was changed in their file. UsageError for impossible
    ones; what an older version left counts as absent then."""
    found = read_settings(state_dir)
    values = {name: found[name] for name in REMEMBERED if name in found}
    try:
        for name in ("memory_bytes", "gpu_memory_bytes", "stage_bytes", "kept_bytes", "app_packages_bytes"):
            if isinstance(values.get(name), str):  # as people write it
                values[name] = parse_size(values[name])
        if "advertise" in values:
            values["advertise"] = tuple((str(host), int(port)) for host, port in values["advertise"])
        if "app_env" in values:
            values["app_env"] = tuple(map(str, values["app_env"]))
        if "node_config" in values:
            values["node_config"] = tuple((str(key), value) for key, value in values["node_config"])
        usual = WorkerConfig(host="localhost", state_dir=state_dir)
        for name, value in values.items():
            wanted: type = type(getattr(usual, name))
            number = wanted is float and type(value) is int
            if type(value) is not wanted and not number:
                raise UsageError(f"{name} = {value!r}; give a value of type {wanted.__name__}")
        replace(usual, **values)
    except (AttributeError, TypeError, ValueError, UsageError) as error:
        if (state_dir / SETTINGS_FILE).exists():
            raise UsageError(f"{state_dir / SETTINGS_FILE}: {error}") from None
        return {}
    return values
