"""Offline recipes on the datasets of field.py, or on files: table, ranks and pictures.

    python -m benchmarks.offline_field FOLDER [--group fit] [--seeds 0-2] [--jobs 2]
    python -m benchmarks.offline_field FOLDER --file hopper.hdf5=Hopper-v5 …
    python -m benchmarks.offline_field FOLDER --report-only

For each dataset: makes the file, imports it into a service whose data is in FOLDER, and runs
`stepwell compare`. Nothing that FOLDER holds is repeated: the same command continues after it was
stopped, and further datasets, recipes or seeds may be added. With --every-policy, all published
policies are evaluated: learning curves. Writes benchmarks/results/offline_field.json, the table of
docs/reference/results.md, and docs/images/offline_ranks.svg and offline_curves.svg. The whole grid
takes a day, so it may be run in parts, also on several machines: a recorded result stays, with its
commit, until FOLDER has one of the same dataset and recipe. Pictures need the extra `pictures`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.field import BY_NAME, FIELD, FILE, Dataset, make
from benchmarks.report import RESULTS, ROOT, place, provenance, write
from stepwell import Client
from stepwell._files import whole_file
from stepwell._ports import free_port
from stepwell.spaces import Box

NAME = "offline_field"
PAGE = ROOT / "docs" / "reference" / "results.md"
IMAGES = ROOT / "docs" / "images"
RANKS, CURVES = IMAGES / "offline_ranks.svg", IMAGES / "offline_curves.svg"
RECIPES = ("offline", "bc", "bc10", "awac", "crr", "iql", "td3bc", "rebrac", "dt")
CONTINUOUS_ONLY = ("td3bc", "rebrac")
RANKED = ("offline", "bc", "bc10", "iql", *CONTINUOUS_ONLY)
"""Recipes that are ranked; those of CONTINUOUS_ONLY in a ranking of its own."""
EPISODES = 20
KEPT = (
    *("seeds", "mean", "interval", "iqm", "iqm_interval", "episodes", "updates", "seconds"),
    *("by_seed", "alarms"),
)
"""Fields of a row of `stepwell compare` that the result keeps."""
BARS = {
    "pendulum-stitch": -155.0,
    "maze2d-medium": 250.0,
    "halfcheetah_replay-ars": 4700.0,
    "lunarlander": 275.0,
    "tmaze-20": 1.0,
    "tmaze-100": 1.0,
    "gridworld": 0.9,
    "pendulum-stitch-v0": -155.0,  # files by others, named as they are
    "maze2d-medium-selfmade": 250.0,
    "lunarlander-cont-noisy-v0": 275.0,
    "tmaze-passive-H20": 1.0,
    "tmaze-passive-H100": 1.0,
}
"""The IQM that `offline` should reach where it can improve on cloning."""


@contextmanager
def service(folder: Path) -> Iterator[Client]:
    """A service with its data in `folder`."""
    port = free_port()
    words = ["serve", "--data", str(folder / "service"), "--port", str(port)]
    with (folder / "service.log").open("ab") as log:
        process = subprocess.Popen(_stepwell(*words), stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            client.wait_ready()
            yield client
    finally:
        process.terminate()
        process.wait()


def _stepwell(*words: str) -> list[str]:
    return [sys.executable, "-m", "stepwell.cli", *words]


def compare(
    client: Client, folder: Path, dataset: Dataset, file: Path, args: argparse.Namespace
) -> None:
    """Compare the recipes on one dataset; its table goes to FOLDER/tables/NAME.json."""
    if dataset.name not in {d.name for d in client.datasets()}:
        client.upload(dataset.name, file, env=dataset.environment)
    discrete = any(not isinstance(s, Box) for s in client.spec(dataset.name).actions.values())
    recipes = [r for r in args.recipes if not (discrete and r in CONTINUOUS_ONLY)]
    table = folder / "tables" / f"{dataset.name}.json"
    answer = folder / f"{dataset.name}.answer.json"
    answer.unlink(missing_ok=True)
    words = ["compare", dataset.name, "--env", dataset.environment, "--url", client.url]
    words += ["--name", f"field-{dataset.name}", "--output", str(folder / "comparisons")]
    words += ["--recipes", ",".join(recipes), "--seeds", args.seeds, "--jobs", str(args.jobs)]
    words += ["--episodes", str(args.episodes), "--json", str(answer)]
    if dataset.env_args:
        words += ["--env-args", *(f"{k}={_plain(v)}" for k, v in dataset.env_args.items())]
    if args.every_policy:
        words.append("--every-policy")
    threads = {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(_stepwell(*words), env={**os.environ, **threads})
    try:
        while process.poll() is None:
            if time.monotonic() > args.deadline:
                raise KeyboardInterrupt
            time.sleep(0.5)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # it stops its trainers, which keep a checkpoint
        process.wait()
        raise
    if process.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if not answer.exists():
        raise SystemExit(f"{dataset.name}: the comparison failed, see above")
    found = json.loads(answer.read_text())
    about = {"kind": dataset.kind, "group": dataset.group, "memory": dataset.memory}
    with whole_file(table) as out:
        out.write(json.dumps({**provenance(), **about, **found}).encode())
    answer.unlink()


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def report(folder: Path, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The result of all tables in the folder: a table per dataset, ranks and duels.

    Of the `recorded` datasets of an earlier result, rows and curves stay that the folder lacks.
    """
    datasets: dict[str, Any] = {n: dict(table) for n, table in (recorded or {}).items()}
    for path in (folder / "tables").glob("*.json"):
        table = json.loads(path.read_text())
        origin = {key: table[key] for key in ("command", "commit", "date")}
        rows = {
            row["recipe"]: {key: row[key] for key in KEPT if row.get(key) not in (None, [], {})}
            | origin
            for row in table["rows"]
            if row.get("mean") is not None
        }
        curves = [
            {"recipe": p["recipe"], "updates": p["updates"], "mean": p["interval"]["value"]}
            for p in table["curves"]
        ]
        old = datasets.get(path.stem, {"rows": {}, "curves": []})
        datasets[path.stem] = {
            **{key: table[key] for key in ("kind", "group", "memory", "env")},
            "rows": old["rows"] | rows,
            "curves": [p for p in old["curves"] if p["recipe"] not in rows] + curves,
        }
    for name, found in datasets.items():  # a dataset that was looked at changes its group
        if name in BY_NAME:
            found["kind"], found["group"] = BY_NAME[name].kind, BY_NAME[name].group
    order = [d.name for d in FIELD]
    names = sorted(datasets, key=lambda n: (order.index(n) if n in order else -1, n))
    datasets = {name: datasets[name] for name in names}
    return {"datasets": datasets, "ranks": ranks(datasets), "duels": duels(datasets)}


def ranks(datasets: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean ranks by IQM (1: best) over the datasets that have all of the recipes that are ranked:
    first of those for any actions, then with those of CONTINUOUS_ONLY."""
    present = [r for r in RANKED if any(r in d["rows"] for d in datasets.values())]
    anywhere = [r for r in present if r not in CONTINUOUS_ONLY]
    rankings = [_ranking(datasets, anywhere)]
    if anywhere != present:
        rankings.append(_ranking(datasets, present))
    return [ranking for ranking in rankings if len(ranking["mean_rank"]) > 1]


def _ranking(datasets: Mapping[str, Any], recipes: Sequence[str]) -> dict[str, Any]:
    whole = {n: d for n, d in datasets.items() if all(r in d["rows"] for r in recipes)}
    each: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    for table in whole.values():
        scores = {recipe: table["rows"][recipe]["iqm"] for recipe in recipes}
        for recipe, score in scores.items():
            better = sum(other > score for other in scores.values())
            equal = sum(other == score for other in scores.values())
            each[recipe].append(better + (equal + 1) / 2)
    mean = {recipe: statistics.fmean(values) for recipe, values in each.items() if values}
    return {"datasets": list(whole), "mean_rank": dict(sorted(mean.items(), key=lambda r: r[1]))}


def duels(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """`offline` against each other row, by IQM: the datasets on which it is better, within the
    intervals, and worse. Better: the IQM of each is outside the other's interval."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, table in datasets.items():
        ours = table["rows"].get("offline")
        if ours is None:
            continue
        for recipe, row in table["rows"].items():
            if recipe == "offline":
                continue
            where = found.setdefault(recipe, {"better": [], "within": [], "worse": []})
            where[_duel(ours, row)].append(name)
    return found


def _duel(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    low, high = _interval(ours)
    other_low, other_high = _interval(other)
    if low > other["iqm"] and ours["iqm"] > other_high:
        return "better"
    if high < other["iqm"] and ours["iqm"] < other_low:
        return "worse"
    return "within"


def _interval(row: Mapping[str, Any]) -> tuple[float, float]:
    interval = row.get("iqm_interval")
    return (interval["low"], interval["high"]) if interval else (row["iqm"], row["iqm"])


def curves_chart(result: Mapping[str, Any]) -> Any:
    """Mean return of each published policy over its updates, a panel per dataset; None if none
    were evaluated."""
    points = [
        {"dataset": name, **point}
        for name, table in result["datasets"].items()
        for point in table["curves"]
    ]
    if not points:
        return None
    recipes = [recipe for recipe in RECIPES if any(p["recipe"] == recipe for p in points)]
    line = alt.Chart(alt.Data(values=points)).mark_line(point=True)
    chart = line.encode(
        x=alt.X("updates:Q"),
        y=alt.Y("mean:Q", title="mean return", scale=alt.Scale(zero=False)),
        color=alt.Color("recipe:N", sort=recipes, legend=alt.Legend(title=None, orient="bottom")),
        facet=alt.Facet("dataset:N", columns=2, title=None),
    )
    chart = chart.properties(width=300, height=180)
    return chart.resolve_scale(x="independent", y="independent")


def ranks_chart(result: Mapping[str, Any]) -> Any:
    """Mean ranks as bars, beside them each dataset's scores: 0 random, 100 the best recipe."""
    bars = [_ranks_bars(ranking) for ranking in result["ranks"]]
    order = list(dict.fromkeys(r for ranking in result["ranks"] for r in ranking["mean_rank"]))
    cells = []
    for name, table in result["datasets"].items():
        rows = {r: row["iqm"] for r, row in table["rows"].items()}
        low = rows.get("random", min(rows.values()))
        best = max(score for recipe, score in rows.items() if recipe not in ("random", "data"))
        for recipe, score in rows.items():
            if recipe != "random" and best > low:
                share = round(100 * (score - low) / (best - low))
                cells.append({"dataset": name, "recipe": recipe, "score": max(-20, share)})
    columns = [*order, *sorted({c["recipe"] for c in cells} - {*order, "data"}), "data"]
    heat = alt.Chart(
        alt.Data(values=cells), title="IQM of the return: 0 random actions, 100 the best recipe"
    ).encode(
        x=alt.X("recipe:N", sort=columns, title=None, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("dataset:N", sort=list(result["datasets"]), title=None),
    )
    colour = alt.Color(
        "score:Q", scale=alt.Scale(scheme="blues", domain=[0, 100], clamp=True), legend=None
    )
    ink = alt.condition("datum.score > 60", alt.value("white"), alt.value("#1b2430"))
    table = heat.mark_rect().encode(color=colour)
    text = heat.mark_text(fontSize=10).encode(text="score:Q", color=ink)
    right = (table + text).properties(width=46 * len(columns), height=18 * len(result["datasets"]))
    return alt.hconcat(alt.vconcat(*bars), right).resolve_scale(color="independent")


def _ranks_bars(ranking: Mapping[str, Any]) -> Any:
    mean, number = ranking["mean_rank"], len(ranking["datasets"])
    ranked = [{"recipe": recipe, "mean rank": round(rank, 2)} for recipe, rank in mean.items()]
    bars = alt.Chart(alt.Data(values=ranked), title=f"mean rank, {number} datasets (1: best)")
    bar = bars.mark_bar(color="#0b5cad").encode(
        x=alt.X("mean rank:Q"), y=alt.Y("recipe:N", sort=list(mean), title=None)
    )
    label = bars.mark_text(align="left", dx=4).encode(
        x="mean rank:Q", y=alt.Y("recipe:N", sort=list(mean)), text="mean rank:Q"
    )
    return (bar + label).properties(width=220, height=24 * max(1, len(mean)))


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of docs/reference/results.md."""
    tables = result["datasets"]
    recipes = [
        r for r in ("data", "random", *RECIPES) if any(r in t["rows"] for t in tables.values())
    ]
    head = ["dataset", "group", "bar", *(f"`{r}`" if r in RECIPES else r for r in recipes)]
    lines = [head, ["---"] * len(head)]
    for name, table in tables.items():
        rows = table["rows"]
        best = max(row["iqm"] for r, row in rows.items() if r not in ("data", "random"))
        cells = [
            _cell(rows.get(r), r in RECIPES, rows.get(r, {}).get("iqm") == best) for r in recipes
        ]
        lines.append([name, table["group"], f"{BARS[name]:g}" if name in BARS else "", *cells])
    text = [f"| {' | '.join(line)} |" for line in lines]
    for ranking in result["ranks"]:
        mean, number = ranking["mean_rank"], len(ranking["datasets"])
        ranked = ", ".join(f"`{recipe}` {rank:.2f}" for recipe, rank in mean.items())
        text += ["", f"Mean rank over the {number} datasets with all of these (1: best): {ranked}."]
    text.append("")
    text += ["| `offline` against | better | within the intervals | worse |", "|---|---|---|---|"]
    for recipe, where in result["duels"].items():
        worse = f"{len(where['worse'])}" + "".join(f", {n}" for n in where["worse"])
        text.append(f"| {recipe} | {len(where['better'])} | {len(where['within'])} | {worse} |")
    return "\n".join(text)


def _cell(row: Mapping[str, Any] | None, with_interval: bool, best: bool) -> str:
    if row is None:
        return ""
    text = f"{row['iqm']:.4g}"
    if best:
        text = f"**{text}**"
    if with_interval:
        low, high = _interval(row)
        text += f" ({low:.4g} … {high:.4g})"
    return text


def show(result: Mapping[str, Any]) -> None:
    recipes = list(dict.fromkeys(r for d in result["datasets"].values() for r in d["rows"]))
    print(f"\n{'IQM of the return':28}" + "".join(f"{recipe:>10}" for recipe in recipes))
    for name, table in result["datasets"].items():
        cells = (table["rows"].get(recipe, {}).get("iqm") for recipe in recipes)
        print(f"{name:28}" + "".join(f"{'-' if c is None else f'{c:.4g}':>10}" for c in cells))
    for ranking in result["ranks"]:
        ranked = {r: round(v, 2) for r, v in ranking["mean_rank"].items()}
        print(f"mean rank over {len(ranking['datasets'])} datasets:", ranked)
    for recipe, where in result["duels"].items():
        worse = f" ({', '.join(where['worse'])})" if where["worse"] else ""
        print(
            f"offline against {recipe}: better on {len(where['better'])}, within the interval on "
            f"{len(where['within'])}, worse on {len(where['worse'])}{worse}"
        )


def _recorded() -> dict[str, Any]:
    """The datasets of the recorded result."""
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text())["datasets"] if path.exists() else {}
    return found


def _datasets(args: argparse.Namespace) -> list[tuple[Dataset, Path | None]]:
    """The datasets to compare on, each with its file; None: it is made."""
    files: list[tuple[Dataset, Path | None]] = []
    for word in args.file:
        file, _, env = word.rpartition("=")
        path = Path(file)
        files.append((Dataset(path.stem, "file", FILE, "", env), path.resolve()))
    if args.datasets:
        return [*files, *((BY_NAME[name], None) for name in args.datasets)]
    if files:
        return files
    return [(d, None) for d in FIELD if args.group in ("all", d.group)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="keeps files, service, comparisons and tables")
    add("--group", choices=("fit", "held-out", "all"), default="all")
    add("--datasets", nargs="+", default=[], metavar="NAME", choices=list(BY_NAME))
    add("--file", nargs="+", default=[], metavar="FILE=ENV", help="compare on these files")
    add("--recipes", default=",".join(RECIPES), help="(default: %(default)s)")
    add("--seeds", default="0-2", help="training seeds (default: %(default)s)")
    add("--episodes", type=int, default=EPISODES, help="per evaluation (default: %(default)s)")
    add("--every-policy", action="store_true", help="evaluate every published policy: curves")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="stop after this time")
    add("--report-only", action="store_true", help="compare nothing; report what is there")
    add("--draft", action="store_true", help="print the report only; write no result")
    args = parser.parse_args()
    if not args.draft and find_spec("vl_convert") is None:
        parser.error("pictures need the extra `pictures`: pip install -e '.[pictures]'; or --draft")
    args.recipes = args.recipes.split(",")
    args.deadline = time.monotonic() + 60 * args.minutes
    folder: Path = args.folder.resolve()
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    status = 0
    if not args.report_only:
        try:
            with service(folder) as client:
                for dataset, file in _datasets(args):
                    print(f"\n=== {dataset.name} ({dataset.kind}, {dataset.group})", flush=True)
                    file = file or make(dataset, folder / "data")
                    compare(client, folder, dataset, file, args)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues")
            status = 130
    result = report(folder, _recorded())
    if result["datasets"]:
        show(result)
        if not args.draft:
            print(f"wrote {write(NAME, result).relative_to(ROOT)}")
            for path, chart in ((RANKS, ranks_chart(result)), (CURVES, curves_chart(result))):
                if chart is not None:
                    chart.save(str(path))
            place(PAGE, "offline field", markdown(result))
            print(f"wrote {PAGE.relative_to(ROOT)} and its pictures")
    return status


def _stop_on(signals: Sequence[signal.Signals]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for one in signals:
        signal.signal(one, interrupt)


if __name__ == "__main__":
    _stop_on([signal.SIGTERM])
    sys.exit(main())
