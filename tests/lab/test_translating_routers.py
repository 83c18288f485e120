"""Two hosts behind routers that translate addresses, in namespaces of their own, meet at a relay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.tun import run_ip, unavailable
from protos import relay_tickets as tickets
from protos.credentials import Authority, identity_from, new_key, signing_request
from tests.patience import HUNG_S

NFT = shutil.which("nft")


def lacking() -> str | None:
    """Why routers that translate cannot be built here, None when they can."""
    return unavailable() or (None if NFT else "no nft command (install nftables)")


pytestmark = [
    pytest.mark.wan,
    pytest.mark.slow,
    pytest.mark.skipif(lacking() is not None, reason=f"translating routers: {lacking()}"),
]
ROOT = Path(__file__).resolve().parents[2]
PREFIX = f"atoll-nat-{os.getpid()}-"
PUBLIC = "192.0.2.1"
RULES = """
table ip nat {
  chain out {
    type nat hook postrouting priority 100;
    oifname "out" masquerade;
  }
}
table ip filter {
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established accept;
    iifname "in" accept;
  }
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept;
    iifname "in" accept;
  }
}
"""
RELAY = """
import asyncio, sys
from coordinator.relay.server import Relay
async def main():
    relay = Relay(bytes.fromhex(sys.argv[1]))
    print(await relay.start("0.0.0.0", 7702), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(relay.book.joined_bytes, flush=True)
    await relay.stop()
asyncio.run(main())
"""
WORKER = """
import hashlib, queue, sys, time
from pathlib import Path
from protos import relay_tickets as tickets
from protos.credentials import Identity
from protos.relay_tickets import Ticket
from tests.patience import HUNG_S
from tests.worker.transport.hosts import Host, key
from worker.transport.contract import Paths, RelayOffer
me, peer, secret, theirs = sys.argv[2], sys.argv[3], bytes.fromhex(sys.argv[4]), sys.argv[5]
dials = me < peer
pair = tickets.pair_id(secret, me, peer)
sealed = tickets.seal(secret, Ticket(pair, me.encode().ljust(8), dials, int(time.time()) + 600, 1 << 40, 32))
host = Host(Identity.load(Path(sys.argv[1])))
offer = RelayOffer((("192.0.2.1", 7702),), sealed, tickets.ticket_key(secret, sealed), dials, 1.0, 600.0)
host.network.meet(peer, Paths(((theirs, 9),), dials, offer), HUNG_S)
for number in range(8):
    host.network.send(peer, key(number), b"", (me + str(number)).encode() * 100_000)
for _ in range(8):
    _, k, _, payload = host.delivered.get(timeout=HUNG_S)
    assert payload == (peer + str(k.micro)).encode() * 100_000
assert host.network.flush(peer, HUNG_S)
print(host.network.known(peer).way, flush=True)
sys.stdin.read()
host.network.close()
"""


@pytest.fixture
def routers() -> Iterator[None]:
    """Hosts a and b, each behind a router of its own, both on one public network."""
    names = [PREFIX + name for name in ("public", "ra", "rb", "a", "b")]
    public = names[0]
    with ExitStack() as stack:
        for name in names:
            run_ip("netns", "add", name)
            stack.callback(run_ip, "netns", "del", name, check=False)
            run_ip("-n", name, "link", "set", "lo", "up")
        run_ip("-n", public, "link", "add", "street", "type", "bridge")
        run_ip("-n", public, "address", "add", f"{PUBLIC}/24", "dev", "street")
        run_ip("-n", public, "link", "set", "street", "up")
        for at, (router, host) in enumerate(((names[1], names[3]), (names[2], names[4]))):
            outer, inner = f"192.0.2.{10 + at}", f"10.{1 + at}.0"
            joined(router, "out", f"{outer}/24", public, f"port{at}")
            run_ip("-n", public, "link", "set", f"port{at}", "master", "street")
            joined(router, "in", f"{inner}.1/24", host, "home", f"{inner}.2/24")
            run_ip("-n", host, "route", "add", "default", "via", f"{inner}.1")
            inside(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            assert NFT is not None
            inside(router, NFT, "-f", "-", content=RULES)
        yield


def joined(one: str, device: str, address: str, other: str, far: str, far_address: str = "") -> None:
    """A cable between two namespaces."""
    run_ip("-n", one, "link", "add", device, "type", "veth", "peer", "name", far, "netns", other)
    run_ip("-n", one, "address", "add", address, "dev", device)
    if far_address:
        run_ip("-n", other, "address", "add", far_address, "dev", far)
    for name, end in ((one, device), (other, far)):
        run_ip("-n", name, "link", "set", end, "up")


def inside(name: str, *command: str, content: str = "") -> None:
    subprocess.run(["ip", "netns", "exec", name, *command], input=content, text=True, check=True)


def started(stack: ExitStack, name: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["ip", "netns", "exec", PREFIX + name, sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.usefixtures("routers")
def test_two_behind_translating_routers_exchange_tensors_through_a_relay(tmp_path: Path) -> None:
    authority, secret = Authority.open(tmp_path / "ca"), tickets.new_key().hex()
    with ExitStack() as stack:
        relay = started(stack, "public", RELAY, secret)
        assert said(relay) == "7702"
        workers = []
        for at, (me, peer) in enumerate((("w-a", "w-b"), ("w-b", "w-a"))):
            key = new_key()
            signed = authority.sign(signing_request(key, "x"), me)
            identity_from(key, signed, authority.certificate_pem).save(tmp_path / me)
            # Each is given the other's outer address, at which its router lets nobody in.
            arguments = (str(tmp_path / me), me, peer, secret, f"192.0.2.{11 - at}")
            workers.append(started(stack, "ab"[at], WORKER, *arguments))
        assert [said(worker) for worker in workers] == ["relayed", "relayed"]
        assert relay.stdin is not None
        relay.stdin.close()
        assert int(said(relay)) > 16 * 300_000
        for worker in workers:
            worker.communicate(timeout=HUNG_S)
