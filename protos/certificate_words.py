"""Reasons for which TLS refuses a certificate, in words: it ended, a clock is wrong, another coordinator's.

gRPC reports no more than that verification failed. The dates distinguish the cases: our own
certificate lies on the disk, and the server's is read by a plain TLS handshake that trusts nothing it is
shown.
"""

from __future__ import annotations

import datetime as dt
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from atoll.errors import AccessDenied, AtollError, ConnectionFailed

HANDSHAKE_TIMEOUT_S = 5.0


_UNSEEN = (
    "the certificate that {address} shows is not accepted: another coordinator runs there, its certificate "
    "ended, or a clock is wrong; `atoll-worker doctor` says which"
)


def issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """True when ``ca`` signed the certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def own_refusal(certificate: x509.Certificate, now: dt.datetime) -> str:
    """Explain why this machine's certificate is not valid at ``now``, with what to do; "" if it is."""
    why = _out_of_date(certificate, now)
    if not why:
        return ""
    if now < certificate.not_valid_before_utc:
        return f"this machine's certificate {why}: set the clock"
    return f"this machine's certificate {why}: join again with a new token, or set the clock if it is wrong"


def clock_words(offset_s: float) -> str:
    """How far this machine's clock is off; ``offset_s``: the coordinator's clock minus ours."""
    units = (("days", 86_400.0), ("hours", 3600.0), ("seconds", 1.0))
    name, unit = next((u for u in units if abs(offset_s) >= u[1]), units[-1])
    side = "behind" if offset_s > 0 else "ahead of"
    return f"this machine's clock is {abs(offset_s) / unit:.1f} {name} {side} the coordinator's"


def server_refusal(address: str, shown_pem: bytes, ca_pem: bytes, now: dt.datetime) -> str:
    """Explain why the certificate of ``address`` is not accepted under ``ca_pem``, with what to do."""
    shown, trusted = x509.load_pem_x509_certificate(shown_pem), x509.load_pem_x509_certificates(ca_pem)
    if shown not in trusted and not any(issued_by(shown, ca) for ca in trusted):
        return (
            f"{address} shows a certificate that the coordinator of this token did not issue: another "
            "coordinator runs there, its state was reset, or its authority was exchanged (`atoll ca rotate`) "
            "while this machine was away; ask for a token of the one that runs there"
        )
    why = _out_of_date(shown, now)
    if not why:
        return f"{address} is of this coordinator's fleet but not the coordinator; is it a worker's port?"
    if now < shown.not_valid_before_utc:
        what = "set this machine's clock, or the coordinator's if that is ahead"
    else:
        what = "restart `atoll serve` there, which makes itself a new one, or set the clock if it is wrong"
    return f"the coordinator's certificate at {address} {why}: {what}"


def refused_server(address: str, ca_pem: bytes | None) -> AccessDenied:
    """The error for a coordinator whose certificate gRPC did not accept under ``ca_pem``.

    Connects to ``address`` once more, to see what it shows.
    """
    try:
        if ca_pem is not None:
            shown = shown_certificate(address)
            return AccessDenied(server_refusal(address, shown, ca_pem, dt.datetime.now(dt.UTC)))
    except (AtollError, ValueError):
        pass  # it has gone meanwhile
    return AccessDenied(_UNSEEN.format(address=address))


def shown_certificate(address: str, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> bytes:
    """Fetch the certificate that HOST:PORT shows to anybody, PEM; its owner is not verified.

    Raises AccessDenied without TLS there, ConnectionFailed.
    """
    host, _, port = address.rpartition(":")
    try:
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=timeout_s)
    except ssl.SSLError as error:
        raise AccessDenied(
            f"no TLS session with {address}: {error.reason or error}; is it the coordinator's entry port, "
            "and was it started without --insecure?"
        ) from None
    except OSError as error:
        raise ConnectionFailed(
            f"{address} shows no certificate: {error.strerror or error}; is `atoll serve` running there "
            "on that port?"
        ) from None
    return shown.encode()


def _out_of_date(certificate: x509.Certificate, now: dt.datetime) -> str:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    clock = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
    if now < begins:
        return f"is not valid before {begins:%Y-%m-%d %H:%M} UTC, and {clock}"
    return f"ended on {ends:%Y-%m-%d %H:%M} UTC, and {clock}" if now > ends else ""
