"""Joules of a job: as the system counts them, shared out by busy time, and none where nothing is counted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from worker.machine.sensors.energy import MOST_PACKAGE_W, EnergyMeter, Packages

RANGE_UJ = 262_143_328_850


@dataclass
class Machine:
    """A machine whose packages, processors and clock a test moves."""

    zones: Path
    now_s: float = 100.0
    busy_s: float = 50.0
    own_s: float = 7.0
    uj: dict[str, int] = field(default_factory=dict)

    def zone(self, name: str, kind: str, uj: int) -> Path:
        folder = self.zones / name
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{kind}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        self.set(name, uj)
        return folder / "energy_uj"

    def set(self, name: str, uj: int) -> None:
        self.uj[name] = uj
        (self.zones / name / "energy_uj").write_text(f"{uj}\n")

    def works(self, seconds: float, joules: float, *, own: float, busy: float) -> None:
        """Time goes by; each package takes ``joules``."""
        self.now_s += seconds
        self.own_s += own
        self.busy_s += busy
        for name, uj in list(self.uj.items()):
            self.set(name, (uj + round(joules * 1e6)) % RANGE_UJ)

    def packages(self) -> Packages:
        return Packages(self.zones, lambda: self.now_s)

    def meter(self) -> EnergyMeter:
        return EnergyMeter(self.packages(), lambda: self.busy_s)

    def own(self) -> float:
        return self.own_s


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "powercap")


def test_packages_alone_are_counted_of_what_powercap_lists(machine: Machine) -> None:
    """Cores lie within a package, a package's second interface counts the same again, psys is all of it."""
    machine.zone("intel-rapl:0", "package-0", 1_000)
    machine.zone("intel-rapl:1", "package-1", 5_000)
    for name, kind in (
        ("intel-rapl:0:0", "core"), ("intel-rapl-mmio:0", "package-0"), ("intel-rapl:2", "psys"),
    ):  # fmt: skip
        machine.zone(name, kind, 9_000)
    packages = machine.packages()
    assert len(packages) == 2
    assert packages.joules() == 0.0
    machine.works(1.0, 30.0, own=0, busy=0)
    assert packages.joules() == pytest.approx(60.0)


def test_a_counter_that_wraps_goes_on(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", RANGE_UJ - 10_000_000)
    packages = machine.packages()
    machine.works(1.0, 25.0, own=0, busy=0)
    assert machine.uj["intel-rapl:0"] == 15_000_000, "it has wrapped"
    assert packages.joules() == pytest.approx(25.0)
    machine.works(1.0, 5.0, own=0, busy=0)
    assert packages.joules() == pytest.approx(30.0)


def test_a_counter_that_begins_anew_adds_nothing(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 100_000_000)
    packages = machine.packages()
    machine.now_s += 1.0
    machine.set("intel-rapl:0", 0)
    assert packages.joules() == 0.0
    machine.works(1.0, 2 * MOST_PACKAGE_W, own=0, busy=0)
    assert packages.joules() == 0.0, "no package takes so much"
    machine.works(1.0, 40.0, own=0, busy=0)
    assert packages.joules() == pytest.approx(40.0)


def test_a_job_has_the_share_of_the_busy_time_that_it_computed(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    meter = machine.meter()
    machine.works(60.0, 500.0, own=1, busy=50)
    meter.begin(machine.own, 0.0)
    machine.works(10.0, 400.0, own=6, busy=8)
    assert meter.taken(machine.own, 0.0) == pytest.approx(300.0)
    machine.works(10.0, 400.0, own=0, busy=8)
    assert meter.taken(machine.own, 0.0) == 0.0, "others worked"
    machine.works(10.0, 400.0, own=9, busy=8)
    assert meter.taken(machine.own, 0.0) == pytest.approx(400.0), "no more than there is"
    machine.works(10.0, 400.0, own=-20, busy=8)
    assert meter.taken(machine.own, 0.0) == 0.0, "another process has taken its place"


def test_steps_too_short_to_be_shared_out_are_not_lost(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    meter = machine.meter()
    meter.begin(machine.own, 0.0)
    taken = []
    for _ in range(12):
        machine.works(0.02, 1.0, own=0.02, busy=0.02)
        taken.append(meter.taken(machine.own, 0.0))
    assert taken[0] == 0.0
    assert sum(taken) == pytest.approx(12.0, abs=4.0)
    machine.works(1.0, 1.0, own=1.0, busy=1.0)
    assert sum(taken) + meter.taken(machine.own, 0.0) == pytest.approx(13.0)


def test_a_gpus_counter_is_a_difference_whose_beginning_is_known(machine: Machine) -> None:
    meter = machine.meter()
    meter.begin(machine.own, 0.0)  # the process is only starting
    assert [meter.taken(machine.own, j) for j in (5e6, 5e6 + 90, 0.0, 5e6 + 100)] == [0.0, 90.0, 0.0, 10.0]
    meter.begin(machine.own, 5e6 + 200)
    for odd in (float("nan"), float("inf"), -1.0, 4e6):
        assert meter.taken(machine.own, odd) == 0.0


def test_a_machine_without_counters_has_no_joules(machine: Machine) -> None:
    meter = machine.meter()
    meter.begin(machine.own, 0.0)
    machine.works(10.0, 0.0, own=5, busy=5)
    meter.look()
    assert meter.taken(machine.own, 0.0) == 0.0
    assert machine.packages().refused is None


def test_a_counter_of_roots_alone_is_named_and_not_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = machine.zone("intel-rapl:0", "package-0", 1_000)
    if os.geteuid():
        counter.chmod(0)
    else:  # whom no mode stops
        read = Path.read_text

        def refused(path: Path, encoding: str | None = None) -> str:
            if path == counter:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, encoding)

        monkeypatch.setattr(Path, "read_text", refused)
    packages = machine.packages()
    assert (len(packages), packages.refused) == (0, counter)


@pytest.mark.parametrize("text", ["", "none", "-", "1e9"])
def test_a_counter_that_is_no_number_is_none(machine: Machine, text: str) -> None:
    machine.zone("intel-rapl:0", "package-0", 0).write_text(text)
    assert len(machine.packages()) == 0
