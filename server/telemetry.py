"""The metrics of GET /metrics: one Prometheus registry per service, never a global one."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class MemoryGauges:
    """The metrics of one budget of memory."""

    budget: Gauge
    held: Gauge
    waiting: Gauge
    refused: Counter

    @classmethod
    def of(cls, name: str, what: str, registry: CollectorRegistry) -> MemoryGauges:
        prefix = f"stepwell_{name}"
        return cls(
            Gauge(f"{prefix}_budget_bytes", f"Memory that {what} may hold", registry=registry),
            Gauge(f"{prefix}_held_bytes", f"Memory that {what} hold", registry=registry),
            Gauge(f"{prefix}_waiting", f"{what}: waiting for memory", registry=registry),
            Counter(f"{prefix}_refused", f"429 for want of memory for {what}", registry=registry),
        )


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
        self.memory = {
            "body": MemoryGauges.of("body", "request bodies", r),
            "answer": MemoryGauges.of("answer", "answers", r),
        }
        """Budgets by their kind."""
        self.answers_dropped = Counter(
            "stepwell_answer_dropped",
            "Answers ended because their client did not read while others waited",
            registry=r,
        )
        self.free_bytes = Gauge("stepwell_disk_free_bytes", "Left on the disk", registry=r)

    def text(self) -> bytes:
        return generate_latest(self.registry)
