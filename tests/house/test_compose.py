"""The containers hold no key they do not need, and gain nothing by being broken into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = sorted(name for name in SERVICES if name.startswith("worker"))
STATE = "coordinator"  # the volume with the authority's key


def volumes(service: str) -> dict[str, tuple[str, bool]]:
    """Volume -> where it is mounted, and whether read-only."""
    found = {}
    for entry in SERVICES[service].get("volumes", ()):
        name, target, *mode = entry.split(":")
        found[name] = (target, mode == ["ro"])
    return found


def test_one_coordinator_three_workers_and_an_owner_are_described() -> None:
    assert set(SERVICES) == {"coordinator", "owner", "page", "page-token", "prometheus", "grafana", *WORKERS}
    assert len(WORKERS) == 3


def test_what_watches_is_started_where_it_is_asked_for_and_reached_from_this_machine_alone() -> None:
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
        assert set(volumes(name)) == {name}, "no token, no key"
        assert {entry["source"] for entry in SERVICES[name]["configs"]} <= set(COMPOSE["configs"])
    for entry in COMPOSE["configs"].values():
        assert (ROOT / entry["file"]).is_file()


def test_the_authoritys_key_is_the_coordinators_alone() -> None:
    assert [name for name in SERVICES if STATE in volumes(name)] == ["coordinator"]
    for name in WORKERS:
        assert volumes(name) == {name: ("/state", False), "join-token": ("/tokens/join", True)}
    assert volumes("owner") == {"owner-token": ("/tokens/owner", True)}


def test_the_page_has_a_token_that_may_only_watch_and_is_reached_from_this_machine_alone() -> None:
    page, maker = SERVICES["page"], SERVICES["page-token"]
    assert page["profiles"] == maker["profiles"] == ["page"]
    assert page["ports"] == ["127.0.0.1:7780:7780"]
    assert "--published=127.0.0.1:7780" in page["command"]
    assert volumes("page") == {"page-token": ("/tokens/page", True)}
    assert volumes("page-token") == {
        "owner-token": ("/tokens/owner", True),
        "page-token": ("/tokens/page", False),
    }
    assert "--role watch" in maker["command"][-1]
    assert maker["restart"] == "no"


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_write_to_its_volumes_and_a_bounded_tmp_alone(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "size=" in service["tmpfs"][0]
    assert 0 < service["pids_limit"] <= 4096
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()
    assert "user" not in service, "the image's own user is no root"


@pytest.mark.parametrize("name", WORKERS)
def test_a_workers_memory_is_bounded(name: str) -> None:
    assert SERVICES[name]["mem_limit"].endswith("g")


def test_every_volume_has_a_name_and_none_is_a_path_of_the_host() -> None:
    used = {volume for name in SERVICES for volume in volumes(name)}
    assert used == set(COMPOSE["volumes"])
    assert not [volume for volume in used if volume.startswith((".", "/", "~", "$"))]


def test_no_token_stands_on_a_command_line_or_in_the_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert "atoll1_" not in text
    for name in WORKERS:
        assert "--token-file" in " ".join(SERVICES[name]["command"])


def test_the_image_runs_as_somebody_without_rights() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER atoll" in lines
    after = lines[lines.index("USER atoll") :]
    assert not [line for line in after if line.startswith(("RUN", "USER root"))]
