"""Micro-batches for a stage, fetched ahead of the computation from the data provider.

One thread fetches whole steps in order and keeps at most ``ahead`` steps and about ``max_bytes``;
``take`` waits for a micro-batch. A step's data stays until ``step_done``, so that a discarded step
runs again without asking. Losing the coordinator only delays the thread: it asks again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.calls import Shapes
from atoll.errors import AtollError, BadFrame, ConnectionFailed
from atoll.execute import DTYPES
from atoll.indices import Range, index_ranges
from atoll.opdag import DTYPE_BYTES, FLOATING
from atoll.value_guards import out_of_range, sound_bools
from hostos.retries import progressed, retrying
from worker.cancel import Cancel
from worker.stage.batches import Arrived, Fetch

if TYPE_CHECKING:
    from atoll.opdag import StateMeta, TensorMeta
    from atoll.program import StageProgram

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class InputRule:
    """What an input must look like; ``bounds`` of values that are used as indices."""

    meta: TensorMeta
    bounds: Range | None = None


class Feed:
    """Training data of ``micros`` of each step, fetched ahead. ``start`` once; ``close`` ends the thread."""

    def __init__(
        self,
        fetch: Fetch,
        rules: Mapping[str, InputRule],
        micros: range,
        steps: int,
        ahead: int = 3,
        max_bytes: int = 256 << 20,
    ) -> None:
        self._fetch = fetch
        self._rules = dict(rules)
        self._micros = micros
        self._steps = steps
        self._ahead = max(ahead, 2)
        step_bytes = len(micros) * sum(rule.meta.nbytes for rule in rules.values())
        # The step being computed and the next one are always kept, however large.
        self._window = max(2, min(self._ahead, max_bytes // max(step_bytes, 1)))
        self._changed = threading.Condition()
        self._held: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._next = 0  # step the thread fetches next
        self._oldest = 0  # step the computation is at
        self._error: AtollError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, first_step: int) -> None:
        """Begin to fetch at ``first_step``."""
        self._next = self._oldest = first_step
        if self._rules:
            self._thread = threading.Thread(target=self._run, name="atoll-feed", daemon=True)
            self._thread.start()

    def take(self, step: int, micro: int, cancel: Cancel) -> dict[str, Tensor]:
        """Inputs of a micro-batch; waits for them. Raises what made fetching impossible."""
        if not self._rules:
            return {}
        with self._changed:
            self._seek(step)
            while True:
                cancel.check()
                if self._error is not None:
                    raise self._error
                found = self._held.get(step, {}).get(micro)
                if found is not None and len(found) == len(self._rules):
                    return dict(found)
                self._changed.wait(POLL_S)

    def step_done(self, step: int) -> None:
        """``step`` is committed, or skipped: neither its data nor that of those before is needed any more."""
        with self._changed:
            self._oldest = max(self._oldest, step + 1)
            self._next = max(self._next, self._oldest)
            for old in [s for s in self._held if s < self._oldest]:
                del self._held[old]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching; a call under way ends at its next message."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _seek(self, step: int) -> None:
        """A Start may name a step that was not fetched (a run that resumes elsewhere)."""
        if step < self._oldest or step > self._next + self._window:
            self._held.clear()
            self._next = self._oldest = step
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for attempt in retrying(sleep=self._pause):
                with attempt:
                    while (step := self._due()) is not None:
                        self._fetch_step(step)
                        progressed(attempt)
        except AtollError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _due(self) -> int | None:
        """The step to fetch next, once there is room for it; None when closed."""
        with self._changed:
            while not self._closed and (
                self._next >= self._oldest + self._window or self._next >= self._steps
            ):
                self._changed.wait()
            return None if self._closed else self._next

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _fetch_step(self, step: int) -> None:
        for arrived in self._fetch(False, tuple(self._rules), step, 1):
            tensor = _checked(arrived, self._rules)
            if arrived.step != step or arrived.micro not in self._micros:
                raise BadFrame(f"asked for data of step {step}, got {arrived.step}.{arrived.micro}")
            with self._changed:
                if self._closed or self._next != step:
                    return
                self._held.setdefault(step, {}).setdefault(arrived.micro, {})[arrived.input] = tensor
                self._changed.notify_all()
        with self._changed:
            if self._next == step:
                complete = [m for m in self._held.get(step, {}).values() if len(m) == len(self._rules)]
                if len(complete) != len(self._micros):
                    raise ConnectionFailed(f"data of step {step} ended early")
                self._next = step + 1


def held_out(
    fetch: Fetch, rules: Sequence[Mapping[str, InputRule]], cancel: Cancel
) -> Iterator[dict[str, Tensor]]:
    """The held-out micro-batches in order, one in memory at a time; tried again when cut off. ``rules``: of
    each, for the same inputs."""
    if not rules or not rules[0]:
        for _ in rules:
            yield {}
        return
    done = 0
    for attempt in retrying(sleep=cancel.wait):
        with attempt:
            current: dict[str, Tensor] = {}
            for arrived in fetch(True, tuple(rules[0]), 0, 1):
                cancel.check()
                if arrived.micro < done or done == len(rules):
                    continue
                current[arrived.input] = _checked(arrived, rules[done])
                if len(current) == len(rules[done]):
                    yield current
                    done, current = done + 1, {}
                    progressed(attempt)
            if done < len(rules):
                raise BadFrame(f"held-out data has {done} micro-batches, {len(rules)} are declared")


def _checked(arrived: Arrived, rules: Mapping[str, InputRule]) -> Tensor:
    """The tensor in its DAG dtype. Raises BadFrame for a wrong name, shape, dtype, size or index."""
    where = f"input {arrived.input[:60]!r} of step {arrived.step}, micro-batch {arrived.micro}"
    rule = rules.get(arrived.input)
    if rule is None:
        raise BadFrame(f"{where} was not asked for")
    if arrived.shape != rule.meta.shape:
        raise BadFrame(f"{where} has shape {arrived.shape}, the model takes {rule.meta.shape}")
    if arrived.dtype not in DTYPE_BYTES:
        raise BadFrame(f"{where} has the unknown dtype {arrived.dtype[:30]!r}")
    if arrived.dtype in FLOATING and rule.meta.dtype not in FLOATING:
        raise BadFrame(f"{where} is {arrived.dtype}, the model takes {rule.meta.dtype}")
    expected = math.prod(arrived.shape) * DTYPE_BYTES[arrived.dtype]
    if len(arrived.data) != expected:
        raise BadFrame(f"{where} has {len(arrived.data)} bytes, its shape and dtype need {expected}")
    if not expected:
        return torch.empty(arrived.shape, dtype=DTYPES[rule.meta.dtype])
    # A copy: torch wants memory that it may write.
    flat = torch.frombuffer(bytearray(arrived.data), dtype=DTYPES[arrived.dtype])
    value = sound_bools(flat).reshape(arrived.shape).to(DTYPES[rule.meta.dtype])
    if rule.bounds is not None and (why := out_of_range(value, rule.bounds)) is not None:
        raise BadFrame(f"{where} {why}")
    return value


def input_rules(
    program: StageProgram, inputs: Mapping[str, TensorMeta], states: Mapping[str, StateMeta]
) -> dict[str, InputRule]:
    """Return the rules of the program's inputs: metas, and bounds of those that ops index by."""
    leaves = {name: state.meta for name, state in states.items()} | dict(inputs)
    ranges = index_ranges(program, Shapes(program, leaves, inputs)).inputs
    return {name: InputRule(inputs[name], ranges.get(name)) for name in program.inputs}


def joined_rules(of_pieces: Iterable[Mapping[str, InputRule]]) -> dict[str, InputRule]:
    """Return the rules of a stage's inputs: of one that several pieces take, what all of them accept."""
    found: dict[str, InputRule] = {}
    for rules in of_pieces:
        for name, rule in rules.items():
            before = found.get(name)
            if before is not None and before.bounds is not None and rule.bounds is not None:
                rule = InputRule(rule.meta, before.bounds.both(rule.bounds))
            elif before is not None:
                rule = InputRule(rule.meta, rule.bounds or before.bounds)
            found[name] = rule
    return found
