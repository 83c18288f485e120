"""The router process: every packet of the lab passes here (``python -m lab.router STATE.json``).

It holds the TUN descriptors of all hosts, moves packets through ``queues.Fabric`` and obeys
JSON lines on a unix socket. It watches the lab's owner and takes the whole lab down when the
owner is gone, so that a killed benchmark leaves nothing behind. It competes with the workload
for the cores, hence: bursts of up to 64 KiB as one packet, several packets a wake-up, no
garbage collection, and a real-time priority where that is allowed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.errors import AtollError
from lab.doors import Door
from lab.queues import Fabric, Flow, Server
from lab.reader import with_link
from lab.scenario import Scenario
from lab.state import LabState, load_state, save_state, tear_down, with_router
from lab.tun import HEADER_BYTES, LabError, make_host, set_offload

BATCH = 32  # packets read from one device before the others get their turn
READ_BYTES = 65_536 + HEADER_BYTES
MAX_LINE = 65_536
MAX_CLIENTS = 32
REALTIME_PRIORITY = 10
_PR_SET_TIMERSLACK = 29


class Router:
    """Devices, flows and counters of one lab."""

    def __init__(self, scenario: Scenario, addresses: Mapping[str, str], devices: Mapping[str, int]) -> None:
        self.scenario = scenario
        self.devices, self.addresses = dict(devices), dict(addresses)
        self.priority = "normal"
        self.fabric = Fabric(scenario.seed)
        self.servers: dict[str, Server] = {}
        self.flows: dict[tuple[str, str], Flow] = {}
        self.doors = {devices[host.name]: Door() for host in scenario.hosts if not host.inbound}
        self.routes: dict[int, dict[bytes, Flow]] = {fd: {} for fd in devices.values()}
        for source, target in scenario.links:
            self.flows[source, target] = flow = self._flow(source, target)
            self.routes[devices[source]][socket.inet_aton(addresses[target])] = flow
        self.update_offload()

    def _flow(self, source: str, target: str) -> Flow:
        limits = self.scenario.path(source, target)
        for name, mbit, buffer_ms in limits:
            self.servers.setdefault(name, Server(name, mbit, buffer_ms))
        names = [name for name, _, _ in limits]
        link = self.scenario.link(source, target)
        delay_after = names.index(f"pair:{source}>{target}") + 1
        servers = [self.servers[name] for name in names]
        return Flow(servers, delay_after, link.ms / 1000, link.loss, self.devices[target])

    def change_link(self, source: str, target: str, **figures: float) -> dict[str, Any]:
        """Change mbit, ms, loss or buffer_ms of one direction; packets on their way are not touched."""
        link = replace(self.scenario.link(source, target), **figures)
        self.scenario = with_link(self.scenario, source, target, link)
        self.servers[f"pair:{source}>{target}"].set(link.mbit, link.buffer_ms)
        self.flows[source, target].set(link.ms / 1000, link.loss)
        self.update_offload()
        return {}

    def change_uplink(self, server: str, mbit: float) -> dict[str, Any]:
        """Change the rate of a shared uplink such as ``group:fast:up`` or ``host:home1:down``."""
        found = self.servers.get(server)
        if found is None or server.startswith("pair:"):
            uplinks = sorted(name for name in self.servers if not name.startswith("pair:"))
            return {"error": f"no shared uplink {server!r}; there are: {', '.join(uplinks) or 'none'}"}
        found.set(mbit, found.buffer_s * 1000)
        return {}

    def cut(self, source: str, target: str, cut: bool) -> dict[str, Any]:
        """Lose everything in one direction, what is on its way included, or stop losing it."""
        self.scenario.link(source, target)
        self.flows[source, target].cut = cut
        return {}

    def open_door(self, host: str, opened: bool) -> dict[str, Any]:
        """Let others open connections to a host that accepts none by its scenario, or no more."""
        door = self.doors.get(self.devices[host])
        if door is not None:
            door.stands_open = opened
        return {}

    def move(self, host: str, address: str) -> dict[str, Any]:
        """Bring a host what is sent to ``address``, and no more what is sent to the one that it had."""
        self.scenario.host(host)
        new = socket.inet_aton(address)
        if address in self.addresses.values():
            return {"error": f"{address} is taken"}
        old = socket.inet_aton(self.addresses[host])
        self.addresses[host] = address
        for routes in self.routes.values():
            if old in routes:
                routes[new] = routes.pop(old)
        if self.devices[host] in self.doors:  # a router with another address has forgotten its flows
            self.doors[self.devices[host]].forget()
        return {}

    def stats(self) -> dict[str, Any]:
        """Totals since the start: per flow and per server, and the router's own CPU seconds."""
        return {
            "at_s": time.monotonic(),
            "cpu_s": time.process_time(),
            "priority": self.priority,
            "waiting": len(self.fabric.heap),
            "flows": [[*pair, flow.packets, flow.bytes, flow.drops] for pair, flow in self.flows.items()],
            "servers": [[server.name, server.bytes, server.drops] for server in self.servers.values()],
        }

    def update_offload(self) -> None:
        """Bursts travel as one packet except where single packets are lost by chance."""
        lossy = {source for (source, _), flow in self.flows.items() if flow.loss}
        for host, device in self.devices.items():
            set_offload(device, host not in lossy)

    def read(self, device: int, now_s: float) -> None:
        """Take what a host has sent, up to BATCH packets."""
        routes, enter, own_door = self.routes[device], self.fabric.enter, self.doors.get(device)
        for _ in range(BATCH):
            try:
                packet = os.read(device, READ_BYTES)
            except BlockingIOError:
                return
            flow = routes.get(packet[26:30])  # destination address
            if flow is None:
                continue
            if own_door is not None:
                own_door.leaving(packet, HEADER_BYTES)
            door = self.doors.get(flow.out)
            if door is not None and not door.admits(packet, HEADER_BYTES):
                flow.drops += 1
                continue
            enter(flow, packet, wire_bytes(packet), now_s)

    def write(self, now_s: float) -> None:
        """Hand over everything that is due."""
        for device, packet in self.fabric.due(now_s):
            try:
                os.write(device, packet)
            except OSError:  # the host's queue is full or its device is going away: lost
                continue


def wire_bytes(packet: bytes) -> int:
    """Bytes of IP packets on the wire: a burst is counted with a header for every segment."""
    size = len(packet) - HEADER_BYTES
    if packet[1]:  # gso_type
        header = int.from_bytes(packet[2:4], sys.byteorder)
        segment = int.from_bytes(packet[4:6], sys.byteorder)
        if segment and size > header:
            size += header * (-(-(size - header) // segment) - 1)
    return size


class Desk:
    """Answers the requests that come over the control socket."""

    def __init__(self, router: Router, path: str) -> None:
        self.router = router
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(path)
        self.listener.listen(MAX_CLIENTS)
        self.clients: dict[int, tuple[socket.socket, bytearray]] = {}

    def accept(self) -> None:
        """A new client, unless there are too many."""
        client, _ = self.listener.accept()
        client.settimeout(1.0)
        if len(self.clients) >= MAX_CLIENTS:
            client.close()
        else:
            self.clients[client.fileno()] = client, bytearray()

    def read(self, descriptor: int) -> None:
        """Take a client's bytes; answer every whole line."""
        client, pending = self.clients[descriptor]
        try:
            data = client.recv(MAX_LINE)
            pending += data
            while (end := pending.find(b"\n")) >= 0:
                line = bytes(pending[:end])
                del pending[: end + 1]
                client.sendall(json.dumps(self.answer(line)).encode() + b"\n")
        except OSError:
            data = b""
        if not data or len(pending) > MAX_LINE:
            client.close()
            del self.clients[descriptor]

    def answer(self, line: bytes) -> dict[str, Any]:
        """One request's answer; what is wrong with it comes back as {"error": words}."""
        try:
            request = json.loads(line)
            match request.pop("do"):
                case "stats":
                    return self.router.stats()
                case "link":
                    return self.router.change_link(**request)
                case "cut":
                    return self.router.cut(**request)
                case "uplink":
                    return self.router.change_uplink(**request)
                case "door":
                    return self.router.open_door(**request)
                case "move":
                    return self.router.move(**request)
                case other:
                    return {"error": f"unknown request {other!r}"}
        except (ValueError, KeyError, TypeError, AttributeError, OSError, AtollError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


def serve(router: Router, desk: Desk, owner: int) -> None:
    """Carry packets until the owner's process ends (``owner`` is its pidfd) or SIGTERM comes."""
    devices = list(router.devices.values())
    known, door = frozenset(devices), desk.listener.fileno()
    clock, select_, fabric = time.monotonic, select.select, router.fabric
    read, write = router.read, router.write
    while True:
        next_s = fabric.next_s()
        wait_s = None if next_s is None else max(0.0, next_s - clock())
        ready, _, _ = select_([*devices, door, owner, *desk.clients], (), (), wait_s)
        now_s = clock()
        for source in ready:
            if source in known:
                read(source, now_s)
            elif source == owner:
                return
            elif source == door:
                desk.accept()
            else:
                desk.read(source)
        write(clock())


def become_punctual() -> str:
    """Real-time priority where allowed, else the best niceness; what was got, in words."""
    gc.disable()  # tuples in a heap form no cycles
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))
    except OSError:
        try:
            os.nice(-10)
        except OSError:
            return "normal"
        return "nice -10"
    return f"SCHED_RR {REALTIME_PRIORITY}"


def main(lab: str) -> int:
    """Build the hosts of a lab, say ready, carry packets; take the lab down when the owner is gone."""
    state: LabState = with_router(load_state(lab), os.getpid())
    owner = os.pidfd_open(state.owner_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        save_state(state)
        scenario = state.read()
        devices = {
            host: make_host(namespace, state.addresses[host], scenario.mtu, scenario.congestion)
            for host, namespace in state.namespaces.items()
        }
        desk = Desk(router := Router(scenario, state.addresses, devices), str(state.control_path))
        router.priority = become_punctual()
        print("ready", flush=True)
        serve(router, desk, owner)
    except LabError as error:
        print(error, flush=True)
        return 1
    finally:
        if os.getpid() == state.router_pid:
            tear_down(state)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
