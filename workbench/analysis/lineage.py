"""Where data and policies come from, and what was made of them.

    dataset (──▶ dataset@version) ──trained──▶ run ──published──▶ policy ──played──▶ dataset
                                     by snapshots: which trajectories, see `learned_from`

Read from the index: a run's config says from which dataset it learned (or by which queries), and
each trajectory says which policy played it. Nothing is recorded for this, so nothing can be missing
from it but what was deleted.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import Gone, InvalidData, NotFound

RUNS_SQL = """
select r.name, r.title, r.config, r.status, r.git_commit, len(r.snapshots),
  count(p.version) as policies
from runs r left join policies p on p.run = r.name where r.kind = 'train' group by all
"""
PLAYED_SQL = """
select dataset, policy[:length(policy) - strpos(reverse(policy), '/')] as run, purpose,
  count(*) as trajectories, avg("return") as mean_return
from trajectories where contains(policy, '/') group by all
"""
DATASETS_SQL = (
    "select name, fifo_trajectories, protected_trajectories, eval_trajectories from datasets"
)
VERSIONS_SQL = "select version, coalesce(parent, dataset), trajectories from versions"
LONGEST_LABEL = 32
"""Characters of a condition that a drawing shows."""
_NAMED = re.compile(
    r"\b(?:dataset|version)\s*(?:=|in)\s*\(?\s*((?:'[^']+'\s*,?\s*)+)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Node:
    """A dataset, a version of it, or a training run."""

    kind: str
    """dataset (also a version, dataset@name) or run."""
    name: str
    about: str = ""
    """In a few words: how many trajectories, or policies and state."""
    title: str = ""
    """Title of a run, if it has one."""

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def label(self) -> str:
        return f"{self.title} ({self.name})" if self.title else self.name


@dataclass(frozen=True, slots=True)
class Edge:
    """The second was made from, or by, the first; both are keys of nodes."""

    of: str
    made: str
    how: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """A graph of datasets and training runs. It may have cycles: a run collects its own data."""

    nodes: dict[str, Node]
    edges: list[Edge]

    def around(self, key: str) -> Lineage:
        """What a node was made from, and what was made from it, however far away.

        Raises `InvalidData` if there is no such node.
        """
        if key not in self.nodes:
            raise InvalidData("lineage", expected="a dataset or a training run", got=key)
        kept = self._reached(key, up=True) | self._reached(key, up=False)
        nodes = {k: node for k, node in self.nodes.items() if k in kept}
        return Lineage(nodes, [e for e in self.edges if e.of in kept and e.made in kept])

    def _reached(self, key: str, *, up: bool) -> set[str]:
        found, open_ = {key}, [key]
        while open_:
            here = open_.pop()
            for e in self.edges:
                before, after = (e.made, e.of) if up else (e.of, e.made)
                if before == here and after not in found:
                    found.add(after)
                    open_.append(after)
        return found

    def dot(self, ink: str = "black", colours: Mapping[str, str] | None = None) -> str:
        """The graph for Graphviz, drawn in the colour `ink` on no background.

        `colours`: key of a node → the colour of its outline.
        A long condition on an edge is cut; whole, it is the edge's tooltip.
        """
        paint = f"color={_quoted(ink)}, fontcolor={_quoted(ink)}"
        lines = [
            "digraph lineage {",
            '  graph [rankdir=LR, bgcolor="transparent", nodesep=0.15]',
            f'  node [fontname="sans-serif", {paint}]',
            f'  edge [fontname="sans-serif", fontsize=11, {paint}]',
        ]
        for key, node in self.nodes.items():
            shape = "cylinder" if node.kind == "dataset" else "box"
            label = "\n".join(
                part for part in (node.title, node.name, *node.about.split(", ")) if part
            )
            own = (colours or {}).get(key)
            mark = f", color={_quoted(own)}, penwidth=3" if own else ""
            lines.append(f"  {_quoted(key)} [shape={shape}, label={_quoted(label)}{mark}]")
        for e in self.edges:
            cut = e.how if len(e.how) <= LONGEST_LABEL else e.how[: LONGEST_LABEL - 1] + "…"
            texts = f"label={_quoted(cut)}, tooltip={_quoted(e.how)}"
            lines.append(f"  {_quoted(e.of)} -> {_quoted(e.made)} [{texts}]")
        return "\n".join([*lines, "}"])


def read_lineage(client: Client) -> Lineage:
    """The whole graph, by four queries."""
    nodes: dict[str, Node] = {}
    edges: list[Edge] = []
    for name, *counts in _rows(client, DATASETS_SQL):
        _add(nodes, Node("dataset", name, f"{sum(counts):,} trajectories"))
    versions = list(_rows(client, VERSIONS_SQL))
    for version, _, trajectories in versions:
        _add(nodes, Node("dataset", version, f"{trajectories:,} trajectories, for ever"))
    for version, source, _ in versions:
        _add(nodes, Node("dataset", source, "deleted"))
        edges.append(Edge(f"dataset:{source}", f"dataset:{version}", "version"))
    for name, title, config, status, commit, snapshots, policies in _rows(client, RUNS_SQL):
        about = [status, pluralize(policies, "policy", "policies")]
        about += [f"learned from {pluralize(snapshots, 'snapshot')}"] if snapshots else []
        about += [f"code {commit[:7]}"] if commit else []
        _add(nodes, Node("run", name, ", ".join(about), title or ""))
        for dataset, how in datasets_of(orjson.loads(config)).items():
            _add(nodes, Node("dataset", dataset, "deleted"))
            edges.append(Edge(f"dataset:{dataset}", f"run:{name}", how))
    for dataset, run, purpose, trajectories, mean in _rows(client, PLAYED_SQL):
        _add(nodes, Node("run", run, "deleted"))
        how = (
            f"{'evaluated' if purpose == 'eval' else 'played'} {trajectories:,}, return {mean:.4g}"
        )
        edges.append(Edge(f"run:{run}", f"dataset:{dataset}", how))
    return Lineage(nodes, edges)


def learned_from(client: Client, run: str) -> pa.Table:
    """The trajectories that a run could draw: those of all its snapshots, one row each.

    Columns: id, dataset, env, return, length, and snapshot, the first one that has it. Raises
    `NotFound` for an unknown run, and `Gone` if a snapshot was deleted.
    """
    pieces: list[pa.Table] = []
    known: set[bytes] = set()
    before: str | None = None
    for snapshot in client.run(run).snapshots:
        # Only blocks that differ from the snapshot before: one that grows has most rows again.
        rows = client.manifest(snapshot, since=before)
        before = snapshot
        ids = [value.as_py() for value in rows["id"]]
        new = [at for at, one in enumerate(ids) if one not in known]
        known.update(ids)
        taken = rows.take(pa.array(new, pa.int64()))
        columns = {name: taken[name] for name in ("dataset", "env", "return", "length")}
        texts = [str(uuid.UUID(bytes=ids[at])) for at in new]
        named = pa.array([snapshot] * len(new), pa.string())
        pieces.append(pa.table({"id": pa.array(texts, pa.string()), **columns, "snapshot": named}))
    return pa.concat_tables(pieces).unify_dictionaries() if pieces else pa.table({"id": []})


def runs_that_saw(client: Client, trajectory: str) -> list[str]:
    """Training runs with the trajectory of this id in a snapshot, as far as these still exist."""
    found, wanted = [], uuid.UUID(trajectory).bytes
    has: dict[str, bool] = {}
    for run in client.runs(kind="train"):
        for snapshot in run.snapshots:
            if snapshot not in has:
                try:
                    ids = client.manifest(snapshot)["id"]
                except (Gone, NotFound):
                    ids = pa.chunked_array([], pa.binary(16))
                has[snapshot] = bool(pc.is_in(pa.scalar(wanted, pa.binary(16)), ids).as_py())
            if has[snapshot]:
                found.append(run.name)
                break
    return found


def datasets_of(config: dict[str, Any]) -> dict[str, str]:
    """Dataset -> by which condition a run of this config learned from it."""
    found = {}
    if config.get("dataset"):
        found[str(config["dataset"])] = str(config.get("where") or "trained")
    for source in config.get("sources") or ():
        select = str(source.get("select", ""))
        for names in _NAMED.findall(select):
            for name in re.findall(r"'([^']+)'", names):
                found.setdefault(name, f"trained, share {source.get('share', 1):g}")
    return found


def _add(nodes: dict[str, Node], node: Node) -> None:
    nodes.setdefault(node.key, node)


def _rows(client: Client, query: str) -> Iterable[Any]:
    return client.sql(query, limit=1_000_000, timeout=60.0).rows


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
