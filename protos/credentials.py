"""TLS identities and join tokens: who may enter, and how two ends know each other.

The coordinator is its own certificate authority (EC P-256). A join token carries the CA's
certificate, so the first call of a new worker is already verified; the coordinator answers it
with a certificate for the worker's key. From then on both ends of every connection show a
certificate, and a client checks the name: ``coordinator`` or the peer's worker id, wherever the
machine happens to live. No secret appears in a repr, an error or a log.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import re
import secrets
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import AccessDenied, StorageError
from hostos.files.private_files import private_folder, write_private
from hostos.net.addresses import join_address
from protos.certificate_words import issued_by, own_refusal
from protos.short_tokens import (
    HOST,
    MAX_AUTHORITIES,
    MAX_SHORT_CHARS,
    PIN_BYTES,
    SECRET_BYTES,
    ShortToken,
    is_short,
    sealed,
    unsealed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

COORDINATOR = "coordinator"
WORKER_ID = re.compile(r"w-[0-9a-z](?:[0-9a-z-]{0,40}[0-9a-z])?")
"""A worker's id is one DNS label, so that TLS itself can check it. Those given out before ids had 64 bits
are six hex digits, and remain good."""
WORKER_ID_BYTES = 8

CA_LIFETIME = dt.timedelta(days=3650)
CERTIFICATE_LIFETIME = dt.timedelta(days=365)
RENEW_BEFORE = dt.timedelta(days=30)
RENEW_SHARE = 3  # a short certificate is renewed a third of its time ahead
CLOCK_SKEW = dt.timedelta(days=1)
"""Tolerated lag of a volunteer's clock, in which a fresh certificate would look not yet valid."""

MAX_PEM_BYTES = 16 * 1024
MAX_TOKEN_CHARS = 8 * 1024
AUTHORIZATION, BEARER = "authorization", "Bearer "  # metadata of a call with a token
TOKEN_PREFIX = "atoll1_"  # noqa: S105 - names the format, opens nothing
_TOKEN_HEAD = struct.Struct("!BHB")  # version, work port, secret length
_TOKEN_OF_ONE, _TOKEN_OF_SEVERAL = 1, 2  # authorities; of several each has its length before it
_TOKEN_LENGTH = struct.Struct("!H")


# ---------------------------------------------------------------- identities

CERTIFICATE_BEGINS = b"-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Identity:
    """Name of one end, its private key, certificate and the CA it trusts; two while one takes the other's
    place, the newer one first."""

    name: str  # worker id, or "coordinator"
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate_pem)

    def expires(self) -> dt.datetime:
        return _certificate(self.certificate_pem).not_valid_after_utc

    def issued(self) -> dt.datetime:
        """Moment at which the certificate was made."""
        return _certificate(self.certificate_pem).not_valid_before_utc + CLOCK_SKEW

    def renewal_due(self) -> dt.datetime:
        """Moment from which the certificate is to be renewed."""
        certificate = _certificate(self.certificate_pem)
        ends = certificate.not_valid_after_utc
        return ends - min(RENEW_BEFORE, (ends - certificate.not_valid_before_utc) / RENEW_SHARE)

    def of_newest(self) -> bool:
        """True when the newest of the authorities that it trusts issued its certificate."""
        certificate, newest = _certificate(self.certificate_pem), authorities_in(self.ca_pem)[0]
        return issued_by(certificate, _certificate(newest))

    def trusting(self, ca_pem: bytes) -> Identity:
        """The same, trusting the authorities of ``ca_pem`` alone.

        Raises AccessDenied when none of them issued its certificate.
        """
        if ca_pem == self.ca_pem:
            return self
        certificate = _certificate(self.certificate_pem)
        if not any(issued_by(certificate, _certificate(ca)) for ca in authorities_in(ca_pem)):
            raise AccessDenied(
                "the authority that issued this machine's certificate was exchanged and is trusted no more: "
                "join again with a new token (`atoll token create` makes one)"
            )
        return replace(self, ca_pem=ca_pem)

    def save(self, directory: Path) -> None:
        """Write key, certificate and CA with mode 0600 into ``directory`` (0700).

        Raises StorageError when the disk refuses.
        """
        private_folder(directory)
        write_private(directory / "ca.pem", self.ca_pem)
        # In one file: whoever is killed in between has a whole identity, the one before or this one.
        write_private(directory / "key.pem", self.key_pem + self.certificate_pem)
        write_private(directory / "certificate.pem", self.certificate_pem)  # versions up to 0.7.0 read it

    @classmethod
    def load(cls, directory: Path) -> Identity | None:
        """The identity stored in ``directory``, or None when there is none.

        Raises AccessDenied when the stored files do not belong together.
        """
        key, certificate, ca = (directory / name for name in ("key.pem", "certificate.pem", "ca.pem"))
        if not key.is_file() or not ca.is_file():
            return None
        held = _read(key)
        begin = held.find(CERTIFICATE_BEGINS)
        if begin >= 0:
            return identity_from(held[:begin], held[begin:], _read(ca))
        return identity_from(held, _read(certificate), _read(ca)) if certificate.is_file() else None


class CurrentIdentity:
    """The identity that new connections of a process show; connections that are open keep theirs. From any
    thread."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @property
    def now(self) -> Identity:
        return self._identity

    def replace(self, identity: Identity) -> None:
        """Show ``identity`` from now on."""
        self._identity = identity


def identity_from(
    key_pem: bytes, certificate_pem: bytes, ca_pem: bytes, now: dt.datetime | None = None
) -> Identity:
    """Check that key, certificate and CA belong together at ``now``; the name is the certificate's.

    Raises AccessDenied.
    """
    name = verify_certificate(certificate_pem, ca_pem, now)
    public = _certificate(certificate_pem).public_key()
    if _spki(_private_key(key_pem).public_key()) != _spki(public):
        raise AccessDenied(f"the private key does not belong to the certificate of {name}; join again")
    return Identity(name, key_pem, certificate_pem, ca_pem)


def new_key() -> bytes:
    """A fresh P-256 private key, PEM."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def signing_request(key_pem: bytes, name: str) -> bytes:
    """CSR (PEM) for ``key_pem``; the coordinator chooses the id, ``name`` is for people."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64] or "worker")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(_private_key(key_pem), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def new_worker_id() -> str:
    """A random id of 64 bits such as ``w-7f3a2c9e05b1d846``; the caller checks that it is not taken."""
    return "w-" + secrets.token_hex(WORKER_ID_BYTES)


def fingerprint(certificate_pem: bytes) -> str:
    """SHA-256 of the certificate's DER form, hex; what a person may compare by eye."""
    return _certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()


def verify_certificate(certificate_pem: bytes, ca_pem: bytes, now: dt.datetime | None = None) -> str:
    """Return the name that one of the authorities vouches for.

    Raises AccessDenied when none signed it or it is not valid at ``now``.
    """
    certificate, trusted = _certificate(certificate_pem), authorities_in(ca_pem)
    now = now or dt.datetime.now(dt.UTC)
    if not any(issued_by(certificate, _certificate(ca)) for ca in trusted):
        raise AccessDenied("certificate was not issued by this coordinator; join with a new token")
    if refused := own_refusal(certificate, now):
        raise AccessDenied(refused)
    return _dns_name(certificate)


def authorities_in(ca_pem: bytes) -> tuple[bytes, ...]:
    """The certificates that ``ca_pem`` consists of, PEM each. Raises AccessDenied when they are none, or too
    many."""
    if len(ca_pem) > MAX_PEM_BYTES:
        raise AccessDenied(f"authorities of {len(ca_pem)} bytes; at most {MAX_PEM_BYTES}")
    try:
        found = x509.load_pem_x509_certificates(ca_pem)
    except ValueError:
        raise AccessDenied("the authority's certificate is malformed; join again") from None
    if not 1 <= len(found) <= MAX_AUTHORITIES:
        raise AccessDenied(f"{len(found)} authorities; 1 to {MAX_AUTHORITIES} are trusted at once")
    return tuple(one.public_bytes(serialization.Encoding.PEM) for one in found)


def of_one_coordinator(one_pem: bytes, other_pem: bytes) -> bool:
    """True when the two have an authority in common."""
    return not set(authorities_in(one_pem)).isdisjoint(authorities_in(other_pem))


# ---------------------------------------------------------------- the coordinator's authority


@dataclass(frozen=True, slots=True)
class Authority:
    """The coordinator's certificate authority; lives in ``<state>/ca``."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    lifetime: dt.timedelta | None = None  # of the certificates that it issues; None: CERTIFICATE_LIFETIME

    @classmethod
    def open(cls, directory: Path, lifetime: dt.timedelta | None = None) -> Authority:
        """Load the CA in ``directory``, or create it there once; it issues certificates of ``lifetime``.

        Raises StorageError when the disk refuses or only half of a CA is there.
        """
        key_path, certificate_path = directory / "ca-key.pem", directory / "ca.pem"
        if certificate_path.exists():
            if not key_path.exists():
                raise StorageError(f"{key_path} is missing beside ca.pem; restore it from a backup")
            found = cls(_read(key_path), _read(certificate_path), lifetime)
            found._check(directory)
            return found
        private_folder(directory)
        made = cls._create(lifetime)
        write_private(key_path, made.key_pem)
        # Certificate last and by rename: a crash in between leaves no CA, not half of one.
        write_private(certificate_path, made.certificate_pem)
        return made

    def _check(self, directory: Path) -> None:
        """StorageError where the files are damaged, or not of one authority."""
        damage = ""
        for name, pem, loaded in (
            ("ca.pem", self.certificate_pem, _certificate),
            ("ca-key.pem", self.key_pem, _private_key),
        ):
            try:
                loaded(pem)
            except AccessDenied:
                damage = damage or f"{directory / name} is damaged"
        if not damage and _private_key(self.key_pem).public_key() != _public_key(self.certificate_pem):
            damage = f"{directory / 'ca.pem'} and ca-key.pem are of two authorities"
        if damage:
            raise StorageError(
                f"{damage}; restore both from a backup of the state folder. Without one, move {directory} "
                "away: the next start makes another authority, and every worker and owner must join again"
            )

    @classmethod
    def _create(cls, lifetime: dt.timedelta | None) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"atoll {secrets.token_hex(4)}")])
        builder = (
            _builder(key.public_key(), name, name, CA_LIFETIME, None)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
        )
        certificate = builder.sign(key, hashes.SHA256())
        return cls(_key_pem(key), certificate.public_bytes(serialization.Encoding.PEM), lifetime)

    @property
    def trusted_pem(self) -> bytes:
        return self.certificate_pem

    def since(self) -> dt.datetime:
        """Moment at which it was made."""
        return _certificate(self.certificate_pem).not_valid_before_utc + CLOCK_SKEW

    def server_identity(self, now: dt.datetime | None = None) -> Identity:
        """A fresh key and certificate for the coordinator's own ports; made at every start and each week."""
        key_pem = new_key()
        return Identity(
            COORDINATOR,
            key_pem,
            self._issue(_private_key(key_pem).public_key(), COORDINATOR, now),
            self.certificate_pem,
        )

    def sign(self, csr_pem: bytes, worker_id: str, now: dt.datetime | None = None) -> bytes:
        """Certificate (PEM) that binds the CSR's key to ``worker_id``; the CSR's own names are ignored.

        Raises AccessDenied for a malformed request or id.
        """
        if not WORKER_ID.fullmatch(worker_id):
            raise AccessDenied(f"worker id {worker_id[:60]!r} is not of the form w-7f3a2c9e05b1d846")
        if len(csr_pem) > MAX_PEM_BYTES:
            raise AccessDenied(f"certificate request of {len(csr_pem)} bytes; at most {MAX_PEM_BYTES}")
        try:
            request = x509.load_pem_x509_csr(csr_pem)
            key = request.public_key()
            valid = request.is_signature_valid
        except ValueError:
            raise AccessDenied("certificate request is malformed; update this worker") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise AccessDenied("certificate request must hold a P-256 key; update this worker")
        if not valid:
            raise AccessDenied("certificate request is not signed by its own key")
        return self._issue(key, worker_id, now)

    def attest(self, statement: bytes) -> bytes:
        """Return a signature of a statement, which begins with what kind of statement it is."""
        return _private_key(self.key_pem).sign(statement, ec.ECDSA(hashes.SHA256()))

    def _issue(self, public: ec.EllipticCurvePublicKey, name: str, now: dt.datetime | None) -> bytes:
        ca = _certificate(self.certificate_pem)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(public, subject, ca.subject, self.lifetime or CERTIFICATE_LIFETIME, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        signed = builder.sign(_private_key(self.key_pem), hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


# ---------------------------------------------------------------- join tokens


def attested(statement: bytes, signature: bytes, certificate_pem: bytes) -> bool:
    """Return whether the authority of this certificate has signed a statement."""
    key = _public_key(certificate_pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Token that ``atoll serve`` prints and ``atoll-worker join --token`` takes."""

    ca_pem: bytes = field(repr=False)  # one authority, or the one in force and the one that takes its place
    secret: bytes = field(repr=False)
    work_port: int  # a hint; 0 = ask the entry port

    @property
    def presented(self) -> str:
        """The part that travels to the coordinator: the secret alone, printable."""
        return base64.urlsafe_b64encode(self.secret).decode().rstrip("=")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call that presents this token: the other end looks at it before it takes in more."""
        return ((AUTHORIZATION, f"{BEARER}{self.presented}"),)

    def encode(self) -> str:
        """``atoll1_`` + base64url(version, port, secret, CA DER, crc32)."""
        ders = [
            _certificate(ca).public_bytes(serialization.Encoding.DER) for ca in authorities_in(self.ca_pem)
        ]
        version = _TOKEN_OF_ONE if len(ders) == 1 else _TOKEN_OF_SEVERAL
        body = _TOKEN_HEAD.pack(version, self.work_port, len(self.secret)) + self.secret
        body += ders[0] if len(ders) == 1 else b"".join(_TOKEN_LENGTH.pack(len(der)) + der for der in ders)
        return sealed(TOKEN_PREFIX, body)

    @classmethod
    def decode(cls, text: str) -> JoinToken:
        """Parse a token as pasted by a person. Raises AccessDenied, saying what is wrong with it."""
        text = "".join(text.split())
        if is_short(text):
            raise AccessDenied(
                "this is a short join token, for `atoll-worker join`; here an owner's token is needed, as in "
                "the file owner-token of the coordinator's state folder"
            )
        if not text.startswith(TOKEN_PREFIX):
            raise AccessDenied(f"this is not a join token: it must begin with {TOKEN_PREFIX}; copy it whole")
        if len(text) > MAX_TOKEN_CHARS:
            raise AccessDenied(
                f"join token of {len(text)} characters; at most {MAX_TOKEN_CHARS}; copy it whole"
            )
        body = unsealed(text.removeprefix(TOKEN_PREFIX), _TOKEN_HEAD.size)
        version, port, secret_bytes = _TOKEN_HEAD.unpack_from(body)
        if version not in (_TOKEN_OF_ONE, _TOKEN_OF_SEVERAL):
            raise AccessDenied(
                f"join token of version {version}, this is version {_TOKEN_OF_SEVERAL}; update atoll"
            )
        start = _TOKEN_HEAD.size
        secret, rest = body[start : start + secret_bytes], body[start + secret_bytes :]
        if len(secret) < SECRET_BYTES or len(secret) != secret_bytes:
            raise AccessDenied("join token holds no usable secret; ask for a new one")
        try:
            pems = [
                x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
                for der in ([rest] if version == _TOKEN_OF_ONE else _lengths_taken_off(rest))
            ]
            token = cls(b"".join(pems), secret, port)
            authorities_in(token.ca_pem)
        except (ValueError, AccessDenied):
            raise AccessDenied("join token holds no readable certificate; ask for a new one") from None
        if token.encode() != text:
            raise AccessDenied("join token is not written as it was issued; copy it again")
        return token


def pin_of(certificate_pem: bytes) -> bytes:
    """The part of a certificate's SHA-256 that short tokens name."""
    return _certificate(certificate_pem).fingerprint(hashes.SHA256())[:PIN_BYTES]


def shortened(token: JoinToken, host: str = "", port: int = 0) -> ShortToken:
    """The short form of ``token``, with the coordinator's address where there is room for it."""
    pins = tuple(pin_of(ca) for ca in authorities_in(token.ca_pem))
    made = ShortToken(token.secret, pins, host, port)
    fits = host and HOST.fullmatch(host) and len(made.encode()) <= MAX_SHORT_CHARS
    return made if fits else ShortToken(token.secret, pins)


def opened(short: ShortToken, ca_pem: bytes) -> JoinToken:
    """The long form of ``short``, with those authorities of ``ca_pem`` that it names.

    Raises AccessDenied when there is none: then ``ca_pem`` is not of the coordinator that made the token.
    """
    named = [ca for ca in authorities_in(ca_pem) if pin_of(ca) in short.pins]
    if not named:
        raise AccessDenied(
            "the authority that was shown is not the token's: another coordinator runs there, or somebody in "
            "between answers in its place; nothing was sent. Ask for a token of the one that runs there"
        )
    return JoinToken(b"".join(named), short.secret, 0)


def read_token(text: str) -> JoinToken | ShortToken:
    """The token of either length. Raises AccessDenied."""
    return ShortToken.decode(text) if is_short(text) else JoinToken.decode(text)


def join_command(token: JoinToken, host: str, port: int) -> str:
    """The command with which a worker joins, with the short form of ``token``; ``host`` "" where the
    coordinator does not know how others reach it."""
    short = shortened(token, host, port)
    where = "" if short.host else f"{join_address(host or 'HOST', port)} "
    return f"atoll-worker join {where}--token {short.encode()}"


def presented_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The secret that a call's metadata presents, "" when it presents none."""
    given = str(dict(metadata or ()).get(AUTHORIZATION, ""))
    return given.removeprefix(BEARER)[:MAX_TOKEN_CHARS] if given.startswith(BEARER) else ""


def _lengths_taken_off(data: bytes) -> list[bytes]:
    """The pieces of ``data``, each of which has its length before it. Raises ValueError."""
    pieces = []
    while data:
        if len(data) < _TOKEN_LENGTH.size:
            raise ValueError("cut off")
        end = _TOKEN_LENGTH.size + _TOKEN_LENGTH.unpack_from(data)[0]
        pieces.append(data[_TOKEN_LENGTH.size : end])
        data = data[end:]
    return pieces


class Trusted(Protocol):
    """The authority of a coordinator, or the two of it while one takes the other's place."""

    @property
    def trusted_pem(self) -> bytes:
        """Their certificates, the newer one first."""


def new_token(authority: Trusted, work_port: int = 0) -> JoinToken:
    """A token with a fresh 128-bit secret; store only ``secret_hash(token.presented)``."""
    return JoinToken(authority.trusted_pem, secrets.token_bytes(SECRET_BYTES), work_port)


def secret_hash(presented: str) -> str:
    """Hash of a secret that the coordinator stores: SHA-256, hex. The secret has 128 random bits, so
    a slow hash would add nothing."""
    return hashlib.sha256(b"atoll join secret\0" + presented.encode("utf-8", "replace")).hexdigest()


def token_id(presented: str) -> str:
    """Short public name of a token, for lists and logs; says nothing of the secret."""
    return "t-" + secret_hash(presented)[:8]


def matching_hash(presented: str, stored: Iterable[str]) -> str | None:
    """The stored hash that ``presented`` opens, or None; takes the same time either way."""
    given = secret_hash(presented[:MAX_TOKEN_CHARS])
    found = None
    for candidate in stored:
        if hmac.compare_digest(given, candidate):
            found = candidate
    return found


# ---------------------------------------------------------------- gRPC credentials


def server_credentials(identity: Identity | CurrentIdentity, *, mutual: bool) -> grpc.ServerCredentials:
    """Credentials of a port, which shows each new connection what is current. ``mutual``: work and peer
    ports ask for a certificate; the entry port cannot."""
    current = identity if isinstance(identity, CurrentIdentity) else CurrentIdentity(identity)
    shown = current.now

    def certificates(identity: Identity) -> grpc.ServerCertificateConfiguration:
        chain = [(identity.key_pem, identity.certificate_pem)]
        return grpc.ssl_server_certificate_configuration(
            chain, root_certificates=identity.ca_pem if mutual else None
        )

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (newest := current.now) is shown:
            return None
        shown = newest
        return certificates(newest)

    fetch: Any = renewed  # grpc-stubs lacks the None that its documentation asks for
    return grpc.dynamic_ssl_server_credentials(certificates(shown), fetch, mutual)


def channel_credentials(ca_pem: bytes, identity: Identity | None = None) -> grpc.ChannelCredentials:
    """Trust only ``ca_pem``; show ``identity`` where the port is mutual."""
    if identity is None:
        return grpc.ssl_channel_credentials(root_certificates=ca_pem)
    return grpc.ssl_channel_credentials(
        root_certificates=ca_pem, private_key=identity.key_pem, certificate_chain=identity.certificate_pem
    )


def name_options(expected: str) -> list[tuple[str, str]]:
    """Channel options that make TLS demand the name ``expected``, whatever address was dialled."""
    return [("grpc.ssl_target_name_override", expected), ("grpc.default_authority", expected)]


def peer_name(auth_context: Mapping[str, object]) -> str | None:
    """The name in the client's verified certificate; None without one (insecure or entry port).

    ``auth_context``: of a gRPC servicer context, property -> values.
    """
    if _values(auth_context, "transport_security_type") != [b"ssl"]:
        return None
    names = _values(auth_context, "x509_subject_alternative_name")
    return names[0].decode("ascii", "replace") if len(names) == 1 else None


def _values(auth_context: Mapping[str, object], key: str) -> list[bytes]:
    found = auth_context.get(key)
    return [value for value in found if isinstance(value, bytes)] if isinstance(found, list | tuple) else []


# ---------------------------------------------------------------- helpers


def _builder(
    public: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    lifetime: dt.timedelta,
    now: dt.datetime | None,
) -> x509.CertificateBuilder:
    now = now or dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(pem: bytes) -> x509.Certificate:
    if len(pem) > MAX_PEM_BYTES:
        raise AccessDenied(f"certificate of {len(pem)} bytes; at most {MAX_PEM_BYTES}")
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise AccessDenied("certificate is malformed; join again") from None


def _public_key(certificate_pem: bytes) -> object:
    return _certificate(certificate_pem).public_key()


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise AccessDenied("private key is malformed; remove the identity and join again") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AccessDenied("private key is not an elliptic-curve key; remove the identity and join again")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _spki(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise AccessDenied("certificate does not hold an elliptic-curve key")
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _dns_name(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        raise AccessDenied("certificate carries no name") from None
    names = extension.value.get_values_for_type(x509.DNSName)
    if len(names) != 1:
        raise AccessDenied(f"certificate carries {len(names)} names, expected one")
    return str(names[0])


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
