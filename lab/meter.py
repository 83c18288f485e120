"""Raw TCP rate and round trip between two hosts (``python -m lab.meter``).

    python -m lab.meter serve PORT             answers until killed; prints "listening"
    python -m lab.meter rate HOST PORT SECONDS [WARMUP]   {"mbit": ...} as the receiver counted it
    python -m lab.meter rtt HOST PORT COUNT    {"min_ms": ..., "median_ms": ...} of one-byte exchanges

Rates count payload bytes arriving within the window, the warm-up excluded, in 10^6 bit/s.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import threading
import time

CHUNK_BYTES = 1 << 18
PATIENCE_S = 60.0
_RATE, _ECHO = b"R", b"E"
_WINDOW = struct.Struct("<dd")  # warm-up seconds, window seconds
_AT_ONCE = struct.pack("ii", 1, 0)  # a close resets the connection


def serve(port: int) -> None:
    """Answer every connection in a thread of its own."""
    with socket.create_server(("0.0.0.0", port), backlog=64) as listener:  # noqa: S104
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        try:
            if connection.recv(1) == _ECHO:
                while byte := connection.recv(1):
                    connection.sendall(byte)
            else:
                warmup_s, window_s = _WINDOW.unpack(connection.recv(_WINDOW.size, socket.MSG_WAITALL))
                connection.sendall(_WINDOW.pack(*_count(connection, warmup_s, window_s)))
                # To close with bytes unread resets the connection: a result lost on its way stays lost.
                while connection.recv(CHUNK_BYTES):
                    pass
        except OSError:
            return


def _count(connection: socket.socket, warmup_s: float, window_s: float) -> tuple[float, float]:
    """Bytes and seconds from the end of the warm-up to the last arrival in the window."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    end_s = time.monotonic() + warmup_s
    while time.monotonic() < end_s and connection.recv_into(buffer):
        pass
    received, start_s = 0, time.monotonic()
    now_s = start_s
    while now_s < start_s + window_s:
        count = connection.recv_into(buffer)
        if not count:
            break
        received += count
        now_s = time.monotonic()
    return float(received), now_s - start_s


def rate(host: str, port: int, window_s: float, warmup_s: float = 1.0) -> float:
    """Goodput of one connection from here to ``host``, Mbit/s."""
    chunk = bytes(CHUNK_BYTES)
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        connection.sendall(_RATE + _WINDOW.pack(warmup_s, window_s))
        done = threading.Event()
        result: list[tuple[float, float]] = []

        def wait() -> None:
            answer = connection.recv(_WINDOW.size, socket.MSG_WAITALL)
            if len(answer) == _WINDOW.size:
                result.append(_WINDOW.unpack(answer))
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        try:
            while not done.is_set():
                connection.sendall(chunk)
        except OSError:
            done.wait(PATIENCE_S)
        # What is sent but not counted would hold up whoever measures next: closing drops it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    if not result:
        raise ConnectionError(f"{host}:{port} ended without a result")
    received, took_s = result[0]
    return received * 8e-6 / took_s


def round_trips_ms(host: str, port: int, count: int) -> list[float]:
    """Round trips of one byte on an open connection, ms."""
    found = []
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_ECHO)
        for _ in range(count):
            start_s = time.perf_counter()
            connection.sendall(b".")
            if not connection.recv(1):
                raise ConnectionError(f"{host}:{port} hung up")
            found.append((time.perf_counter() - start_s) * 1000)
    return found


def main(arguments: list[str]) -> int:
    """The command line above."""
    match arguments:
        case ["serve", port]:
            serve(int(port))
        case ["rate", host, port, seconds, *rest]:
            print(json.dumps({"mbit": rate(host, int(port), float(seconds), *map(float, rest))}))
        case ["rtt", host, port, count]:
            found = round_trips_ms(host, int(port), int(count))
            print(
                json.dumps(
                    {"min_ms": min(found), "median_ms": statistics.median(found), "max_ms": max(found)}
                )
            )
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
