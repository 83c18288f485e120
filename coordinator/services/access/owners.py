"""Owners of this coordinator: who they are by their tokens, what each may do, and a log of what they did.

STATE/owner-token      the first owner's token: it may administer, and is named ``owner``
STATE/owners.json      name -> hash of the secret, role, time; of the others
STATE/audit/           calls that changed or took something (``hostos.files.bounded_log``)
"""

from __future__ import annotations

import hmac
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from atoll.errors import AccessDenied, UsageError
from coordinator.messages.facts import OWNER
from coordinator.sharing.claims import NO_QUOTA, Quota
from hostos.files.bounded_log import BoundedLog
from hostos.files.locked_json import changing, read_object
from protos.credentials import presented_in, secret_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MAX_OWNERS = 1000
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARS = 60
FILE, AUDIT = "owners.json", "audit"


class Role(StrEnum):
    """What an owner's token opens; each opens what the one before does."""

    WATCH = "watch"
    SUBMIT = "submit"
    ADMINISTER = "administer"


_ORDER = list(Role)
_WATCH = frozenset(
    {
        "Status",
        "Watch",
        "Logs",
        "Trace",
        "Metrics",
        "Checkpoints",
        "Contributions",
        "Credits",
        "ListAuthorities",
    }
)
_SUBMIT = frozenset({"Submit", "MakePlan", "Cancel", "ForgetJobs", "Result", "Restore"})


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner, by the hash of its token's secret."""

    name: str
    role: Role
    secret_hash: str = field(repr=False)
    created_s: float = 0.0
    quota: Quota = NO_QUOTA

    def may(self, needed: Role) -> bool:
        return _ORDER.index(self.role) >= _ORDER.index(needed)


def needed_role(method: str) -> Role:
    """Return the role that a gRPC method of the owner's services needs."""
    service, _, call = method.rpartition("/")
    if service != "/atoll.v1.Owner":
        return Role.SUBMIT  # blobs and apps
    return Role.WATCH if call in _WATCH else Role.SUBMIT if call in _SUBMIT else Role.ADMINISTER


class Owners:
    """All owners of one coordinator.

    ``first_hash``: of the first token's secret; None: without TLS there are no tokens, and whoever calls is
    the first owner.
    """

    def __init__(self, state_dir: Path, first_hash: str | None, clock: Callable[[], float]) -> None:
        self._path, self._clock = state_dir / FILE, clock
        self._log = BoundedLog(state_dir / AUDIT)
        self._first = Owner(OWNER, Role.ADMINISTER, first_hash or "")
        self._open = first_hash is None
        self.changed: Callable[[], None] = lambda: None  # called once owners, or their quotas, are others
        self._others = _owners(read_object(self._path, MAX_FILE_BYTES))

    def all(self) -> list[Owner]:
        """Every owner, the first one first."""
        return [self._first, *self._others.values()]

    def presenting(self, secret: str) -> Owner | None:
        """The owner whose secret this is; takes the same time whoever it is."""
        if self._open:
            return self._first
        given, found = secret_hash(secret), None
        for owner in self.all():
            if hmac.compare_digest(given, owner.secret_hash):
                found = owner
        return found

    def calling(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Owner:
        """The owner whose call has this metadata. Raises AccessDenied."""
        found = self.presenting(presented_in(metadata))
        if found is None:
            raise AccessDenied("this call presents no owner's token")
        return found

    def quotas(self) -> dict[str, Quota]:
        """Return what owners' jobs may have at once, where that is bounded."""
        return {owner.name: owner.quota for owner in self.all() if owner.quota != NO_QUOTA}

    def create(self, name: str, role: Role, secret: str, quota: Quota = NO_QUOTA) -> Owner:
        """Make an owner known. UsageError for a name that is none or taken, StorageError."""
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise UsageError(f"owner {name[:60]!r}; give 1 to {MAX_NAME_CHARS} printable characters")
        if name == OWNER or name in self._others or len(self._others) >= MAX_OWNERS:
            raise UsageError(f"owner {name!r} already exists, or {MAX_OWNERS} do; revoke one first")
        made = Owner(name, role, secret_hash(secret), self._clock(), quota)
        self._keep({**self._others, name: made})
        return made

    def revoke(self, name: str) -> None:
        """End an owner's rights. UsageError for who is not known, and for the first one, StorageError."""
        if name not in self._others:
            raise UsageError(
                f"no owner {name[:60]!r} to revoke; `atoll owner list` shows them (the first one's token is "
                "the file owner-token: delete it and restart `atoll serve`)"
            )
        self._keep({known: owner for known, owner in self._others.items() if known != name})

    def did(self, owner: Owner, what: str, peer: str, **facts: Any) -> None:
        """Put down what an owner is about to do. StorageError: then it is not to be done."""
        line = {"at_s": self._clock(), "owner": owner.name, "role": owner.role, "call": what, "peer": peer}
        self._log.append({**line, **facts})

    def _keep(self, owners: dict[str, Owner]) -> None:
        with changing(self._path, MAX_FILE_BYTES) as items:
            items.clear()
            items.update({name: asdict(owner) for name, owner in owners.items()})
        self._others = owners
        self.changed()


def _owners(items: dict[str, Any]) -> dict[str, Owner]:
    """Nobody has rights by a file that cannot be read."""
    try:
        return {
            name: Owner(
                name,
                Role(item["role"]),
                str(item["secret_hash"]),
                float(item["created_s"]),
                Quota(**item.get("quota", {})),
            )
            for name, item in items.items()
        }
    except (KeyError, TypeError, ValueError):
        return {}
