"""Worker daemons on a GPU: two that share one, and one beside a daemon on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import built_in, difference, plain_training, random_starts, run_local
from benchmarks.real_workers import LoopbackFleet

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TRAINING = TrainingSpec(steps=5, n_micro=4, seed=11, optimizer=Optimizer(lr=3e-3, weight_decay=0.01))
GPU = ("--device", "cuda", "--memory", "4GiB")


def kinds(fleet: LoopbackFleet) -> list[tuple[str, int]]:
    """Device of each worker, and the bytes that the worker as a whole may take of it."""
    workers = sorted(fleet.client.status().workers, key=lambda worker: worker.name)
    return [(w.device.kind, w.device.memory_limit_bytes + w.device.own_memory_bytes) for w in workers]


def test_two_daemons_on_one_gpu_are_close_to_one_stage() -> None:
    """Not bit-equal by promise: some CUDA kernels add in a varying order."""
    case = built_in("gpt2", TRAINING, 0.1)
    starts = random_starts(case.dag, 2, random.Random(9))
    with LoopbackFleet(2, options=GPU) as fleet:
        assert kinds(fleet) == [("cuda", 4 << 30)] * 2
        found = fleet.run(case, starts)
    assert difference(found, run_local(case, (0,), devices=("cuda",)), 1) <= 1e-4


@pytest.mark.parametrize("gpu", [0, 1])
@pytest.mark.parametrize("name", ["gpt2", "branches"])
def test_a_daemon_on_the_cpu_and_one_on_the_gpu_agree_with_the_cpu(name: str, gpu: int) -> None:
    """Dropout 0: the two devices draw different numbers. Kernels differ in their last bits."""
    case = built_in(name, plain_training(TRAINING), 0.0)
    starts = random_starts(case.dag, 2, random.Random(8))
    with LoopbackFleet(2, own={gpu: GPU}) as fleet:
        assert [kind for kind, _ in kinds(fleet)] == ["cuda" if n == gpu else "cpu" for n in range(2)]
        found = fleet.run(case, starts)
    assert difference(found, run_local(case, (0,)), 1) <= 2e-3
