"""The Blobs and Data services: bytes in and out of the store, micro-batches to the stages.

Disk work runs in threads, so a large upload never delays a step's commit. Every request is
bounded; what is refused raises an error of ours, with which ``access`` ends the call. ``Rights`` decide who
may fetch and put what (``coordinator.services.blobs.rights``).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from atoll.arrays import dtype_name
from atoll.errors import AccessDenied, ConnectionFailed, UsageError
from coordinator.services.access.callers import worker_of
from coordinator.services.blobs.rights import Accounts, Role, role_of
from coordinator.storage.blob_store import Gone, OtherBytes
from coordinator.storage.delta_chains import DeltaChains
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.blob_transfer import Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping

    import grpc

    from atoll.job import JobSpec
    from coordinator.services.blobs.gathering import Gathering, Progress
    from coordinator.shell import Shell
    from coordinator.storage.blob_store import BlobStore
    from coordinator.storage.data_provider import DataProvider

    Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger()

MAX_BLOBS_A_REQUEST = 100_000
MAX_CHAINS_A_REQUEST = 1_000


class Rights:
    """Anybody may do anything; subclasses end the calls of those who may not."""

    async def fetch(self, names: Collection[str], context: Context) -> None:
        """Whether the caller may have these blobs."""

    async def put(self, name: str, size: int, context: Context) -> None:
        """Whether the caller may put this blob, or so much of it."""

    def asker(self, context: Context) -> str:
        """Whoever calls."""
        return ""

    async def known(self, context: Context) -> Collection[str] | None:
        """The blobs of which the caller may learn that they are here; None: of all."""
        return None

    def has_put(self, name: str, asker: str) -> None:
        """The caller has sent all of this blob."""

    def was_wrong(self, name: str, asker: str) -> None:
        """The caller has sent other bytes as this blob."""

    def asked_about(self, name: str, asker: str) -> None:
        """The caller learns that this blob is here, and will count on it."""

    async def patch(self, name: str, size: int, context: Context) -> None:
        """Whether the caller may have this blob made of a delta."""
        raise AccessDenied("only workers send deltas")

    def spent(self, delta: str, asker: str) -> None:
        """A delta of the caller's is gone."""

    def gather(self, sizes: Mapping[str, int]) -> AsyncIterator[Progress]:
        """Have workers put what they hold of these blobs, for the caller."""
        raise AccessDenied("only owners have weights gathered")


class OwnerRights(Rights):
    """The owner puts what he likes and fetches what jobs rest on, which no client's update is."""

    def __init__(self, shell: Shell, gathering: Gathering) -> None:
        self._shell = shell
        self._gathering = gathering

    def gather(self, sizes: Mapping[str, int]) -> AsyncIterator[Progress]:
        """Of an owner's job."""
        return self._gathering.gather(sizes)

    async def fetch(self, names: Collection[str], context: Context) -> None:
        """Only what a job refers to."""
        known = self._shell.scheduler.ledger.referenced_blobs()
        _all_of(names, known, "of no job")

    def asked_about(self, name: str, asker: str) -> None:
        """What waits here for its job waits longer."""
        _promise(self._shell, name, asker)


class WorkerRights(Rights):
    """A worker fetches what its job named to it and puts what that, or an owner's submission, asked for."""

    def __init__(self, shell: Shell, gathering: Gathering, insecure: bool) -> None:
        self._shell = shell
        self._gathering = gathering
        self._insecure = insecure
        self._accounts = Accounts()
        self._giving_way = asyncio.Lock()  # what a worker began is gone before another begins it

    async def fetch(self, names: Collection[str], context: Context) -> None:
        """Only what the messages of its job named, and deltas to that."""
        role = self._role(context)
        known = await asyncio.to_thread(role.named)
        if not known.issuperset(names):
            known |= self._shell.chains.deltas(known)
        _all_of(names, known, "that your job did not name to you")

    async def put(self, name: str, size: int, context: Context) -> None:
        """As much as its job asks for; what it put before and nothing needs gives way."""
        worker = worker_of(context, self._insecure)
        self._shell.uploading(worker)
        if self._gathering.allowed(worker, name, size) or self._accounts.counted(worker, name, size):
            return
        shell, role = self._shell, self._role(context)
        most = await asyncio.to_thread(role.allowance)
        async with self._giving_way:
            settled, reported = shell.scheduler.blobs_in_flight(), shell.reported
            away = self._accounts.admit(worker, name, size, most, shell.blobs.held, settled, reported)
            if away:
                await asyncio.to_thread(shell.blobs.give_way, away, worker)

    async def patch(self, name: str, size: int, context: Context) -> None:
        """As it may put it."""
        await self.put(name, size, context)

    def spent(self, delta: str, asker: str) -> None:
        """It counts no more."""
        self._accounts.forget(asker, delta)

    def asker(self, context: Context) -> str:
        """The worker."""
        return worker_of(context, self._insecure)

    async def known(self, context: Context) -> Collection[str]:
        """What its job named to it, and what it has sent itself: who else has a blob is nobody's business."""
        worker = self.asker(context)
        role = role_of(self._shell.scheduler, self._shell.graphs, worker)
        named = await asyncio.to_thread(role.named) if role is not None else frozenset[str]()
        return named | self._accounts.whole(worker)

    def has_put(self, name: str, asker: str) -> None:
        """It may learn from now on that this blob is here."""
        self._accounts.has_put(asker, name)

    def was_wrong(self, name: str, asker: str) -> None:
        """Of what it claimed to hold, it holds something else."""
        self._gathering.wrong(asker, name)

    def asked_about(self, name: str, asker: str) -> None:
        """What it does not send again stays until it reports it."""
        _promise(self._shell, name, asker)

    def _role(self, context: Context) -> Role:
        role = role_of(self._shell.scheduler, self._shell.graphs, worker_of(context, self._insecure))
        if role is None:
            # A moment later it may have one again: after our restart, or once its connection is back.
            raise ConnectionFailed("no job uses this worker now; try again")
        return role


class BlobService(rpc.BlobsServicer):
    """Uploads resume where ``Held`` says; downloads begin at any offset."""

    def __init__(
        self, store: BlobStore, rights: Rights | None = None, chains: DeltaChains | None = None
    ) -> None:
        self._store = store
        self._rights = rights or Rights()
        self._chains = DeltaChains() if chains is None else chains

    async def Missing(self, request: pb.BlobList, context: Context) -> pb.BlobList:  # noqa: N802
        """Of the given blobs, those that are not whole here, with the bytes that are."""
        _bounded(request)
        asker, known = self._rights.asker(context), await self._rights.known(context)

        def may_know(name: str) -> bool:
            return known is None or name in known

        def here(name: str) -> bool:
            return may_know(name) and self._store.has(name)

        def find() -> pb.BlobList:
            for b in request.blobs:
                if here(b.hash):
                    self._rights.asked_about(b.hash, asker)
            # Looked at again: it may have gone before that was noted.
            absent = (b.hash for b in request.blobs if not here(b.hash))
            resumes = self._store.resumes
            refs = [pb.BlobRef(hash=h, offset=resumes(h, asker, known=may_know(h))) for h in absent]
            return pb.BlobList(blobs=refs)

        return await asyncio.to_thread(find)

    async def Held(self, request: pb.BlobList, context: Context) -> pb.BlobList:  # noqa: N802
        """How many bytes of each blob are here, as far as the caller may know, or came from the caller."""
        _bounded(request)
        asker, known = self._rights.asker(context), await self._rights.known(context)

        def held(name: str) -> int:
            may_know = known is None or name in known
            return self._store.held(name, asker) if may_know else self._store.arrived(name, asker)

        def find() -> pb.BlobList:
            return pb.BlobList(blobs=[pb.BlobRef(hash=b.hash, offset=held(b.hash)) for b in request.blobs])

        return await asyncio.to_thread(find)

    async def Put(self, request_iterator: AsyncIterator[pb.BlobChunk], context: Context) -> pb.BlobList:  # noqa: N802
        """Take chunks of any blobs; answers with those that became whole."""
        whole: dict[str, int] = {}
        asker, known = self._rights.asker(context), await self._rights.known(context)
        async for chunk in request_iterator:
            await self._rights.put(chunk.hash, chunk.size, context)
            write = partial(
                self._store.write, chunk.hash, chunk.size, chunk.offset, chunk.data, asker,
                known=known is None or chunk.hash in known or chunk.hash in whole,
            )  # fmt: skip
            try:
                complete = await asyncio.to_thread(write)
            except OtherBytes:
                self._rights.was_wrong(chunk.hash, asker)
                raise
            if complete:
                self._rights.has_put(chunk.hash, asker)
                whole[chunk.hash] = chunk.size
        return pb.BlobList(blobs=[pb.BlobRef(hash=h, size=size) for h, size in whole.items()])

    async def Patch(self, request: pb.BlobPatches, context: Context) -> pb.BlobList:  # noqa: N802
        """Make blobs of deltas; answers with those that became whole. What the caller may not know of is, to
        it, as what is not here."""
        if len(request.patches) > MAX_BLOBS_A_REQUEST:
            raise UsageError(f"{len(request.patches)} patches in one request; send {MAX_BLOBS_A_REQUEST}")
        asker, whole = self._rights.asker(context), pb.BlobList()
        for p in request.patches:
            await self._rights.patch(p.hash, p.size, context)
            known = await self._rights.known(context)
            if known is not None and not {p.base, p.delta} <= set(known):
                continue
            make = partial(
                self._store.patch, p.hash, p.size, p.base, p.delta, asker,
                known=known is None or p.hash in known,
            )  # fmt: skip
            try:
                complete = await asyncio.to_thread(make)
            except (UsageError, Gone) as error:
                log.info("blob.not_patched", blob=p.hash[:12], reason=str(error))
                complete = False
            await asyncio.to_thread(self._store.discard, await self._no_more(p, complete), asker)
            self._rights.spent(p.delta, asker)
            if complete:
                self._rights.has_put(p.hash, asker)
                whole.blobs.add(hash=p.hash, size=p.size)
        return whole

    async def _no_more(self, p: pb.BlobPatch, complete: bool) -> list[str]:
        """Return the deltas that nobody needs: this one too, unless others may fetch it."""
        if not complete or not await asyncio.to_thread(lambda: self._store.roomy):
            return [p.delta]
        try:
            size = await asyncio.to_thread(self._store.size, p.delta)
        except Gone:
            return []
        return self._chains.add(Change(p.hash, p.base, p.delta, size), p.size)

    async def Changes(self, request: pb.BlobList, context: Context) -> pb.BlobChanges:  # noqa: N802
        """Deltas that lead to these blobs, which the caller may fetch."""
        names = {blob.hash for blob in request.blobs}
        if len(names) > MAX_CHAINS_A_REQUEST:
            raise UsageError(f"deltas to {len(names)} blobs in one request; ask for {MAX_CHAINS_A_REQUEST}")
        await self._rights.fetch(names, context)
        found = (change for name in names for change in self._chains.to(name))
        changes = (pb.BlobChange(hash=c.hash, base=c.base, delta=c.delta, size=c.size) for c in found)
        return pb.BlobChanges(changes=changes)

    async def Gather(self, request: pb.BlobList, context: Context) -> AsyncIterator[pb.Gathered]:  # noqa: N802
        """How far workers are with those of these blobs that are not here; ends when no more come."""
        _bounded(request)
        async for at in self._rights.gather({blob.hash: blob.size for blob in request.blobs}):
            yield pb.Gathered(done_bytes=at.done_bytes, total_bytes=at.total_bytes, workers=at.workers)

    async def Get(self, request: pb.BlobList, context: Context) -> AsyncIterator[pb.BlobChunk]:  # noqa: N802
        """The given blobs in turn, each from its offset; an empty rest is one empty chunk."""
        _bounded(request)
        await self._rights.fetch({blob.hash for blob in request.blobs}, context)
        for blob in request.blobs:
            size = await asyncio.to_thread(self._store.size, blob.hash)
            offset = blob.offset
            pieces = self._store.chunks(blob.hash, offset)
            while piece := await asyncio.to_thread(next, pieces, b""):
                yield pb.BlobChunk(hash=blob.hash, size=size, offset=offset, data=piece)
                offset += len(piece)
            if offset == blob.offset:
                yield pb.BlobChunk(hash=blob.hash, size=size, offset=offset)


class DataService(rpc.DataServicer):
    """Micro-batches of the job that ``spec_of`` knows, for the worker that asks."""

    def __init__(self, provider: DataProvider, spec_of: Callable[[str], JobSpec | None]) -> None:
        self._provider = provider
        self._spec_of = spec_of

    async def Batches(self, request: pb.BatchRequest, context: Context) -> AsyncIterator[pb.Batch]:  # noqa: N802
        """Send the named inputs of some steps, in (step, micro, input) order."""
        spec = self._spec_of(request.job)
        if spec is None:
            raise UsageError(f"no job {request.job[:80]!r} is running")
        first, count = request.first_micro, request.micros
        micros = range(first, first + count) if count else None
        served: Iterator[pb.Batch] = (
            pb.Batch(
                step=b.step, micro=b.micro, input=b.input, dtype=dtype_name(b.array), shape=b.array.shape,
                data=b.array.tobytes(),
            )
            for b in self._provider.batches(
                spec, request.evaluation, list(request.inputs), request.first_step, request.count, micros
            )
        )  # fmt: skip
        while (batch := await asyncio.to_thread(next, served, None)) is not None:
            yield batch


def _promise(shell: Shell, name: str, asker: str) -> None:
    """Keep a blob whose presence is confirmed to its uploader: who deletes it is done once it was touched."""
    shell.promises.told(asker, name, shell.clock())
    shell.blobs.touch(name)


def _bounded(request: pb.BlobList) -> None:
    if len(request.blobs) > MAX_BLOBS_A_REQUEST:
        words = f"{len(request.blobs)} blobs in one request; ask for at most {MAX_BLOBS_A_REQUEST}"
        raise UsageError(words)


def _all_of(names: Collection[str], known: Collection[str], what: str) -> None:
    """End the call with AccessDenied unless all ``names`` are ``known``; the message does not reveal whether
    the others are stored here."""
    odd = sorted(set(names).difference(known))
    if odd:
        raise AccessDenied(f"{len(odd)} blobs {what}, first {odd[0][:12]}")
