"""Streams between processes: in order, delayed, stalled by loss and partitions, broken without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from coordinator.messages.events import Heartbeat
from tests.sim.clock import Clock, Process

KEEPALIVE_S = 10.0  # a stream that carries nothing for so long is given up by whoever looks
RETRANSMIT_S = 0.25
REPEATED_WITHIN_S = 6.0
TIDY_AT = 16  # streams of one process before ended ones are dropped
RESET_S = 0.05  # a killed process's machine answers for it


@dataclass
class End:
    """One side of a stream: what hears messages, and the end of them."""

    process: Process
    heard: Callable[[Any], None]
    closed: Callable[[str], None]
    repeats: bool = True  # what it sends may arrive twice
    open: bool = True


@dataclass
class Stream:
    """A connection: what is sent arrives once and in order, or the stream ends."""

    network: Network
    ends: tuple[End, End]
    last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # newest arrival at each end

    def send(self, sender: int, message: Any, n_bytes: int = 500) -> None:
        """Send from one end; to nobody when that end is closed."""
        mine, theirs = self.ends[sender], self.ends[1 - sender]
        if not mine.open:
            return
        network, clock = self.network, self.network.clock
        network.messages += 1
        arrival_s = clock.now_s + network.travel_s(mine.process.name, theirs.process.name, n_bytes)
        arrival_s = max(arrival_s, self.last_s[1 - sender])
        self.last_s[1 - sender] = arrival_s
        self._deliver(1 - sender, message, arrival_s, clock.now_s)
        repeated = clock.random.random() < network.repeats
        if repeated and mine.repeats and not isinstance(message, Heartbeat):
            late_s = arrival_s + REPEATED_WITHIN_S * clock.random.random()
            self._deliver(1 - sender, message, late_s, clock.now_s)

    def _deliver(self, at: int, message: Any, arrival_s: float, sent_s: float) -> None:
        clock, mine, theirs = self.network.clock, self.ends[at], self.ends[1 - at]

        def arrive() -> None:
            until_s = self.network.cut_until_s(mine.process.name, theirs.process.name)
            if until_s > clock.now_s:  # retransmitted until the way is free, or nobody believes in it
                later_s = until_s + RETRANSMIT_S
                if later_s - sent_s > KEEPALIVE_S:
                    self.end("no answer", at)
                    self.end("no answer", 1 - at, notice_s=RESET_S)  # nor do its words get any
                else:
                    self.last_s[at] = max(self.last_s[at], later_s)
                    self._deliver(at, message, later_s, sent_s)
            elif mine.open:
                mine.heard(message)

        mine.process.after(arrival_s - clock.now_s, arrive)

    def end(self, reason: str, *sides: int, notice_s: float = 0.0) -> None:
        """End the stream as these sides see it (none named: both), each after ``notice_s``."""
        for side in sides or (0, 1):
            end = self.ends[side]

            def notice(end: End = end) -> None:
                if end.open:
                    end.open = False
                    end.closed(reason)

            end.process.after(notice_s, notice)


@dataclass
class Network:
    """Delays by pair, loss for all, partitions of pairs; ``*`` stands for everybody else."""

    clock: Clock
    delay_s: float = 0.02
    jitter_s: float = 0.005
    rate_bps: float = 50e6
    loss: float = 0.01
    repeats: float = 0.0  # share of messages that arrive once more, late and out of order
    messages: int = 0  # sent so far
    _streams: dict[str, list[Stream]] = field(default_factory=dict)  # of each process, oldest first
    _tidy_at: dict[str, int] = field(default_factory=dict)  # streams of a process, ended ones included
    _cut: dict[frozenset[str], float] = field(default_factory=dict)
    _silent: dict[frozenset[str], float] = field(default_factory=dict)

    def connect(self, here: End, there: End) -> Stream:
        """Open a stream between two live processes."""
        stream = Stream(self, (here, there))
        for end in stream.ends:
            held = self._streams.setdefault(end.process.name, [])
            if len(held) >= self._tidy_at.get(end.process.name, TIDY_AT):
                held[:] = [s for s in held if any(end.open for end in s.ends)]
                self._tidy_at[end.process.name] = 2 * len(held) + TIDY_AT
            held.append(stream)
        return stream

    def streams_of(self, process: Process) -> Iterator[tuple[Stream, int]]:
        """Yield each stream of a process that may still be open, with the side that it holds."""
        for stream in list(self._streams.get(process.name, ())):
            for side, end in enumerate(stream.ends):
                if end.process is process:
                    yield stream, side

    def travel_s(self, a: str, b: str, n_bytes: int) -> float:
        """Draw what a message takes from a to b."""
        random = self.clock.random
        took_s = self.delay_s + random.random() * self.jitter_s + 8 * n_bytes / self.rate_bps
        while random.random() < self.loss:
            took_s += RETRANSMIT_S
        return took_s

    def cut_until_s(self, a: str, b: str) -> float:
        """Return when messages between two processes pass again; 0: they do."""
        pairs = (frozenset((a, b)), frozenset((a, "*")), frozenset((b, "*")))
        return max((self._cut.get(pair, 0.0) for pair in pairs), default=0.0)

    def partition(self, a: str, b: str, seconds: float) -> None:
        """Let nothing pass between two processes, or between one and ``*``, for a while."""
        self._cut[frozenset((a, b))] = self.clock.now_s + seconds

    def silence(self, a: str, b: str, seconds: float) -> None:
        """Lose whatever two processes send each other for a while, though both believe in the stream."""
        self._silent[frozenset((a, b))] = self.clock.now_s + seconds

    def swallows(self, a: str, b: str) -> bool:
        """Whether what one of two processes sends the other is lost."""
        return self._silent.get(frozenset((a, b)), 0.0) > self.clock.now_s

    def died(self, process: Process) -> None:
        """Have the other ends of a killed process's streams notice."""
        for stream, side in self.streams_of(process):
            stream.ends[side].open = False
            stream.end(f"{process.name} reset the connection", 1 - side, notice_s=RESET_S)

    def break_streams(self, process: Process, half: bool) -> None:
        """Break all streams of a live process; ``half``: only the other ends notice soon."""
        for stream, side in self.streams_of(process):
            if stream.ends[side].open:
                stream.end("the connection broke", 1 - side)
                stream.end("the connection broke", side, notice_s=KEEPALIVE_S if half else 0.0)
