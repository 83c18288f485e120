"""Every honest graph of the tests and the examples: what no check may refuse and no cut may change.

``GRAPHS`` names them, ``honest(name)`` captures one (once a process), ``captured_dags()`` yields
the op-DAGs of all in both modes, and a test over ``NAMES`` takes one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.job import Precision, TrainingSpec
from atoll.opdag import OpDag
from benchmarks.oracle import Case, case_from
from coordinator.capture.capture import Captured, capture
from coordinator.client.job_file import load_job
from experiments.datasets import download
from strategies.moon_module import Moon
from strategies.vhl_module import Vhl, VhlLoss
from tests.captured_models import ALL, captured_model
from tests.coordinator.capture.test_capture import Model, Recurrent, X
from tests.coordinator.capture.test_cut_rules import TRAPS
from tests.examples.test_federated_examples import DIGITS
from tests.models import Example
from tests.strategies.test_modules import SPEC, Net, batch, fedimpro

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DROPOUT = 0.1
JOB_FILES: dict[str, tuple[str, ...]] = {
    "gpt": ("WIDTH=64", "LAYERS=2"),
    "bert_tiny": ("SAMPLES=512",),
    "two_sites": ("WIDTH=64", "LAYERS=2"),
    "mlp_digits": (),
    "federated_brown": ("MICRO_BATCH=4", "WIDTH=16"),
    **{
        f"federated_mnist:{strategy}": (f"STRATEGY={strategy}", "MICRO_BATCH=8", "TEST_IMAGES=64")
        for strategy in ("fedavgm", "vhl", "fedimpro")  # the others train fedavgm's graph
    },
}


@dataclass(frozen=True)
class Honest:
    """A module with batches for it, and its graphs."""

    example: Example
    captured: Captured

    def case(self, training: TrainingSpec) -> Case:
        """The graph with data, for the oracle; ``training`` at the precision of the capture."""

        def batches(step: int) -> list[dict[str, Tensor]]:
            first = step * training.n_micro
            return [self.example.make_batch(first + micro) for micro in range(training.n_micro)]

        return case_from(self.example.name, self.example.module, self.captured, training, batches)


def _captured(example: Example, training: TrainingSpec, metrics: tuple[str, ...] = ()) -> Honest:
    return Honest(example, capture(example.module, example.example_inputs, training, metrics))


def _model(name: str, precision: Precision) -> Honest:
    found = captured_model(name, DROPOUT, precision)
    return Honest(found.example, found.captured)


def _same_batch(name: str, module: nn.Module, inputs: Mapping[str, Tensor]) -> Example:
    return Example(name, module, inputs, lambda seed: {n: t.clone() for n, t in inputs.items()})


def _module(build: Callable[[], nn.Module], inputs: Mapping[str, Tensor]) -> Honest:
    return _captured(_same_batch("module", build(), inputs), TrainingSpec(1, 1))


def _job_file(name: str, knobs: tuple[str, ...]) -> Honest:
    with pytest.MonkeyPatch.context() as patch:  # MNIST's files are not at hand
        patch.setattr(download, "read", lambda name: {})
        patch.setattr("experiments.datasets.corpora.mnist", lambda files: DIGITS)
        job = load_job(EXAMPLES / f"{name.partition(':')[0]}.py", knobs)
    return _captured(_same_batch(name, job.module, job.example_inputs), job.training, job.metrics)


GRAPHS: dict[str, Callable[[], Honest]] = {
    **{
        f"{name}:{precision.value}": partial(_model, name, precision)
        for name in ALL
        for precision in Precision
    },
    **{
        build.__name__: partial(_module, build if isinstance(build, type) else partial(Model, build), X)
        for build in TRAPS
    },
    **{
        f"recurrent:{cell.__name__}": partial(_module, partial(Recurrent, cell), X)
        for cell in (nn.LSTM, nn.GRU, nn.RNN)
    },
    "moon": partial(_module, lambda: Moon(Net(), "head"), batch()),
    "vhl": partial(_module, lambda: Vhl(Net(), "head", SPEC, VhlLoss(batch=4, pad=1)), batch()),
    "fedimpro": partial(_module, fedimpro, batch()),
    **{f"examples/{name}": partial(_job_file, name, knobs) for name, knobs in JOB_FILES.items()},
}

# In bf16 the same ops run between casts, and these take seconds each: with the slow tests.
LARGE = {
    "examples/bert_tiny",
    *(f"{name}:fp32" for name in ("bert", "gemma", "mixtral", "t5", "vit", "whisper")),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow)
    if name in LARGE or name.endswith(Precision.BF16.value)
    else name
    for name in GRAPHS
]


@cache
def honest(name: str) -> Honest:
    """The graph of this name in ``GRAPHS``, captured once a process; seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GRAPHS[name]()


def captured_dags() -> Iterator[tuple[str, OpDag]]:
    """Name and op-DAG of every graph, for training and for evaluation."""
    for name in GRAPHS:
        found = honest(name).captured
        yield f"{name} in training", found.train
        yield f"{name} in evaluation", found.evaluation
