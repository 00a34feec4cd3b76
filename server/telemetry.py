"""The metrics of GET /metrics: one Prometheus registry per service, never a global one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Telemetry:
    """Metrics that the parts of the service update."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.trajectories = Counter(
            "stepwell_ingest_trajectories", "Posted trajectories by outcome", ["status"], registry=r
        )
        self.steps = Counter("stepwell_ingest_steps", "Transitions stored", registry=r)
        self.ingest_bytes = Counter("stepwell_ingest_bytes", "Array bytes stored", registry=r)
        self.evicted = Counter("stepwell_evicted_trajectories", "Evicted from fifo", registry=r)
        self.commit_seconds = Histogram(
            "stepwell_commit_seconds", "Append, fsync and index", buckets=_SECONDS, registry=r
        )
        self.seal_seconds = Histogram(
            "stepwell_seal_seconds", "One segment into shards", buckets=_SECONDS, registry=r
        )
        self.writable = Gauge("stepwell_writable", "1 unless read-only", registry=r)
        self.scrub_bytes = Counter("stepwell_scrub_bytes", "Read by the scrub", registry=r)
        self.scrub_files = Counter(
            "stepwell_scrub_files", "Verified by the scrub", ["result"], registry=r
        )
        self.scrub_oldest = Gauge(
            "stepwell_scrub_oldest_seconds", "Since the longest unverified file was", registry=r
        )
        self.quarantined = Gauge("stepwell_quarantined_shards", "Damaged shards", registry=r)
        self.lost_rows = Gauge("stepwell_index_lost_rows", "Damaged, left out", registry=r)
        self.queued_bytes = Gauge("stepwell_ingest_queued_bytes", "Waiting to commit", registry=r)
        self.body_budget = Gauge(
            "stepwell_body_budget_bytes", "Memory that request bodies may hold", registry=r
        )
        self.body_held = Gauge(
            "stepwell_body_held_bytes", "Memory that request bodies hold", registry=r
        )
        self.body_waiting = Gauge(
            "stepwell_body_waiting", "Requests whose body waits for memory", registry=r
        )
        self.body_refused = Counter(
            "stepwell_body_refused",
            "Bodies answered 429 for want of memory",
            registry=r,
        )
        self.free_bytes = Gauge("stepwell_disk_free_bytes", "Left on the disk", registry=r)

    def text(self) -> bytes:
        return generate_latest(self.registry)
