"""Shelves of saved activations: what comes back, in any order, and what is left of them."""

from __future__ import annotations

import gc
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import StorageError
from atoll.job import Place
from worker.elsewhere import shelf
from worker.elsewhere.shelf import PAGE, PIECE, FileShelf, shelves

CPU = torch.device("cpu")


def drawn(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (1 + 997 * number,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("order", ["reverse", "forward", "drawn"])
def test_bytes_come_back_in_any_order_and_twice(tmp_path: Path, order: str) -> None:
    made = FileShelf(tmp_path, CPU)
    assert [made.put(drawn(number)) for number in range(12)] == list(range(12))
    numbers = list(range(12))
    if order == "reverse":
        numbers.reverse()
    elif order == "drawn":
        random.Random(1).shuffle(numbers)
    for number in [*numbers, *numbers]:
        assert torch.equal(made.get(number), drawn(number))


@pytest.mark.parametrize("past_cache", [True, False])
def test_from_the_second_micro_batch_on_every_byte_is_read_once_and_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool
) -> None:
    if not past_cache:
        monkeypatch.setattr(shelf, "_past_cache", lambda file: False)
    elif not FileShelf(tmp_path, CPU)._direct:
        pytest.skip("this file system has no way past the kernel's cache")
    make = shelves(Place.HOST, tmp_path, CPU)
    assert make is not None
    read, direct = list[int](), list[int]()
    preadv, own = os.preadv, FileShelf._read

    def counted(descriptor: int, buffers: Any, at: int) -> int:
        found = preadv(descriptor, buffers, at)
        read.append(found)
        return found

    def noted(self: FileShelf, number: int) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            direct.append(number)
        return own(self, number)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(FileShelf, "_read", noted)
    order = [10, 11, 10, 8, 9, 6, 7, 6, 5, 2, 3, 4, 0, 1]  # as of ops that saved two or three each
    for micro in range(3):
        made = make()
        for number in range(12):
            made.put(drawn(number))
        read.clear()
        direct.clear()
        assert all(torch.equal(made.get(number), drawn(number)) for number in order)
        if micro:
            sizes = [drawn(number).numel() for number in range(12)]
            whole = [-(-size // PAGE) * PAGE for size in sizes]
            assert sum(read) == sum(whole if past_cache else sizes)
            assert direct == [10]  # nothing comes before the first


def open_in(folder: Path) -> int:
    """Descriptors of this process that lead into a folder, of unlinked files too."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/")
    return found


def test_nothing_is_left_in_the_folder_and_the_file_ends_with_the_shelf(tmp_path: Path) -> None:
    made = FileShelf(tmp_path, CPU)
    made.put(drawn(3))
    assert list(tmp_path.iterdir()) == []
    assert open_in(tmp_path) == 1
    del made
    gc.collect()
    assert open_in(tmp_path) == 0


def test_a_disk_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FileShelf(tmp_path, CPU)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        made.put(drawn(1))


@pytest.mark.parametrize("past_cache", [True, False])
def test_tensors_around_a_page_and_a_piece_come_back_and_can_be_read_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool
) -> None:
    if not past_cache:
        monkeypatch.setattr(shelf, "_past_cache", lambda file: False)
    made = FileShelf(tmp_path, CPU)
    sizes = [8 * n for n in (1, PAGE // 8 - 1, PAGE // 8, PAGE // 8 + 1, PIECE // 8 - 1, PIECE // 8 + 1)]
    values = [torch.randn(size // 8, dtype=torch.float64) for size in sizes]
    for value in values:
        made.put(value.view(torch.uint8))
    for number, value in reversed([*enumerate(values)]):
        assert torch.equal(made.get(number).view(torch.float64), value)


def test_what_stays_on_the_device_has_no_shelf(tmp_path: Path) -> None:
    assert shelves(Place.DEVICE, tmp_path, CPU) is None
    for place in (Place.HOST, Place.DISK):
        make = shelves(place, tmp_path, CPU)
        assert make is not None
        assert isinstance(make(), FileShelf)
