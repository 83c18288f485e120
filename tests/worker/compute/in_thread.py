"""Work in a thread of its own, as a compute process does it; what it raises is raised here."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.patience import HUNG_S


def in_thread(work: Callable[[], None]) -> None:
    failed: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(HUNG_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
