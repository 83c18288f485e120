"""Data ahead of the computation: in order, checked, bounded, and there again after a discard."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from atoll.errors import BadFrame, ConnectionFailed, UsageError
from atoll.indices import Range
from atoll.opdag import StateMeta, TensorMeta
from atoll.program import stage_programs
from coordinator.capture.capture import capture
from tests.models import MODELS
from tests.patience import HUNG_S
from tests.worker.stage.steps.test_run import TRAINING
from worker.cancel import Cancel, Cancelled
from worker.stage.batches import Arrived
from worker.stage.feed import Feed, InputRule, held_out, input_rules

META = TensorMeta((2, 3), "int64")
RULES = {"x": InputRule(META, Range(0, 10))}


def arrived(step: int, micro: int, array: np.ndarray | None = None, name: str = "x") -> Arrived:
    data = np.full((2, 3), step, np.uint8) if array is None else array
    return Arrived(step, micro, name, str(data.dtype), data.shape, data.tobytes())


class Provider:
    """A data provider whose requests can be counted, held back and broken."""

    def __init__(self, n_micro: int = 2) -> None:
        self.n_micro = n_micro
        self.asked: list[int] = []
        self.failures = 0
        self.changed = threading.Condition()

    def __call__(
        self, evaluation: bool, inputs: tuple[str, ...], first_step: int, count: int
    ) -> Iterable[Arrived]:
        with self.changed:
            self.asked.append(first_step)
            self.changed.notify_all()
            if self.failures:
                self.failures -= 1
                raise ConnectionFailed("away")
        return [arrived(first_step, micro) for micro in range(self.n_micro)]

    def wait_asked(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, HUNG_S)


@pytest.fixture
def provider() -> Provider:
    return Provider()


def feed_of(provider: Provider, steps: int = 100, ahead: int = 3, max_bytes: int = 1 << 20) -> Feed:
    return Feed(provider, RULES, range(provider.n_micro), steps, ahead, max_bytes)


def test_micro_batches_arrive_in_the_models_dtype(provider: Provider) -> None:
    feed = feed_of(provider)
    feed.start(5)
    value = feed.take(5, 1, Cancel())["x"]
    assert value.dtype is torch.int64
    assert torch.equal(value, torch.full((2, 3), 5))
    feed.close()


def test_it_fetches_ahead_but_not_further_than_its_window(provider: Provider) -> None:
    feed = feed_of(provider, ahead=3)
    feed.start(0)
    provider.wait_asked(3)
    feed.take(2, 0, Cancel())
    assert provider.asked == [0, 1, 2]
    feed.step_done(0)
    provider.wait_asked(4)
    assert provider.asked == [0, 1, 2, 3]
    feed.close()


def test_large_steps_are_kept_two_at_a_time_however_large(provider: Provider) -> None:
    feed = feed_of(provider, ahead=5, max_bytes=1)
    feed.start(0)
    feed.take(1, 0, Cancel())
    assert provider.asked == [0, 1]
    feed.close()


def test_nothing_is_fetched_beyond_the_last_step(provider: Provider) -> None:
    feed = feed_of(provider, steps=2, ahead=10)
    feed.start(0)
    feed.take(1, 1, Cancel())
    assert provider.asked == [0, 1]
    feed.close()


def test_a_discarded_step_runs_again_from_what_is_here(provider: Provider) -> None:
    feed = feed_of(provider)
    feed.start(0)
    first = feed.take(0, 0, Cancel())["x"]
    assert torch.equal(feed.take(0, 0, Cancel())["x"], first)
    assert provider.asked.count(0) == 1
    feed.close()


def test_steps_that_are_skipped_are_not_fetched(provider: Provider) -> None:
    feed = feed_of(provider, steps=9, ahead=3)
    feed.start(0)
    feed.take(0, 0, Cancel())
    provider.wait_asked(3)
    feed.step_done(5)
    feed.take(8, 1, Cancel())
    feed.close()
    assert not set(range(4, 6)) & set(provider.asked)


def test_a_coordinator_that_is_away_for_a_while_only_delays(provider: Provider) -> None:
    provider.failures = 2
    feed = feed_of(provider)
    feed.start(0)
    assert feed.take(0, 0, Cancel())["x"].shape == (2, 3)
    assert provider.asked[:3] == [0, 0, 0]
    feed.close()


def test_a_wait_ends_when_the_work_is_cancelled() -> None:
    started = threading.Event()

    def never(*_: object) -> Iterator[Arrived]:
        started.set()
        threading.Event().wait(0.2)
        raise ConnectionFailed("away")
        yield

    feed = Feed(never, RULES, range(2), 10)
    feed.start(0)
    cancel = Cancel()
    assert started.wait(HUNG_S)
    cancel.set("released")
    with pytest.raises(Cancelled, match="released"):
        feed.take(0, 0, cancel)
    feed.close()


def test_a_stage_without_inputs_asks_for_nothing(provider: Provider) -> None:
    feed = Feed(provider, {}, range(2), 10)
    feed.start(0)
    assert feed.take(0, 0, Cancel()) == {}
    assert provider.asked == []
    feed.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (arrived(0, 0, name="y"), "was not asked for"),
        (arrived(0, 0, np.zeros((3, 2), np.uint8)), "has shape"),
        (arrived(0, 0, np.zeros((2, 3), np.float32)), "the model takes int64"),
        (Arrived(0, 0, "x", "object", (2, 3), b"123456"), "unknown dtype"),
        (Arrived(0, 0, "x", "uint8", (2, 3), b"12345"), "has 5 bytes"),
        (arrived(0, 0, np.full((2, 3), 10, np.int32)), "index 10; the model takes 0 to 9"),
        (arrived(0, 0, np.full((2, 3), -1, np.int64)), "index -1"),
        (arrived(0, 7), "got 0.7"),
        (arrived(3, 0), "got 3.0"),
    ],
)
def test_data_that_the_model_cannot_take_ends_the_stage_with_a_reason(wrong: Arrived, says: str) -> None:
    feed = Feed(lambda *_: [wrong], RULES, range(1), 10)
    feed.start(0)
    with pytest.raises(BadFrame, match=says):
        feed.take(0, 0, Cancel())
    feed.close()


def test_what_the_provider_refuses_reaches_the_computation() -> None:
    def refuse(*_: object) -> Iterable[Arrived]:
        raise UsageError("no such input")

    feed = Feed(refuse, RULES, range(1), 10)
    feed.start(0)
    with pytest.raises(UsageError, match="no such input"):
        feed.take(0, 0, Cancel())
    feed.close()


def test_held_out_data_goes_on_where_it_was_cut_off() -> None:
    calls: list[int] = []

    def cut_off(*_: object) -> Iterator[Arrived]:
        calls.append(1)
        for micro in range(4):
            if len(calls) == 1 and micro == 2:
                raise ConnectionFailed("reset")
            yield arrived(0, micro, np.full((2, 3), micro, np.uint8))

    found = [int(batch["x"][0, 0]) for batch in held_out(cut_off, [RULES] * 4, Cancel())]
    assert found == [0, 1, 2, 3]
    assert len(calls) == 2


def test_fewer_held_out_batches_than_declared_are_an_error() -> None:
    with pytest.raises(BadFrame, match="4 are declared"):
        list(held_out(lambda *_: [arrived(0, 0)], [RULES] * 4, Cancel()))


def test_inputs_used_as_indices_are_bounded_by_their_tables() -> None:
    example = MODELS["gpt2"]()
    captured = capture(example.module, example.example_inputs, TRAINING)
    dag = captured.train
    (program,) = stage_programs(dag, (0,))
    states = {**dag.parameters, **dag.buffers, **{n: StateMeta(m) for n, m in dag.inputs.items()}}
    rules = input_rules(program, dag.inputs, states)
    assert rules["input_ids"].bounds == Range(0, 61)
    assert rules["labels"].bounds in (None, Range(0, 61, -100))
