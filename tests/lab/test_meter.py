"""The meter: a result reaches who measures, also where packets are lost."""

from __future__ import annotations

import socket
import threading

import pytest

from lab import meter
from tests.patience import HUNG_S


def test_who_counted_stays_until_its_result_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname(), HUNG_S)
        answering = threading.Thread(target=meter._answer, args=(listener.accept()[0],))
    with here:
        answering.start()
        here.sendall(b"R" + meter._WINDOW.pack(0.0, 0.0) + bytes(1 << 16))
        assert len(here.recv(meter._WINDOW.size, socket.MSG_WAITALL)) == meter._WINDOW.size
        here.sendall(bytes(1 << 16))
        here.settimeout(0.2)
        with pytest.raises(TimeoutError):
            here.recv(1)
    answering.join()
