"""The record of the transport benchmark: whatever does not arrive as it was sent shows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.messages import WAYS, Neighbour
from benchmarks.transport import MAX_FAULTS, PLAIN, SAMPLES, SHIFTS, End, Messages, identities

NBYTES = 10_000


def received(messages: Messages, number: int, buffer: np.ndarray | None = None) -> np.ndarray:
    """A buffer filled as message ``number`` would fill it."""
    buffer = np.zeros(NBYTES, np.uint8) if buffer is None else buffer
    buffer[:] = messages.message(number)
    return buffer


def ends() -> tuple[Messages, Messages]:
    return Messages(NBYTES, 7), Messages(NBYTES, 7)


def test_what_arrived_once_and_as_sent_is_right_whatever_the_order_and_buffer() -> None:
    sender, receiver = ends()
    shared = np.zeros(NBYTES, np.uint8)
    for number in (6, 5, 8):
        receiver.arrived(number, received(sender, number, shared))
    receiver.arrived(7, received(sender, 7))
    assert receiver.wrong(5, 4) == ""


def test_a_check_is_of_what_arrived_since_the_last_and_spoils_the_buffer() -> None:
    sender, receiver = ends()
    buffer = received(sender, 0)
    receiver.arrived(0, buffer)
    assert receiver.wrong(0, 1) == ""
    assert not buffer.any()
    receiver.arrived(1, buffer)  # nothing was written
    assert receiver.wrong(1, 1) == "message 1 has other values"


def test_neighbouring_messages_differ_at_their_first_and_last_place_and_nearly_everywhere() -> None:
    messages = Messages(NBYTES, 7)
    for number in range(SHIFTS - 1):
        assert (messages.message(number) != messages.message(number + 1)).mean() > 0.98


def nothing(sender: Messages, receiver: Messages) -> None:
    del sender, receiver


def twice(sender: Messages, receiver: Messages) -> None:
    receiver.arrived(1, received(sender, 1))
    receiver.arrived(1, received(sender, 1))


def another(sender: Messages, receiver: Messages) -> None:
    receiver.arrived(1, received(sender, 1))
    receiver.arrived(2, received(sender, 2))


def short(sender: Messages, receiver: Messages) -> None:
    receiver.arrived(1, received(sender, 1)[:-1])


def first_value(sender: Messages, receiver: Messages) -> None:
    payload = received(sender, 1)
    payload[0] ^= 1
    receiver.arrived(1, payload)


def last_value(sender: Messages, receiver: Messages) -> None:
    payload = received(sender, 1)
    payload[-1] ^= 1
    receiver.arrived(1, payload)


def a_hole(sender: Messages, receiver: Messages) -> None:
    payload = received(sender, 1)
    payload[2000 : 2000 + 4 * NBYTES // SAMPLES] = 0
    receiver.arrived(1, payload)


def the_one_before(sender: Messages, receiver: Messages) -> None:
    receiver.arrived(1, received(sender, 0))


CASES: list[tuple[Callable[[Messages, Messages], None], str]] = [
    (nothing, "1 of 2 messages are missing"),
    (twice, "message 1 came unasked, or twice"),
    (another, "message 2 came unasked, or twice"),
    (short, f"message 1 has {NBYTES - 1} bytes of {NBYTES}"),
    (first_value, "message 1 has other values"),
    (last_value, "message 1 has other values"),
    (a_hole, "message 1 has other values"),
    (the_one_before, "message 1 has other values"),
]


@pytest.mark.parametrize(("happens", "told"), CASES, ids=[happens.__name__ for happens, _ in CASES])
def test_a_message_that_is_not_the_last_is_checked_too(
    happens: Callable[[Messages, Messages], None], told: str
) -> None:
    """Message 0 comes last, in order, into a buffer of its own."""
    sender, receiver = ends()
    happens(sender, receiver)
    receiver.arrived(0, received(sender, 0))
    assert receiver.wrong(0, 2) == told


def test_a_message_is_checked_although_its_buffer_was_filled_again() -> None:
    sender, receiver = ends()
    buffer = received(sender, 0)
    buffer[0] ^= 1
    receiver.arrived(0, buffer)
    receiver.arrived(1, received(sender, 1, buffer))
    assert receiver.wrong(0, 2) == "message 0 has other values"


def test_every_value_of_the_last_message_is_checked() -> None:
    sender, receiver = ends()
    payload = received(sender, 3)
    sampled = set(np.linspace(0, NBYTES - 1, SAMPLES).astype(int).tolist())
    payload[next(place for place in range(NBYTES) if place not in sampled)] ^= 1
    receiver.arrived(3, payload)
    assert receiver.wrong(3, 1) == "message 3 has other values"


def test_many_faults_are_told_briefly() -> None:
    sender, receiver = ends()
    for number in range(20):
        receiver.arrived(number, received(sender, number + 1))
    assert receiver.wrong(0, 20).count(";") == MAX_FAULTS - 1


def test_several_threads_may_note_messages() -> None:
    sender, receiver = ends()
    buffers = [received(sender, number) for number in range(40)]

    def note(numbers: range) -> None:
        for number in numbers:
            receiver.arrived(number, buffers[number])

    threads = [threading.Thread(target=note, args=(range(at, 40, 4),)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert receiver.wrong(0, 40) == ""


# ---------------------------------------------------------------- both ends, over TLS on loopback


@contextlib.contextmanager
def connected(folder: Path, receiver_seed: int) -> Iterator[tuple[End, End]]:
    """(sender, receiver) of messages of a quarter MiB."""
    identities(folder)
    sender, receiver = End(folder, "w-a", 1 << 18, 7), End(folder, "w-b", 1 << 18, receiver_seed)
    try:
        ports = receiver.listen()
        sender.connect("127.0.0.1", ports["port"], ports["raw"], ports["tls"])
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def test_messages_of_all_ways_arrive_as_they_were_sent(tmp_path: Path) -> None:
    with connected(tmp_path, 7) as (sender, receiver):
        sender.ours(0, 20)
        assert receiver.check(0, 20) == ""
        for way in PLAIN:
            sender.plain(way, 20, 5)
            assert receiver.check(20, 5) == ""
        sender.ours(25, 1)
        assert receiver.check(25, 2) == "1 of 2 messages are missing"


def test_other_values_than_the_senders_show_in_all_ways(tmp_path: Path) -> None:
    with connected(tmp_path, 8) as (sender, receiver):
        sender.ours(0, 2)
        assert receiver.check(0, 2).count("has other values") == 2
        for way in PLAIN:
            sender.plain(way, 2, 2)
            assert receiver.check(2, 2).count("has other values") == 2


@pytest.mark.parametrize("answers_seed", [7, 8])
def test_tensors_there_and_back_are_counted_and_checked_at_both_ends(
    tmp_path: Path, answers_seed: int
) -> None:
    identities(tmp_path)
    near = Neighbour(tmp_path, "w-a", 1 << 16, 7)
    far = Neighbour(tmp_path, "w-b", 1 << 16, answers_seed)
    try:
        near.join("127.0.0.1", *far.open_ports())
        for at, way in enumerate(WAYS):
            answering = threading.Thread(target=far.answer, args=(way, 9))
            answering.start()
            took_s, used_s = near.exchange(way, 9 * at, 9, depth=4)
            answering.join()
            assert took_s > 0
            assert used_s > 0
            found = [end.check(9 * at, 9) for end in (near, far)]
            assert (found == ["", ""]) == (answers_seed == 7)
    finally:
        near.close()
        far.close()
