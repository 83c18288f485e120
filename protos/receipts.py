"""Receipts: what a machine has given, signed by the coordinator's authority, for who gave it to keep.

A receipt is a JSON file: the statement as text, the signature, and the authority's certificate. Whoever has
that certificate from joining, as each worker has, can check it without the coordinator.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import AccessDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos.credentials import Authority

MAX_RECEIPT_BYTES = 4 << 20
MOST_ROWS = 4000  # of a statement, the newest days
SIGNED = b"atoll credit receipt 1\n"  # in front of what is signed: no other signature can be taken for one


@dataclass(frozen=True, slots=True)
class Receipt:
    """A statement and its signature; ``authority_pem`` is who signed."""

    statement: str
    signature: bytes
    authority_pem: bytes

    def file(self) -> str:
        """Return the file's content."""
        signature = base64.b64encode(self.signature).decode()
        held = {"statement": self.statement, "signature": signature, "authority": self.authority_pem.decode()}
        return json.dumps(held, indent=1) + "\n"


def stated(machine: str, name: str, at_s: float, rows: Iterable[dict[str, Any]]) -> str:
    """Return the statement of what a machine's devices have given until now."""
    held = {"machine": machine, "name": name, "at_s": round(at_s, 3), "credits": list(rows)}
    return json.dumps(held, sort_keys=True, separators=(",", ":"))


def signed(statement: str, authority: Authority) -> Receipt:
    """Sign a statement."""
    signature = authority.attest(SIGNED + statement.encode())
    return Receipt(statement, signature, authority.certificate_pem)


def read_receipt(text: str) -> Receipt:
    """Return the receipt in a file. UsageError where it is none."""
    try:
        held = json.loads(text[: MAX_RECEIPT_BYTES + 1])
        signature = base64.b64decode(held["signature"], validate=True)
        return Receipt(str(held["statement"]), signature, str(held["authority"]).encode())
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"no receipt: {error}; give a file that `atoll-worker credit` has written") from None


def checked(receipt: Receipt, trusted: Iterable[bytes]) -> dict[str, Any]:
    """Return what a receipt says; ``trusted``: certificates of authorities. AccessDenied where none of them
    has signed it."""
    from protos.credentials import attested

    said = SIGNED + receipt.statement.encode()
    if not any(attested(said, receipt.signature, authority_pem) for authority_pem in trusted):
        raise AccessDenied("the receipt is not signed by an authority that this machine has joined")
    held: dict[str, Any] = json.loads(receipt.statement)
    return held
