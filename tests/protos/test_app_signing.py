"""Who signed an app: only a signature of its hash by that very key counts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.errors import UsageError
from protos import atoll_apps_pb2 as pb
from protos.app_signing import checked_publisher, make_key, sign, signer

HASH, OTHER = "ab" * 32, "cd" * 32


def test_a_signature_names_its_publisher_and_holds_for_one_hash(tmp_path: Path) -> None:
    who = make_key(tmp_path / "lab.key")
    assert stat.S_IMODE((tmp_path / "lab.key").stat().st_mode) == 0o600
    key, signature = sign(tmp_path / "lab.key", HASH)
    app = pb.AppIdentity(hash=HASH, signer=key, signature=signature)
    assert signer(app) == who == checked_publisher(who)
    assert signer(pb.AppIdentity(hash=OTHER, signer=key, signature=signature)) == ""
    make_key(tmp_path / "other.key")
    forger, _ = sign(tmp_path / "other.key", HASH)
    assert signer(pb.AppIdentity(hash=HASH, signer=forger, signature=signature)) == ""


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 32, b"x" * 64])
def test_nonsense_is_nobodys_signature(wrong: bytes) -> None:
    assert signer(pb.AppIdentity(hash=HASH, signer=wrong, signature=wrong)) == ""
    assert signer(pb.AppIdentity(hash="no hash", signer=wrong, signature=wrong)) == ""


def test_a_key_is_never_replaced_and_a_wrong_file_or_publisher_is_named(tmp_path: Path) -> None:
    make_key(tmp_path / "lab.key")
    with pytest.raises(UsageError, match="already exists"):
        make_key(tmp_path / "lab.key")
    (tmp_path / "no.key").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    for name in ("no.key", "missing.key"):
        with pytest.raises(UsageError, match=r"atoll flower key"):
            sign(tmp_path / name, HASH)
    for text in ("", "ed25519:", "ed25519:AAAA", "ed25519:" + "!" * 44):
        with pytest.raises(UsageError, match="is not a publisher"):
            checked_publisher(text)
