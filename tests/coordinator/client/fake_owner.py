"""A coordinator's entry port that answers the owner from a script, for tests of the client side."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from coordinator.client.endpoint import Endpoint
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import Authority, JoinToken, new_token, server_credentials
from tests.patience import HUNG_S

Context = Any
JOIN_TOKEN = JoinToken(Authority._create(None).certificate_pem, bytes(16), 7701).encode()  # that it creates


@dataclass
class Script:
    """What the fake answers and what it was asked."""

    protocol: int = PROTOCOL_VERSION
    updates: list[pb.JobUpdate] = field(default_factory=list)
    result: pb.ResultReply = field(default_factory=pb.ResultReply)
    plan: pb.PlanReply = field(default_factory=pb.PlanReply)
    status: pb.StatusReply = field(default_factory=lambda: pb.StatusReply(version="0.1.0", uptime_s=5))
    chunks: list[pb.TraceChunk] = field(default_factory=list)
    lines: list[pb.LogLine] = field(default_factory=list)
    tokens: dict[str, pb.TokenInfo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    partial: dict[str, bytes] = field(default_factory=dict)
    submissions: dict[str, pb.SubmitRequest] = field(default_factory=dict)
    kicked: list[pb.KickRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    secret: str | None = None  # what the owner must present
    fail_first: dict[str, int] = field(default_factory=dict)  # call -> times it is UNAVAILABLE
    refuse: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    break_after_chunks: int | None = None  # once, in Put and in Get
    hold: threading.Event | None = None  # Watch waits for it after its updates


class _Service:
    def __init__(self, script: Script) -> None:
        self.script = script

    def admit(self, call: str, context: Context) -> None:
        given = dict(context.invocation_metadata()).get("authorization")
        if self.script.secret is not None and given != f"Bearer {self.script.secret}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is not the owner's token")
        if self.script.fail_first.get(call, 0) > 0:
            self.script.fail_first[call] -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        if call in self.script.refuse:
            context.abort(*self.script.refuse[call])

    def breaks(self, count: int) -> bool:
        if self.script.break_after_chunks is not None and count > self.script.break_after_chunks:
            self.script.break_after_chunks = None
            return True
        return False


class _Entry(_Service, rpc.EntryServicer):
    def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        return pb.HelloReply(protocol=self.script.protocol, version="0.1.0", time_s=1.0)


class _Owner(_Service, rpc.OwnerServicer):
    def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitReply:
        self.admit("Submit", context)
        self.script.submissions[request.submission] = request
        job = f"j-{len(self.script.submissions)}"
        return pb.SubmitReply(job=job, update=pb.JobUpdate(job=job, state="queued", reason="fleet is busy"))

    def MakePlan(self, request: pb.PlanRequest, context: Context) -> pb.PlanReply:
        self.admit("MakePlan", context)
        return self.script.plan

    def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        self.admit("Status", context)
        return self.script.status

    def Watch(self, request: pb.JobRequest, context: Context) -> Iterator[pb.JobUpdate]:
        self.admit("Watch", context)
        for count, update in enumerate(self.script.updates):
            if self.breaks(count):
                context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
            yield update
        if self.script.hold is not None:
            self.script.hold.wait(HUNG_S)

    def Logs(self, request: pb.LogsRequest, context: Context) -> Iterator[pb.LogLine]:
        self.admit("Logs", context)
        yield from self.script.lines

    def Cancel(self, request: pb.JobRequest, context: Context) -> pb.JobUpdate:
        self.admit("Cancel", context)
        self.script.cancelled.append(request.job)
        return pb.JobUpdate(job=request.job, state="cancelled", step=7, checkpoint_step=5)

    def ForgetJobs(self, request: pb.ForgetJobsRequest, context: Context) -> pb.Empty:
        self.admit("ForgetJobs", context)
        self.script.forgotten += request.jobs
        return pb.Empty()

    def Result(self, request: pb.ResultRequest, context: Context) -> pb.ResultReply:
        self.admit("Result", context)
        return self.script.result

    def Trace(self, request: pb.TraceRequest, context: Context) -> Iterator[pb.TraceChunk]:
        self.admit("Trace", context)
        yield from self.script.chunks

    def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.TokenReply:
        self.admit("CreateToken", context)
        info = pb.TokenInfo(id="t-1", name=request.name, created_s=1.0, expires_s=request.lifetime_s)
        self.script.tokens[info.id] = info
        return pb.TokenReply(info=info, token=JOIN_TOKEN)

    def ListTokens(self, request: pb.Empty, context: Context) -> pb.TokenList:
        self.admit("ListTokens", context)
        return pb.TokenList(tokens=self.script.tokens.values())

    def RevokeToken(self, request: pb.TokenRequest, context: Context) -> pb.Empty:
        self.admit("RevokeToken", context)
        if request.id not in self.script.tokens:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no token {request.id}; see `atoll token list`")
        self.script.tokens[request.id].revoked = True
        return pb.Empty()

    def Kick(self, request: pb.KickRequest, context: Context) -> pb.Empty:
        self.admit("Kick", context)
        self.script.kicked.append(request)
        return pb.Empty()


class _Blobs(_Service, rpc.BlobsServicer):
    def Missing(self, request: pb.BlobList, context: Context) -> pb.BlobList:
        self.admit("Missing", context)
        absent = [blob.hash for blob in request.blobs if blob.hash not in self.script.blobs]
        held = self.script.partial
        return pb.BlobList(blobs=[pb.BlobRef(hash=h, offset=len(held.get(h, b""))) for h in absent])

    def Put(self, request_iterator: Iterator[pb.BlobChunk], context: Context) -> pb.BlobList:
        self.admit("Put", context)
        whole: list[pb.BlobRef] = []
        for count, chunk in enumerate(request_iterator):
            if self.breaks(count):
                context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
            held = self.script.partial.get(chunk.hash, b"")
            assert chunk.offset == len(held), "an upload goes on where it ended"
            held += chunk.data
            self.script.partial[chunk.hash] = held
            if len(held) == chunk.size:
                assert hashlib.sha256(held).hexdigest() == chunk.hash
                self.script.blobs[chunk.hash] = self.script.partial.pop(chunk.hash)
                whole.append(pb.BlobRef(hash=chunk.hash))
        return pb.BlobList(blobs=whole)

    def Get(self, request: pb.BlobList, context: Context) -> Iterator[pb.BlobChunk]:
        self.admit("Get", context)
        count = 0
        for blob in request.blobs:
            data = self.script.blobs[blob.hash]
            for offset in range(blob.offset, max(len(data), 1), 1000):
                count += 1
                if self.breaks(count):
                    context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
                piece = data[offset : offset + 1000]
                yield pb.BlobChunk(hash=blob.hash, size=len(data), offset=offset, data=piece)


class FakeOwnerServer:
    """Serves a Script on a free loopback port, with TLS when given a folder for its authority."""

    def __init__(self, script: Script, folder: Path | None = None) -> None:
        self.script = script
        self.token: JoinToken | None = None
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        rpc.add_EntryServicer_to_server(_Entry(script), self._server)  # type: ignore[no-untyped-call]
        rpc.add_OwnerServicer_to_server(_Owner(script), self._server)  # type: ignore[no-untyped-call]
        rpc.add_BlobsServicer_to_server(_Blobs(script), self._server)  # type: ignore[no-untyped-call]
        if folder is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            authority = Authority.open(folder)
            self.token = new_token(authority)
            script.secret = self.token.presented
            identity = authority.server_identity()
            self.port = self._server.add_secure_port(
                "127.0.0.1:0", server_credentials(identity, mutual=False)
            )

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port, self.token)

    @property
    def options(self) -> list[str]:
        """What names this server on the command line."""
        found = ["--coordinator", f"127.0.0.1:{self.port}"]
        return [*found, "--token", self.token.encode()] if self.token else [*found, "--insecure"]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.script.hold is not None:
            self.script.hold.set()
        self._server.stop(0).wait()
        self._pool.shutdown()
