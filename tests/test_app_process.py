"""What an app's child gets of its worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.app_process import _environment

if TYPE_CHECKING:
    import pytest


def test_an_app_sees_no_credentials_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = _environment(2)
    assert "secret" not in found.values()
    assert (found["PATH"], found["CUDA_VISIBLE_DEVICES"]) == ("/bin", "1")
