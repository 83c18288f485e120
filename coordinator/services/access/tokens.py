"""Tokens: made here, journalled by their hash, and two kept as text in the state folder: the owner's, and
the one of the join command that `atoll serve` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from coordinator.messages.facts import Record
from hostos.files.private_files import write_private
from protos.credentials import JoinToken, new_token, of_one_coordinator, secret_hash
from protos.telemetry import Event

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.services.access.authorities import Authorities
    from coordinator.services.access.register import Register, Token
    from coordinator.shell import Shell

FIRST_TOKEN = "first"  # noqa: S105 - its name in the list


class Tokens:
    """Tokens of a coordinator whose workers call ``work_port``; ``authority`` None: no TLS, no tokens."""

    def __init__(
        self, shell: Shell, register: Register, authority: Authorities | None, work_port: int
    ) -> None:
        self._shell, self._register = shell, register
        self._authority, self._work_port = authority, work_port
        config = self._config = shell.config
        self._copies = {
            config.owner_token_path: config.owner_token_copy,
            config.join_token_path: config.join_token_copy,
        }

    def new(self, instead: str) -> JoinToken:
        """Make a token that opens nothing yet. UsageError without TLS; ``instead``: how it goes there."""
        if self._authority is None:
            raise UsageError(f"this coordinator runs with --insecure: {instead}")
        return new_token(self._authority, self._work_port)

    def admit(self, token: JoinToken, name: str, lifetime_s: float, max_uses: int) -> Token:
        """Let workers join with a token. Raises UsageError for impossible figures, StorageError."""
        shell, now_s = self._shell, self._shell.clock()
        payload = self._register.created(token.presented, name, lifetime_s, max_uses, now_s)
        record = Record(Event.TOKEN_CREATED, now_s, payload)
        shell.journal.append([record])
        self._register.apply(record)
        shell.note(Event.TOKEN_CREATED, token=payload["id"], name=name)
        return self._register.tokens[payload["id"]]

    def owner_token(self) -> str | None:
        """Return the first owner's token, made at the first start; None without TLS."""
        if self._authority is None:
            return None
        path = self._config.owner_token_path
        token = self._stored(path)
        if token is None or not of_one_coordinator(token.ca_pem, self._authority.trusted_pem):
            token = new_token(self._authority, self._work_port)
        return self._keep(path, token, self._authority)

    def join_token(self) -> str | None:
        """Return the token of the printed join command: the kept one while it opens; None without TLS."""
        if self._authority is None:
            return None
        config, path = self._config, self._config.join_token_path
        token = self._stored(path)
        if token is not None:
            hashed = secret_hash(token.presented)
            known = next((t for t in self._register.tokens.values() if t.secret_hash == hashed), None)
            if known is None or known.refusal(self._shell.clock()) is not None:
                token = None
        if token is None:
            token = new_token(self._authority, self._work_port)
            self.admit(token, FIRST_TOKEN, config.join_token_lifetime_s, config.join_token_uses)
        return self._keep(path, token, self._authority)

    def name_authorities(self, authority: Authorities) -> None:
        """Have both kept tokens name the authorities that are trusted now. StorageError."""
        for path in self._copies:
            if (token := self._stored(path)) is not None:
                self._keep(path, token, authority)

    def _stored(self, path: Path) -> JoinToken | None:
        return JoinToken.decode(path.read_text()) if path.exists() else None

    def _keep(self, path: Path, token: JoinToken, authority: Authorities) -> str:
        text = replace(token, ca_pem=authority.trusted_pem).encode()
        for target in (path, self._copies[path]):
            if target is not None:
                write_private(target, text.encode() + b"\n")
        return text
