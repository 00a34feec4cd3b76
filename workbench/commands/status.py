"""`stepwell status`: health and contents of the service. Exit status 1 if it is degraded."""

from __future__ import annotations

from stepwell import terminal


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser(
        "status",
        "Health of the service and what it holds. Exit status 1 where it is degraded.",
        "  stepwell status\n  stepwell status --json",
    )
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    with terminal.connect(args) as client:
        health = client.health()
        datasets, runs, workers = client.datasets(), client.runs(), client.workers()
    counts = {
        "datasets": len(datasets),
        "trajectories": sum(
            s.trajectories for d in datasets for s in (d.fifo, d.protected, d.eval)
        ),
        "steps": sum(s.steps for d in datasets for s in (d.fifo, d.protected, d.eval)),
        "stored_bytes": sum(d.stored_bytes for d in datasets),
        "runs": len(runs),
        "runs_running": sum(r.status == "running" for r in runs),
        "workers_alive": sum(w.alive for w in workers),
    }
    if args.json:
        terminal.print_json({"url": client.url, "health": health, "counts": counts})
    else:
        terminal.print_fields(
            [
                ("service", client.url),
                ("status", " ".join(filter(None, (health.status, health.detail)))),
                ("version", health.version),
                ("writable", health.writable),
                ("datasets", counts["datasets"]),
                ("trajectories", f"{counts['trajectories']:,}"),
                ("steps", f"{counts['steps']:,}"),
                ("stored", terminal.size(counts["stored_bytes"])),
                ("runs", f"{counts['runs']} ({counts['runs_running']} running)"),
                ("workers alive", counts["workers_alive"]),
            ]
        )
    return 0 if health.status == "ok" else 1
