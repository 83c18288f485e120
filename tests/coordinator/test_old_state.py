"""What older commits left on disk, killed in the middle of a job, opens, and the job trains to its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atoll.federated import Floors
from benchmarks.trees import COORDINATOR, THIS, Fleet
from coordinator.config import CoordinatorConfig
from coordinator.messages.facts import Ledger, from_record
from coordinator.server import FOLDER_VERSION, serve
from coordinator.services.access.register import Register
from coordinator.storage.journal import Journal
from hostos.files.folder_version import VERSION_FILE
from protos.credentials import Authority, identity_from, new_key, signing_request
from tests.fixtures.make import DATA, FEDERATED, KINDS, PIPELINE, SAMPLES, WORKERS
from worker.config import make_config
from worker.data.policy import OPEN, UNSTATED
from worker.data.registry import set_policy, verify_dataset
from worker.federated.kept.client_state import ClientStore

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
COMMITS = (
    "9125213",
    "7d21c3e",
    "67a3b94",
    "f08d618",
    "622f406",
)  # each the last of a version of the folder, or the oldest known
BEFORE_CONSENT = COMMITS[:3]  # they knew no policies
MAX_BYTES = 4 << 20  # Git packs a write-ahead log to a fortieth
JOBS = {PIPELINE: "regression-2", FEDERATED: "scaffold-2"}
STEPS = {PIPELINE: 300, FEDERATED: 24}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=COMMITS)
def old(request: pytest.FixtureRequest) -> Path:
    """What one commit left."""
    return FIXTURES / str(request.param)


@pytest.fixture
def folder(old: Path, kind: str, tmp_path: Path) -> Path:
    """The fixture of this kind, to be changed."""
    return Path(shutil.copytree(old / kind, tmp_path / kind))


def opened(folder: Path) -> tuple[Ledger, Register]:
    """The state that the journal folds to. Fails for a record that neither of both knows."""
    ledger, register = Ledger(), Register()
    journal = Journal(folder / COORDINATOR / "journal.sqlite")
    for record in journal.replay():
        fact = from_record(record)
        if fact is None:
            before = repr(register)
            register.apply(record)
            assert repr(register) != before, f"{record.kind} is not known any more"
        else:
            ledger.apply(fact)
    journal.close()
    return ledger, register


def test_the_fixture_is_small_and_holds_no_key(old: Path) -> None:
    files = [path for path in old.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert [path for path in files if b"PRIVATE KEY" in path.read_bytes() or "token" in path.name] == []


def test_the_journal_is_read_to_its_last_record(kind: str, folder: Path) -> None:
    ledger, register = opened(folder)
    first, second = ledger.jobs.values()
    assert (first.outcome, first.steps) == ("finished", STEPS[kind])
    assert second.submitted.job == JOBS[kind]
    assert not second.outcome
    assert STEPS[kind] // 2 < second.steps < STEPS[kind]
    assert second.last_checkpoint.step > 0
    assert {worker.name for worker in register.workers.values()} == set(WORKERS)
    assert len(register.tokens) == 1
    if kind == PIPELINE:
        assert second.plan is not None
        assert len(second.plan.stages) == len(WORKERS)


def test_a_coordinator_opens_the_folder_and_finds_every_blob(kind: str, folder: Path) -> None:
    state = folder / COORDINATOR
    with serve(CoordinatorConfig(state_dir=state, entry_port=0)) as running:
        assert running.server is not None
        ledger, blobs = running.server.ledger, running.server.blobs
        assert ledger.jobs[JOBS[kind]].steps > 0
        assert [name for name in sorted(ledger.referenced_blobs()) if not blobs.path(name).is_file()] == []
    assert (state / VERSION_FILE).read_text().strip() == str(FOLDER_VERSION)


def test_a_worker_finds_its_settings(folder: Path) -> None:
    config = make_config({"state_dir": folder / "worker1"}, {})
    assert (config.name, config.threads, config.device) == ("worker1", 1, "cpu")
    assert (config.site, config.max_upload_mbit) == ("attic", 800.0)
    assert config.floors == Floors()
    assert not config.insecure


@pytest.mark.parametrize("kind", [FEDERATED], indirect=True)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_finds_its_data_and_what_it_kept_of_its_rounds(worker: str, old: Path, folder: Path) -> None:
    found = verify_dataset(folder / worker, DATA)
    policy = UNSTATED if old.name in BEFORE_CONSENT else OPEN
    assert (found.n_samples, found.policy) == (SAMPLES[worker], policy), "what was registered before asks"
    ledger, _ = opened(folder)
    closed = ledger.jobs[JOBS[FEDERATED]].steps
    state, residual = ClientStore(folder / worker, JOBS[FEDERATED]).load(closed, "topk")
    names = {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}
    assert state.slots["control"].keys() == names
    assert all(np.any(array) for array in state.slots["control"].values())
    assert residual.keys() == {"weights/layers.0.weight"}, "the others are too small for a codec"
    assert bool(residual["weights/layers.0.weight"].any())


# ---------------------------------------------------------------- to the end


def admit(folder: Path) -> None:
    """Make a CA and give each worker an identity under its old id, which is part of its federated seeds."""
    _, register = opened(folder)
    authority = Authority.open(folder / COORDINATOR / "ca")
    for worker in register.workers.values():
        key = new_key()
        certificate = authority.sign(signing_request(key, worker.name), worker.worker)
        identity_from(key, certificate, authority.certificate_pem).save(folder / worker.name / "identity")


@pytest.mark.slow
def test_the_job_trains_on_from_where_it_was_to_the_weights_of_an_undisturbed_run(
    kind: str, folder: Path
) -> None:
    begun = opened(folder)[0].jobs[JOBS[kind]].last_checkpoint.step
    admit(folder)
    for worker in WORKERS if kind == FEDERATED else ():
        set_policy(folder / worker, DATA, OPEN)
    with Fleet(THIS, folder) as fleet:
        fleet.serve()
        for worker in WORKERS:
            fleet.join(worker)
        updates = list(fleet.watch(JOBS[kind]))  # one, where the job is over before it is watched
        found = load_file(fleet.export(JOBS[kind]))
    assert updates[0]["step"] >= begun
    assert updates[-1]["step"] == STEPS[kind]
    whole = load_file(folder / "whole.safetensors")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        # Equal bits on the processor that made the fixture; another one rounds otherwise. Without what the
        # clients kept the federated weights are off by up to 0.05.
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3)
