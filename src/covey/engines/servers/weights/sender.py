"""Sending of weights from the trainer to inference servers, the same for every backend (a `WeightApi`)."""

import asyncio
import logging
import math
import shutil
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.core.engine import WeightTransfer, WeightUpdate
from covey.engines.servers.errors import RETRIED, BadAnswer, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ADAPTER_PREFIX, ServerFacts
from covey.engines.servers.weights.api import Deadline, WeightApi, WeightEndpoint
from covey.engines.servers.weights.buckets import BUCKET_BYTES, Bucket, Buckets, Labels, pack
from covey.engines.servers.weights.channels import Channel, all_of, in_thread
from covey.engines.servers.weights.differences import HeldWeights
from covey.engines.servers.weights.files import CheckpointDir
from covey.runtime.user_code import warn

log = logging.getLogger(__name__)
Failures = list[tuple[WeightEndpoint, BaseException]]


@dataclass(eq=False)
class Holdings:
    """One start of a server: what it holds of this run, and the connection to it. A restarted server holds nothing."""

    start_id: str  # "" if the server does not report its starts
    base: bool = False  # the adapters' base model
    adapters: dict[str | None, list[str]] = field(default_factory=dict)  # by `WeightUpdate.adapter_name`, oldest first
    copy: str | None = None  # label of its copy of the weights, for differences
    channel: Channel | None = None
    channel_kind: tuple[str, bool] | None = None  # method, and whether from a GPU; None: not connected

    def disconnect(self) -> None:
        channel, self.channel, self.channel_kind = self.channel, None, None
        if channel is not None:
            channel.close()


@dataclass(eq=False)
class WeightSender:
    """Sends versions of the policy to the servers of one backend; ValueError for an unknown method."""

    api: WeightApi
    method: str = "auto"  # one of `api.methods`, or "auto": the first of `api.automatic` that all servers support
    folder: str | None = None  # for files, visible to servers on other machines; None: temporary, for this machine
    bucket_bytes: int = BUCKET_BYTES  # upper bound of a bucket's size
    differences: bool = False  # send only changed numbers to servers that hold the last update; both ends keep a copy

    def __post_init__(self) -> None:
        known = ("auto", *self.api.methods)
        if self.method not in known:
            raise ValueError(f"weights cannot be transferred by {self.method!r}; choose one of: {', '.join(known)}.")
        self.run = uuid.uuid4().hex[:8]  # tells this run's weights from those of others
        self._shared_folder = self.folder is not None
        self._files = CheckpointDir(self.folder)
        self._loaded_folder: Path | None = None
        self._servers: dict[str, Holdings] = {}  # by URL
        self._adapters: dict[int, str] = {}  # adapter names, by version
        self._named: tuple[WeightUpdate, str] | None = None
        self._held = HeldWeights()  # copy of the last update, if servers are sent differences
        self._held_update: WeightUpdate | None = None  # the update that the copy holds
        self._told: set[str] = set()  # reasons for whole weights that a warning has named

    async def send(
        self, servers: Sequence[ServerClient], update: WeightUpdate, seconds: float
    ) -> WeightTransfer | None:
        """Send `update` to all servers, or start again after an error; the caller pauses them and empties caches.

        Returns what was sent, if `differences` is on, else None.
        """
        until = Deadline(f"take weights of version {update.version}", seconds)
        endpoints = [await self.api.probe(server, until) for server in servers]
        if update.adapter is not None:
            await self._send_adapter(endpoints, update, update.adapter, until)
            return None
        sent = await self._send_model(endpoints, update, until, held=self.differences)
        self._adapters.pop(update.version, None)
        return sent

    def stamp(self, version: int) -> str:
        """Name of this run's weights of `version`: servers record it together with the weights, and report it."""
        return f"covey-{self.run}-{version}"

    def model_name(self, facts: ServerFacts, version: int) -> str:
        """Name of the model to sample `version` from: the server's own, or an adapter's with the version in it."""
        return self._adapters.get(version, facts.model)

    def export_state(self) -> dict[str, str]:
        """Adapter names by version, which `model_name` needs in processes that do not send; JSON."""
        return {str(version): name for version, name in self._adapters.items()}

    def import_state(self, state: dict[str, str]) -> None:
        self._adapters = {int(version): name for version, name in state.items()}

    def invalidate(self, server: ServerClient) -> None:
        """Forget what a server holds, because it may have been restarted, unless it reports its starts."""
        known = self._servers.get(server.url)
        if known is not None and not known.start_id:
            self.forget_server(server)

    def forget_server(self, server: ServerClient) -> None:
        """Forget a server, and close the connection to it."""
        known = self._servers.pop(server.url, None)
        if known is not None:
            known.disconnect()

    def close(self) -> None:
        for known in self._servers.values():
            known.disconnect()
        self._files.clear()

    def _holdings(self, endpoint: WeightEndpoint) -> Holdings:
        url = endpoint.server.url
        if url not in self._servers or self._servers[url].start_id != endpoint.start_id:
            self.forget_server(endpoint.server)
            self._servers[url] = Holdings(endpoint.start_id)
        return self._servers[url]

    async def _send_model(
        self, endpoints: list[WeightEndpoint], update: WeightUpdate, until: Deadline, *, held: bool = False
    ) -> WeightTransfer | None:
        method = choose_method(self.api, self.method, endpoints, shared_folder=self._shared_folder)
        sent = None
        if held and self._can_differ(endpoints, method):
            sent = await self._send_differences(endpoints, update, method, until)
        else:
            for one in endpoints:  # they drop their copies
                self._holdings(one).copy = None
            if method == "disk":
                await self._send_folder(endpoints, update, until)
            else:
                buckets = pack(update, self.bucket_bytes, self.api.bucket_device, dense=self.api.dense)
                raise_first(await self._send_buckets(endpoints, buckets, self.stamp(update.version), method, until))
        await all_of(self._confirm(endpoint, update.version, until) for endpoint in endpoints)
        return sent

    def _can_differ(self, endpoints: list[WeightEndpoint], method: str) -> bool:
        """True if any server can be sent differences; warns, once for each reason, of those that cannot."""
        obstacles = {one: one.obstacles.get("differences") for one in endpoints}
        why = {f"{one.server.url}: {reason}": None for one, reason in obstacles.items() if reason}
        if method == "disk":
            why = {"they are sent as files, which hold whole tensors": None}
        elif not self.api.takes_differences:
            why = {f"{self.api.name} takes whole tensors": None}
        for reason in why.keys() - self._told:
            self._told.add(reason)
            warn(f"Weights are not sent as differences: {reason}.")
        return self.api.takes_differences and method != "disk" and not all(obstacles.values())

    async def _send_differences(
        self, endpoints: list[WeightEndpoint], update: WeightUpdate, method: str, until: Deadline
    ) -> WeightTransfer:
        """Send differences to servers that hold the last update, and whole tensors to the others.

        A server that rejects a difference, because its copy has other bits than expected, is sent everything. Servers
        that are added later get the tensors of the trainer's copy, which are still those of this update.
        """
        failures: Failures = []
        rest, sent = list(endpoints), WeightTransfer(0, 0, 0)
        while rest:
            known = self._held_update is not None and self._held_update.specs == update.specs
            label = self._held.label if known else None
            holders = [one for one in rest if label and self._holdings(one).copy == label]
            if label and self._held_update is update:
                targets, labels, held = rest, Labels(label), None
                source = replace(update, tensors=self._held.items)
            else:
                targets, labels = holders or rest, Labels(uuid.uuid4().hex, label if holders else None)
                source, held, self._held_update = update, self._held, update
            for one in targets:
                self._holdings(one).copy = None
            counted = BucketCount(pack(source, self.bucket_bytes, self.api.bucket_device, labels=labels, held=held))
            failed = await self._send_buckets(targets, counted.buckets(), self.stamp(update.version), method, until)
            lost = [one for one, _ in failed]
            for one in targets:
                if one not in lost and "differences" not in one.obstacles:
                    self._holdings(one).copy = labels.becomes
            rejected = [one for one, error in failed if labels.base and _may_be_rejection(error)]
            failures += [(one, error) for one, error in failed if one not in rejected]
            for one, error in failed:
                if one in rejected:
                    log.warning("%s rejected a difference and is sent all weights: %s", one.server.url, error)
            count = len(targets) - len(rejected)
            whole = 0 if labels.base else count
            sent += WeightTransfer(count, counted.nbytes * len(targets), whole, counted.changed)
            rest = [one for one in rest if one not in targets or one in rejected]
        raise_first(failures)
        return sent

    async def _send_folder(self, endpoints: list[WeightEndpoint], update: WeightUpdate, until: Deadline) -> None:
        folder = self._files.path / f"v{update.version}-{uuid.uuid4().hex[:6]}"
        stale: Path | None = folder
        try:
            await in_thread(lambda: self._files.write(update, folder.name, self.bucket_bytes))
            stamp = self.stamp(update.version)
            await all_of(self.api.load_folder(endpoint, folder, stamp, until) for endpoint in endpoints)
            if self.api.reopens_folder:
                stale, self._loaded_folder = self._loaded_folder, folder
        finally:
            if stale is not None:
                shutil.rmtree(stale, ignore_errors=True)

    async def _send_buckets(
        self, endpoints: list[WeightEndpoint], buckets: Buckets, stamp: str, method: str, until: Deadline
    ) -> Failures:
        """Push every bucket to every server; a server that fails is skipped from then on. Returns the failures."""
        pack_next = partial(next, buckets, None)
        remaining = list(endpoints)
        failures: Failures = []

        async def each(do: Callable[[WeightEndpoint], Awaitable[None]]) -> None:
            results = await asyncio.gather(*(do(endpoint) for endpoint in remaining), return_exceptions=True)
            both = list(zip(remaining, results, strict=True))
            failures.extend((one, result) for one, result in both if isinstance(result, BaseException))
            remaining[:] = [one for one, result in both if result is None]

        gathering = asyncio.ensure_future(in_thread(pack_next))
        try:
            bucket = await asyncio.shield(gathering)
            on_gpu = bucket is not None and bucket.data.is_cuda
            await each(lambda endpoint: self._begin(endpoint, method, on_gpu, until))
            while bucket is not None and remaining:
                gathering = asyncio.ensure_future(in_thread(pack_next))
                await each(partial(self._push, bucket=bucket, stamp=stamp, until=until))
                bucket = await asyncio.shield(gathering)
            await each(lambda endpoint: self.api.end(endpoint, stamp, until))
        finally:
            try:
                await asyncio.wait([gathering])
                buckets.close()
            finally:
                await asyncio.gather(*(self._abandon(one) for one in endpoints if one not in remaining))
        return failures

    async def _begin(self, endpoint: WeightEndpoint, method: str, on_gpu: bool, until: Deadline) -> None:
        await self._connect(endpoint, method, on_gpu, until)
        await self.api.begin(endpoint, until)

    async def _push(self, endpoint: WeightEndpoint, bucket: Bucket, stamp: str, until: Deadline) -> None:
        known = self._holdings(endpoint)
        try:
            await self.api.push(endpoint, known.channel, bucket, stamp, until)
        except BaseException:  # also when cancelled: the two ends may disagree about the bytes that were sent
            known.disconnect()
            raise

    async def _abandon(self, endpoint: WeightEndpoint) -> None:
        self._holdings(endpoint).disconnect()
        await self.api.abandon(endpoint)

    async def _confirm(self, endpoint: WeightEndpoint, version: int, until: Deadline) -> None:
        server, stamp = endpoint.server, self.stamp(version)
        found = await self.api.read_stamp(server, until.left(server))
        if found != stamp:
            message = f"afterwards it reports weights of version {found!r}, not {stamp!r}"
            raise BadAnswer(server.url, until.doing, message, "Does another trainer send weights to it?")

    async def _connect(self, endpoint: WeightEndpoint, method: str, on_gpu: bool, until: Deadline) -> Channel | None:
        known = self._holdings(endpoint)
        if known.channel_kind != (method, on_gpu):
            known.disconnect()
            known.channel = await self.api.join_group(endpoint, on_gpu, until)
            known.channel_kind = method, on_gpu
        return known.channel

    async def _send_adapter(
        self, endpoints: list[WeightEndpoint], update: WeightUpdate, config: dict[str, Any], until: Deadline
    ) -> None:
        for endpoint in endpoints:
            if why := endpoint.obstacles.get("adapter"):
                raise ServerRefused(endpoint.server.url, until.doing, why, self.api.adapter_hint)
        await self._send_bases(endpoints, update, config, until)
        if self._named is None or self._named[0] is not update:  # another attempt at an update keeps its name
            self._named = update, f"{ADAPTER_PREFIX}v{update.version}-{uuid.uuid4().hex[:8]}"
        name = self._named[1]
        from_disk = self.api.adapters_from_disk and self.method != "group"
        near = [one for one in endpoints if from_disk and (one.same_machine or self._shared_folder)]
        far = [one for one in endpoints if one not in near]
        folder, encoded, on_gpu = self._files.path / name if near else None, None, False
        if folder is not None and not folder.exists():
            await in_thread(lambda: self._files.write(update, name, self.bucket_bytes))
        if far:
            if self.api.adapters_from_disk:  # the bytes need a group instead
                choose_method(self.api, "group", far, shared_folder=False)
            buckets = pack(update, max(2 * update.nbytes, 1), self.api.bucket_device)
            [bucket] = await in_thread(lambda: list(buckets))
            encoded, on_gpu = await in_thread(partial(self.api.encode_adapter, bucket)), bucket.data.is_cuda

        async def load(endpoint: WeightEndpoint) -> None:
            known = self._holdings(endpoint)
            loaded = known.adapters.setdefault(update.adapter_name, [])
            if name in loaded:
                return
            source, channel = (encoded if endpoint in far else folder), None
            if endpoint in far and self.api.adapters_from_disk:
                channel = await self._connect(endpoint, "group", on_gpu, until)
            try:
                await self.api.load_adapter(endpoint, name, config, source, channel, until)
            except BaseException:
                if channel is not None:
                    known.disconnect()
                raise
            loaded.append(name)
            while len(loaded) > self.api.adapters_kept:
                await self.api.unload_adapter(endpoint, loaded.pop(0), until)

        await all_of(load(endpoint) for endpoint in endpoints)
        self._adapters[update.version] = name
        stamp = self.stamp(update.version)
        await all_of(self.api.write_stamp(one.server, stamp, until.left(one.server)) for one in endpoints)
        await all_of(self._confirm(endpoint, update.version, until) for endpoint in endpoints)
        # A server reloads what it dropped from its slots, so a folder stays until no server lists its adapter.
        kept = {name for known in self._servers.values() for names in known.adapters.values() for name in names}
        for number, old in list(self._adapters.items()):
            if old not in kept:
                del self._adapters[number]
                if self.api.adapters_from_disk:
                    shutil.rmtree(self._files.path / old, ignore_errors=True)

    async def _send_bases(
        self, endpoints: list[WeightEndpoint], update: WeightUpdate, config: dict[str, Any], until: Deadline
    ) -> None:
        """Send the base model, once, to servers that were started with another model than the adapter's."""
        if update.base is None:
            return
        model = config.get("base_model_name_or_path")
        new = [one for one in endpoints if not self._holdings(one).base]
        lacking = [one for one in new if not model or not await self.api.has_base(one, model, until)]
        if lacking:
            await self._send_model(lacking, update.base, until)
        for one in new:  # not before: a failed attempt is repeated
            self._holdings(one).base = True


@dataclass(eq=False)
class BucketCount:
    """Counts buckets as they are read."""

    packed: Buckets
    nbytes: int = 0
    _sent: int = 0  # numbers
    _of: int = 0
    _differ: bool = False

    def buckets(self) -> Buckets:
        with closing(self.packed):
            for bucket in self.packed:
                self.nbytes += bucket.data.nbytes
                for entry in bucket.entries:
                    self._of += math.prod(entry.spec.shape)
                    if entry.sections is not None:
                        self._differ = True
                        self._sent += sum(section.changed for section in entry.sections)
                yield bucket

    @property
    def changed(self) -> float | None:
        """Fraction of the numbers that were sent; None where none travelled as a difference."""
        return self._sent / max(self._of, 1) if self._differ else None


def raise_first(failures: Failures) -> None:
    if failures:
        raise failures[0][1]


def _may_be_rejection(error: BaseException) -> bool:
    """True for an error that the server reported; False for a broken connection or a timeout."""
    return isinstance(error, ServerError) and not isinstance(error, RETRIED)


def choose_method(api: WeightApi, wanted: str, endpoints: Sequence[WeightEndpoint], *, shared_folder: bool) -> str:
    """Transfer method that all servers support; `ServerRefused` names the first obstacle of each."""
    refused: list[tuple[str, WeightEndpoint, str]] = []
    for method in api.automatic if wanted == "auto" else (wanted,):
        obstacles = [(method, one, why) for one in endpoints if (why := _obstacle(api, method, one, shared_folder))]
        if not obstacles:
            return method
        refused.append(obstacles[0])
    method, endpoint, why = refused.pop()
    why += "".join(f"; by {other}: {reason} ({one.server.url})" for other, one, reason in refused)
    raise ServerRefused(endpoint.server.url, f"take weights by {method}", why, api.method_hint)


def _obstacle(api: WeightApi, method: str, endpoint: WeightEndpoint, shared_folder: bool) -> str | None:
    if method == "disk" and "disk" not in endpoint.obstacles and not (shared_folder or endpoint.same_machine):
        return f"it is on another machine, and no folder is known that both see ({api.folder_setting})"
    return endpoint.obstacles.get(method)
