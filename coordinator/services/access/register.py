"""Who may enter: join tokens and the workers they let in, a fold over journalled events.

Only hashes of secrets are held. A token may expire, be used up or be revoked; a worker that was
kicked for good is barred whatever its certificate says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from atoll.errors import AccessDenied, UsageError
from protos.credentials import matching_hash, secret_hash, token_id
from protos.devices import machine_of
from protos.telemetry import Event

if TYPE_CHECKING:
    from coordinator.messages.facts import Record

MAX_TOKENS = 10_000
MAX_NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class Token:
    """One join token; ``expires_s`` and ``max_uses`` of 0 mean no bound."""

    id: str
    name: str
    secret_hash: str = field(repr=False)
    created_s: float = 0.0
    expires_s: float = 0.0
    max_uses: int = 0
    uses: int = 0
    revoked: bool = False

    def refusal(self, now_s: float) -> str | None:
        """Why it opens nothing now, None when it does."""
        if self.revoked:
            return f"join token {self.id} was revoked; ask the owner for a new one"
        if self.expires_s and now_s > self.expires_s:
            return f"join token {self.id} expired {now_s - self.expires_s:.0f} s ago; ask for a new one"
        if self.max_uses and self.uses >= self.max_uses:
            return f"join token {self.id} was used {self.uses} of {self.max_uses} times; ask for a new one"
        return None


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A worker that holds a certificate."""

    worker: str
    name: str
    token: str
    at_s: float
    barred: str = ""  # why it may not come back


@dataclass
class Register:
    """Tokens by id and workers by id; ``apply`` is the only way in."""

    tokens: dict[str, Token] = field(default_factory=dict)
    workers: dict[str, Enrolled] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Take in one journalled event; others than ours are passed over."""
        change = _CHANGES.get(record.kind)
        if change is not None:
            change(self, record.payload, record.at_s)

    def created(
        self, presented: str, name: str, lifetime_s: float, max_uses: int, now_s: float
    ) -> dict[str, Any]:
        """Payload of a ``token.created`` event. UsageError for impossible figures."""
        if len(self.tokens) >= MAX_TOKENS or len(name) > MAX_NAME_CHARS:
            raise UsageError(
                f"{len(self.tokens)} tokens of at most {MAX_TOKENS}, a name of {len(name)} characters of "
                f"at most {MAX_NAME_CHARS}; revoke old tokens or shorten the name"
            )
        if not 0 <= lifetime_s <= 10 * 365 * 86400 or max_uses < 0:
            raise UsageError(f"token lifetime {lifetime_s} s, {max_uses} uses; give 0 (no bound) or more")
        return {
            "id": token_id(presented),
            "name": name,
            "hash": secret_hash(presented),
            "expires_s": now_s + lifetime_s if lifetime_s else 0.0,
            "max_uses": max_uses,
        }

    def admit(self, presented: str, now_s: float) -> Token:
        """The token that ``presented`` opens. AccessDenied says why none."""
        by_hash = {token.secret_hash: token for token in self.tokens.values()}
        found = matching_hash(presented, by_hash)
        if found is None:
            raise AccessDenied(
                "the coordinator does not know this join token; copy it again or ask for a new one"
            )
        refusal = by_hash[found].refusal(now_s)
        if refusal is not None:
            raise AccessDenied(refusal)
        return by_hash[found]

    def named(self, worker: str) -> str:
        """Return the id of an enrolled worker, given it or a name that one alone has; else UsageError."""
        if worker in self.workers:
            return worker
        found = [known.worker for known in self.workers.values() if known.name == worker]
        if len(found) != 1:
            shown = f" ({', '.join(found[:8])}); give the id" if found else ""
            raise UsageError(f"{worker[:80]!r} names {len(found)} of the enrolled workers{shown}")
        return found[0]

    def refusal(self, worker: str) -> str | None:
        """Why this worker, or the machine whose device it is, may not open a session; None when it may."""
        known = self.workers.get(machine_of(worker))
        if known is None:
            return f"worker {worker} is not enrolled here; join again with a token"
        return f"worker {worker} was removed for good: {known.barred}" if known.barred else None


def _token_created(register: Register, payload: Mapping[str, Any], at_s: float) -> None:
    register.tokens[payload["id"]] = Token(
        payload["id"], payload["name"], payload["hash"], at_s, payload["expires_s"], payload["max_uses"]
    )


def _token_revoked(register: Register, payload: Mapping[str, Any], at_s: float) -> None:
    token = register.tokens[payload["id"]]
    register.tokens[token.id] = replace(token, revoked=True)


def _worker_enrolled(register: Register, payload: Mapping[str, Any], at_s: float) -> None:
    worker, token = payload["worker"], register.tokens.get(payload["token"])
    # Ids of 24 bits were given out unchecked. Of two machines with one id neither may lift what bars it.
    register.workers.setdefault(worker, Enrolled(worker, payload["name"], payload["token"], at_s))
    if token is not None:
        register.tokens[token.id] = replace(token, uses=token.uses + 1)


def _worker_kicked(register: Register, payload: Mapping[str, Any], at_s: float) -> None:
    known = register.workers.get(machine_of(payload["worker"]))
    if payload.get("forgotten"):  # a coordinator that does not know the word bars it
        register.workers.pop(payload["worker"], None)
    elif known is not None and payload["for_good"]:
        register.workers[known.worker] = replace(known, barred=payload["reason"] or "kicked by the owner")


_CHANGES: dict[str, Callable[[Register, Mapping[str, Any], float], None]] = {
    Event.TOKEN_CREATED: _token_created,
    Event.TOKEN_REVOKED: _token_revoked,
    Event.WORKER_ENROLLED: _worker_enrolled,
    Event.WORKER_KICKED: _worker_kicked,
}
