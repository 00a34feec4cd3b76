"""Snapshots, leases, manifests and shards: what a trainer reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from stepwell import messages
from stepwell._client.queries import read_table
from stepwell._client.transport import Transport, request, segment, sending
from stepwell._files import whole_file
from stepwell.errors import CodecError
from stepwell.messages import ARROW, Snapshot

CHUNK = 1 << 20
PARQUET = "application/vnd.apache.parquet"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Snapshots(Transport):
    """Part of `Client`."""

    def create_snapshot(
        self,
        *,
        dataset: str | None = None,
        where: str | None = None,
        sources: Sequence[messages.Source | Mapping[str, Any]] | None = None,
        since: str | None = None,
        include_eval: bool = False,
        holder: str = "",
    ) -> Snapshot:
        """Freeze a selection of everything acknowledged so far, and lease it for 120 s to `holder`.

        Either `dataset` (and `where`, a SQL condition over `trajectories`), or `sources`, a mixture
        like [{"select": "SELECT id FROM trajectories WHERE …", "share": 0.8}, …].

        `since`, an earlier snapshot's id, makes a refresh: the service looks at what changed since
        then, and `added` and `removed` count it. When nothing did, the answer is that snapshot
        itself (same `id`), leased to `holder` anew. `manifest(new.id, since=old.id)` then brings
        only the rows that differ.
        """
        body = request(
            messages.CreateSnapshot,
            sources=None if sources is None else [_plain(source) for source in sources],
            dataset=dataset,
            where=where,
            since=since,
            include_eval=include_eval or None,
            holder=holder or None,
        )
        # Repeating it makes another snapshot of the same selection: wasteful, never wrong.
        return self.ask(
            Snapshot,
            "POST",
            "/v1/snapshots",
            body=body,
            idempotent=True,
            timeout=max(self.timeout, 120.0),
        )

    def snapshot(self, snapshot_id: str) -> Snapshot:
        return self.ask(Snapshot, "GET", _snapshot(snapshot_id))

    def snapshots(self) -> list[Snapshot]:
        pages = self.pages(messages.SnapshotPage, "/v1/snapshots")
        return [snapshot for page in pages for snapshot in page.items]

    def manifest(self, snapshot_id: str, *, since: str | None = None) -> Any:
        """pyarrow.Table, one row per selected trajectory, in an order that never changes.

        id (16 bytes; `stepwell.manifest.id_texts` writes them out), dataset, seq, component,
        weight, shard, traj_idx, row_start (row in the shard), length (T), first_step, return,
        terminated, truncated, final_obs_valid, env, content. Schema metadata carries the snapshot's
        id and digest and the components' shares. Raises `Gone`.

        With `since`, another snapshot's id: what differs, for `stepwell.manifest.apply(table of
        that snapshot, changes)`.
        """
        response = self.call(
            "GET",
            f"{_snapshot(snapshot_id)}/manifest",
            params=None if since is None else {"since": since},
            accept=ARROW,
        )
        return read_table(response.content, f"the manifest of {snapshot_id}")

    def lease(self, snapshot_id: str, holder: str = "", ttl: float = 120.0) -> messages.Lease:
        """Promise of `ttl` more seconds in which nothing of the snapshot is deleted."""
        return self.ask(
            messages.Lease,
            "PUT",
            f"{_snapshot(snapshot_id)}/lease",
            body=request(messages.PutLease, holder=holder, ttl=ttl),
        )

    def release(self, snapshot_id: str, holder: str = "") -> None:
        """Give a lease back before it ends."""
        self.call("DELETE", f"{_snapshot(snapshot_id)}/lease", params={"holder": holder})

    def download_shard(self, shard_id: str, path: str | Path, *, sha256: str | None = None) -> Path:
        """Fetch a shard to `path`: streamed, its digest checked, there whole or not at all.

        The digest is `sha256`, or what the service says (ETag). Raises `CodecError` for bytes
        that do not have it, `Gone` for a shard that is no more.
        """
        target = Path(path)

        def attempt() -> None:
            asked = self._http.build_request(
                "GET",
                f"/v1/shards/{segment(shard_id)}",
                headers={"Accept": f"{PARQUET}, */*", "Accept-Encoding": "identity"},
                timeout=self._timeout(self.timeout),
            )
            with sending(self.url, self.timeout):
                response = self._http.send(asked, stream=True)
                try:
                    if not response.is_success:
                        response.read()
                    self.raise_for(response)
                    self._receive(response, shard_id, target, sha256)
                finally:
                    response.close()

        self.retrying(attempt, repeatable=True)
        return target

    def _receive(
        self, response: httpx2.Response, shard_id: str, target: Path, sha256: str | None
    ) -> None:
        wanted = sha256 or etag_of(response)
        if not _SHA256.fullmatch(wanted):
            raise CodecError(
                f"shard {shard_id} came without a digest",
                expected="an ETag with the sha256",
                got=repr(wanted),
            )
        digest = hashlib.sha256()
        with whole_file(target) as file:
            for chunk in response.iter_bytes(CHUNK):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != wanted:
                raise CodecError(
                    f"shard {shard_id} arrived damaged", expected=wanted, got=digest.hexdigest()
                )


def etag_of(response: httpx2.Response) -> str:
    """The ETag without its quotes, or nothing."""
    return str(response.headers.get("ETag", "")).removeprefix("W/").strip('"')


def _snapshot(snapshot_id: str) -> str:
    return f"/v1/snapshots/{segment(snapshot_id)}"


def _plain(source: messages.Source | Mapping[str, Any]) -> Any:
    return dict(source) if isinstance(source, Mapping) else source
