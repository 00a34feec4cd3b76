"""From shard files to batches: equal to the slow and obvious reading of the trajectories."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from amago_model.agent import Agent
from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import previous_features
from amago_model.errors import SpaceError
from stepwell import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Trajectory
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.specs import make_rich_spec
from tests.trainer.small_runs import loader_of, manifest_of
from trainer.config import DataConfig, SettingError, TrainConfig
from trainer.data import stream
from trainer.data.cache import Cache, convert
from trainer.data.fields import Field, fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import DataError, LeaseKeeper, create_snapshot, load_manifest
from trainer.recipes import recipe

LENGTHS = [[5, 40, 1, 17], [64, 3, 9], [2]]
SPECS = {
    "vector": make_spec(observation=3, action=2),
    "discrete, image, gaps": make_spec(discrete=4, image=(2, 3, 3), action_known=True),
    "choices, gaps": EnvSpec.of(Box((2,)), MultiDiscrete((2, 3)), action_known=True),
    "choices from other numbers, gaps": EnvSpec.of(
        MultiDiscrete((4, 3), (-1, 7)), MultiDiscrete((2, 3), (-4, 5)), action_known=True
    ),
    "switches": EnvSpec.of(Box((2,)), MultiBinary(3)),
    "one of everything": replace(
        make_rich_spec(),
        actions={"action": Discrete(3, start=2)},
        observations={**make_rich_spec().observations, "room": Discrete(5)},
    ),
}


def reference(t: Trajectory, start: int, length: int, rows: int, spec: EnvSpec) -> dict:
    """One window, element by element, straight from the Trajectory: slow and obvious."""
    (action,) = t.actions.values()
    space = next(iter(spec.actions.values()))
    nothing = space.start - 1 if isinstance(space, Discrete) else np.zeros(space.shape)
    if isinstance(space, MultiDiscrete | MultiBinary):
        nothing = np.full(space.shape, -1) + np.asarray(getattr(space, "start", 0))
    out: dict[str, list] = {
        name: []
        for name in (
            *("prev_action", "prev_reward", "time_idx", "terminated", "truncated"),
            *("next_obs_valid", "mask", "action_known", "obs"),
        )
    }
    known = np.ones(len(t), bool) if t.action_known is None else t.action_known
    for row in range(rows):
        at = start + row
        inside = row <= length
        before = inside and at > 0
        out["prev_action"].append(
            (action[at - 1] if known[at - 1] else nothing)
            if before
            else nothing
            if inside
            else None
        )
        out["prev_reward"].append(t.rewards[at - 1] if before else 0.0)
        out["time_idx"].append(t.metadata.first_step + at)
        out["obs"].append({k: v[at] for k, v in t.obs.items()} if inside else None)
    for step in range(rows - 1):
        at, exists = start + step, step < length
        last = at == len(t) - 1
        out["terminated"].append(exists and last and t.terminated)
        out["truncated"].append(exists and last and t.truncated)
        out["next_obs_valid"].append(exists and (not last or t.final_obs_valid))
        out["mask"].append(exists)
        out["action_known"].append(bool(exists and known[at]))
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("padding", ["none", "both"])
def test_batches_equal_the_slow_reading(fake, tmp_path, spec, padding):
    """Every cell that counts: endings of all kinds, pieces of episodes, short trajectories."""
    service = fake(spec, LENGTHS)
    config = DataConfig(batch=16, window=8, padding=padding)
    by_id = {t.id: t for t in service.trajectories()}
    seen = set()
    with closing(loader_of(service, tmp_path, config)) as loader:
        for _ in range(6):
            loaded = next(loader)
            b = loaded.batch
            b.check(Spaces.of_spec(spec.to_json()))
            assert b.mask.shape[1] == int(loaded.windows.length.max())
            for i in range(16):
                (name,) = loaded.manifest.trajectory_ids([loaded.windows.trajectory[i]])
                trajectory = by_id[name]
                start, n = int(loaded.windows.start[i]), int(loaded.windows.length[i])
                seen.add((trajectory.id, start == 0, n == len(trajectory)))
                want = reference(trajectory, start, n, b.prev_reward.shape[1], spec)
                for name in ("terminated", "truncated", "next_obs_valid", "mask", "action_known"):
                    assert getattr(b, name)[i].tolist() == want[name], name
                assert b.time_idx[i].tolist() == want["time_idx"]
                for row in range(n + 1):
                    assert np.array_equal(b.prev_action[i, row].numpy(), want["prev_action"][row])
                    assert b.prev_reward[i, row] == want["prev_reward"][row]
                    for key, value in b.obs.items():
                        assert np.array_equal(value[i, row].numpy(), want["obs"][row][key]), key
                        assert value.numpy().dtype == np.dtype(spec.observations[key].dtype)
                assert not b.prev_reward[i, n + 1 :].any()
    assert len(seen) > 6


def test_a_piece_of_an_episode_shows_no_step_before_it(fake, tmp_path):
    """It begins at time 20, so its first row has a past, but nobody knows it: encoded as zeros."""
    for spec in (make_spec(action=2), make_spec(discrete=3)):
        service = fake(spec)
        service.add_shard(
            [
                make_trajectory(spec, length=6, seed=1),
                make_trajectory(spec, length=6, first_step=20),
            ]
        )
        config = DataConfig(batch=8, window=6)
        with closing(loader_of(service, tmp_path / spec.digest, config)) as loader:
            b = next(loader).batch
        assert {0, 20} == set(b.time_idx[:, 0].tolist())
        features = previous_features(
            Spaces.of_spec(spec.to_json()), b.prev_action, b.prev_reward, b.time_idx
        )
        assert not features[:, 0].any()
        assert features[:, 1:].any()


def test_only_what_an_agent_may_see_is_loaded(fake, tmp_path):
    """Roles policy, critic and mask; nothing of role log or relabel, and no infos."""
    spec = EnvSpec.of(
        {"a": Box((2,)), "goal": Box((2,)), "note": Box((1,)), "state": Box((3,))},
        Box((1,), low=-1.0, high=1.0),
        roles={"goal": "relabel", "note": "log", "state": "critic"},
        infos={"x": Box(())},
    )
    service = fake(spec, [[5, 6]])
    with closing(loader_of(service, tmp_path, DataConfig(batch=2, window=4))) as loader:
        assert set(next(loader).batch.obs) == {"a", "state"}
    assert set(Spaces.of_spec(spec.to_json()).observations) == {"a", "state"}


def test_ranks_see_slices_of_the_same_batch(fake, tmp_path):
    """Two ranks' batches, put together, hold the samples of one process, cell by cell."""
    service = fake(None, LENGTHS)
    config = DataConfig(batch=8, window=8, padding="right")
    with closing(loader_of(service, tmp_path, config, step=5)) as whole:
        one = next(whole)
        for rank in (0, 1):
            with closing(loader_of(service, tmp_path, config, step=5, world=2, rank=rank)) as part:
                half = next(part)
            assert half.ids == one.ids[rank * 4 : rank * 4 + 4]
            n = half.batch.mask.shape[1]
            assert torch.equal(half.batch.mask, one.batch.mask[rank * 4 : rank * 4 + 4, :n])


def test_a_loader_starts_anywhere_and_keeps_its_promise_of_memory(fake, tmp_path):
    """Step 7 first is what the eighth batch is; a batch stays whole until the next is asked for."""
    service = fake(None, LENGTHS)
    config = DataConfig(batch=8, window=8, prefetch=2)
    with closing(loader_of(service, tmp_path, config)) as loader:
        for step, loaded in zip(range(8), loader, strict=False):
            again = loader.load(step)
            assert loaded.step == step and loaded.ids == again.ids
            torch.testing.assert_close(loaded.batch.obs, again.batch.obs, rtol=0, atol=0)
    with closing(loader_of(service, tmp_path, config, step=7)) as late:
        assert next(late).ids == loaded.ids


def test_views_change_at_their_step(fake, tmp_path):
    """Growing data: from the agreed step on, batches come from the new snapshot."""
    service = fake(None, [[20] * 4])
    config = DataConfig(batch=4, window=8, prefetch=1)
    loader = loader_of(service, tmp_path, config)
    with closing(loader):
        first = next(loader).manifest
        service.add_shard([make_trajectory(service.spec, length=30, seed=9)])
        grown = manifest_of(service, tmp_path)
        assert len(grown) == 5
        start = 1 + loader.lookahead
        cache, fields = Cache(tmp_path / "cache", 1e9, service), fields_of(service.spec)
        cache.ensure(grown, fields)
        loader.add_view(open_view(cache, fields, WindowSampler(grown, config, 0), start))
        for step in range(1, 12):
            assert next(loader).manifest is (grown if step >= start else first)


# ------------------------------------------------------------------------------------------ cache


def test_columns_equal_the_source_and_are_fetched_once(fake, tmp_path):
    """Every row of every field of every shard; a second run on this node downloads nothing."""
    spec = SPECS["discrete, image, gaps"]
    service = fake(spec, LENGTHS)
    manifest = manifest_of(service, tmp_path)
    cache = Cache(tmp_path / "cache", 1e9, service)
    assert cache.ensure(manifest, fields_of(spec)) == {}
    assert service.downloads == 3
    for shard, trajectories in service.shards.items():
        for field in fields_of(spec):
            rows = []
            for t in trajectories:
                parts = {"reward": t.rewards, "action_known": t.action_known, **t.actions}
                got = t.obs[field.name[4:]] if field.name.startswith("obs.") else parts[field.name]
                fill = np.zeros((1, *field.shape), field.dtype)
                fill.reshape(1, field.size)[:] = field.fill
                rows += [got, *([fill] if len(got) == len(t) else [])]
            column = cache.column(shard, field)
            assert np.array_equal(column[1:], np.concatenate(rows)), field
            assert column.dtype == np.dtype(field.dtype)
    Cache(tmp_path / "cache", 1e9, None).ensure(manifest, fields_of(spec))
    assert service.downloads == 3
    assert not list((tmp_path / "cache" / "downloads").iterdir())


def test_columns_of_a_shard_of_format_1_are_read(tmp_path):
    shard = Path(__file__).parents[1] / "golden" / "shard_v1.parquet"
    fields = [Field("reward", "reward", "float32", ()), Field("obs.x", "obs.speed", "float16", ())]
    convert(shard, tmp_path, fields, lambda _, field: tmp_path / field.name)
    for field in fields:
        stored = pq.read_table(shard)[field.column].fill_null(0).to_numpy()
        assert np.array_equal(np.load(tmp_path / field.name)[1:], stored)


def test_two_processes_build_once(fake, tmp_path):
    """Two processes of one node ask for the same shards at once: each shard is fetched by one."""
    service = fake(None, [[400] * 20] * 3)
    code = (
        "import sys; from pathlib import Path\n"
        "from stepwell.testing import make_spec\n"
        "from trainer.data.cache import Cache; from trainer.data.fields import fields_of\n"
        "import shutil\n"
        "class Client:\n"
        "    def download_shard(self, shard, path):\n"
        f"        with open({str(tmp_path / 'downloads')!r}, 'a') as f: f.write(shard + chr(10))\n"
        f"        shutil.copyfile(Path({str(service.folder)!r}) / f'{{shard}}.parquet', path)\n"
        f"cache = Cache(Path({str(tmp_path / 'cache')!r}), 1e9, Client())\n"
        "shards = ['sh_0000', 'sh_0001', 'sh_0002']; fields = fields_of(make_spec())\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for shard in shards: cache.build(shard, fields)\n"
        "print(*[cache.column(s, fields[0]).shape[0] for s in shards])\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    for process in started:  # both have loaded what they need: now they race
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in started]
    assert answers == [[str(20 * 401 + 1)] * 3] * 2
    fetched = (tmp_path / "downloads").read_text().split()
    assert sorted(fetched) == ["sh_0000", "sh_0001", "sh_0002"]


def test_a_corrupt_shard_is_named_and_left_out(fake, tmp_path, caplog):
    """Cut short or of other content: quarantined with the reason; the rest trains on."""
    service = fake(None, LENGTHS)
    manifest = manifest_of(service, tmp_path)
    good = service.path("sh_0000").read_bytes()
    service.path("sh_0001").write_bytes(good[: len(good) // 2])
    service.path("sh_0002").write_bytes(good)
    cache = Cache(tmp_path / "cache", 1e9, service)
    unreadable = cache.ensure(manifest, fields_of(service.spec))
    assert set(unreadable) == {"sh_0001", "sh_0002"}
    assert "sh_0001" in caplog.text
    assert (tmp_path / "cache" / "quarantine" / "sh_0001.parquet").exists()
    rest = manifest.without(list(unreadable))
    assert len(rest) == len(LENGTHS[0]) and rest.digest != manifest.digest
    sampler = WindowSampler(rest, DataConfig(batch=8, window=4), 0)
    loader = Loader([open_view(cache, fields_of(service.spec), sampler)], sampler.config)
    ids = {t.id for t in service.shards["sh_0000"]}
    assert {name.split("@")[0] for name in loader.load(0).ids} <= ids
    for shard in ("sh_0000", "sh_0001", "sh_0002"):
        service.path(shard).write_bytes(b"not parquet")
    with pytest.raises(DataError, match="3 of 3 shards of the snapshot cannot be read"):
        Cache(tmp_path / "other", 1e9, service).ensure(manifest, fields_of(service.spec))


def test_the_least_recently_used_goes_when_the_limit_is_reached(fake, tmp_path):
    """Shards of a run that is over go first; those of living ones stay, whatever the limit."""
    service = fake(None, [[500] * 4] * 3)
    fields = fields_of(service.spec)
    first = Cache(tmp_path, 1, service)
    first.build("sh_0000", fields)
    second = Cache(tmp_path, 1, service)
    second.build("sh_0001", fields)
    assert {folder.name for folder in (tmp_path / "columns").iterdir()} == {"sh_0000", "sh_0001"}
    del first
    second.build("sh_0002", fields)
    kept = {folder.name for folder in (tmp_path / "columns").iterdir()}
    assert kept == {"sh_0001", "sh_0002"}


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_column_is_named_put_aside_and_built_anew(fake, tmp_path, caplog, harm):
    """A disk that forgets: the file is named, kept in quarantine, and never learned from."""
    service = fake(None, [[30, 4]])
    fields = fields_of(service.spec)
    manifest = manifest_of(service, tmp_path)
    Cache(tmp_path, 1e9, service).ensure(manifest, fields)
    files = sorted((tmp_path / "columns" / "sh_0000").glob("*.npy"))
    assert len(files) == len(fields) + 1
    whole = {path: path.read_bytes() for path in files}
    for path, data in whole.items():
        spoilt = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-5], "empty": b""}[harm]
        path.write_bytes(spoilt)
        cache = Cache(tmp_path, 1e9, service)
        assert cache.ensure(manifest, fields) == {}
        assert str(path) in caplog.text and (tmp_path / "quarantine").iterdir()
        assert path.read_bytes() == data
    assert len([*(tmp_path / "quarantine").glob("sh_0000.*.npy")]) == len(files)


def test_a_full_disk_is_said_as_such(fake, tmp_path, monkeypatch):
    """It is not the shard's fault: nothing is quarantined, nothing left behind; then it goes on."""
    service = fake(None, [[30, 4]])
    manifest = manifest_of(service, tmp_path)
    fields, cache = fields_of(service.spec), Cache(tmp_path / "cache", 1e9, service)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", full)
        with pytest.raises(DataError, match=r"No space left.*data\.cache"):
            cache.ensure(manifest, fields)
    left = [p for p in (tmp_path / "cache" / "columns").rglob("*") if p.is_file()]
    assert left == [] and not [*(tmp_path / "cache" / "quarantine").iterdir()]
    assert cache.ensure(manifest, fields) == {}
    with pytest.raises(DataError, match="cannot be used"):
        Cache(next((tmp_path / "manifests").iterdir()), 1, service)


def test_what_is_deleted_while_in_use_stays_readable(fake, tmp_path):
    """Somebody empties the cache under a running loader: its batches stay what they were."""
    service = fake(None, LENGTHS)
    config = DataConfig(batch=8, window=8)
    with closing(loader_of(service, tmp_path, config)) as loader:
        before = loader.load(3).batch
        shutil.rmtree(tmp_path / "cache")
        service.down = True
        again = loader.load(3).batch
        torch.testing.assert_close(again.obs, before.obs, rtol=0, atol=0)
        assert torch.equal(again.prev_action, before.prev_action)
        assert len(loader.load(9).ids) == 8


def test_windows_at_the_very_end_of_a_column(fake, tmp_path):
    """A window that is longer than what is left of its shard reads nothing beyond it."""
    service = fake(None, [[2], [3, 1], [1]])
    config = DataConfig(batch=8, window=50, padding="both")
    with closing(loader_of(service, tmp_path, config)) as loader:
        batches = [loader.load(step).batch for step in range(20)]
        assert max(b.mask.shape[1] for b in batches) == 3


def test_a_manifest_that_points_outside_its_columns_is_refused(fake, tmp_path):
    """Such a batch would read memory that is not ours."""
    service = fake(None, [[9, 9]])
    manifest, fields = manifest_of(service, tmp_path), fields_of(service.spec)
    cache = Cache(tmp_path / "cache", 1e9, service)
    cache.ensure(manifest, fields)
    for change in ({"row_start": manifest.row_start + 5}, {"row_start": manifest.row_start - 1}):
        wrong = replace(manifest, **change)
        sampler = WindowSampler(wrong, DataConfig(batch=2, window=4), 0)
        with pytest.raises(IndexError, match="outside their columns"):
            open_view(cache, fields, sampler)
        assert set(cache.ensure(manifest, fields)) == set()


def test_a_shard_name_is_not_a_path(fake, tmp_path):
    service = fake(None, [[3]])
    with pytest.raises(DataError, match="no shard's name"):
        Cache(tmp_path, 1e9, service).build("../../evil", fields_of(service.spec))


# ---------------------------------------------------------------------------- snapshots and doors


def test_a_manifest_is_kept_for_the_runs_next_life(fake, tmp_path):
    """With the service gone, a resumed run still knows its snapshot, row for row."""
    service = fake(None, LENGTHS)
    first = manifest_of(service, tmp_path)
    service.down = True
    again = load_manifest(service, first.snapshot, tmp_path / "manifests")
    assert again.spec == first.spec and again.digest == first.digest
    assert (again.ids == first.ids).all() and (again.row_start == first.row_start).all()


def test_a_recipe_may_name_its_dataset_in_sql(fake):
    """The best tenth is a plain condition, with the dataset's name put in."""
    service, asked = fake(None, [[3]]), []
    original = service.create_snapshot
    service.create_snapshot = lambda **options: asked.append(options) or original(**options)
    create_snapshot(service, recipe("bc10").replace(dataset="mine"), "me")
    assert asked[0]["dataset"] == "mine"
    assert "WHERE dataset = 'mine' AND purpose = 'train'" in asked[0]["where"]
    with pytest.raises(SettingError, match="nothing to learn from: give --dataset"):
        create_snapshot(service, TrainConfig(), "me")


def test_leases_live_through_an_outage(fake, tmp_path):
    """Renewals fail quietly while the service is away, and go on when it is back."""
    service = fake(None, [[3]])
    name = create_snapshot(service, TrainConfig(dataset="fake"), "me")
    renew, asked = service.lease, []

    def ask(*args, **options) -> None:
        asked.append(args)
        renew(*args, **options)

    service.lease = ask
    with closing(LeaseKeeper(service, "me", ttl=0.08)) as keeper:
        keeper.hold(name)
        service.down = True
        count = len(asked)
        wait_until(lambda: len(asked) > count + 1)
        service.down, count = False, len(service.leases)
        wait_until(lambda: len(service.leases) > count + 1)


@pytest.mark.parametrize("error", [KeyError("odd"), MemoryError("odd"), SystemExit("odd")])
def test_no_error_ends_the_renewal_of_leases(fake, error):
    """It is shown, and the next renewal comes."""
    service = fake(None, [[3]])
    renew, throw = service.lease, [False]

    def ask(*args, **options) -> None:
        if throw[0]:
            raise error
        renew(*args, **options)

    service.lease = ask
    with closing(LeaseKeeper(service, "me", ttl=0.08)) as keeper:
        keeper.hold(create_snapshot(service, TrainConfig(dataset="fake"), "me"))
        throw[0] = True
        wait_until(lambda: "odd" in keeper.trouble)
        throw[0], count = False, len(service.leases)
        wait_until(lambda: len(service.leases) > count and not keeper.trouble)


def test_what_the_agent_cannot_take_is_said_clearly():
    two = EnvSpec.of(Box((1,)), {"a": Discrete(2), "b": Discrete(2)})
    with pytest.raises(SpaceError, match="one action"):
        Spaces.of_spec(two.to_json())
    with pytest.raises(SpaceError, match="MultiDiscrete"):
        Spaces.of_spec(EnvSpec.of(Box((1,)), Box((1,), "int64", low=0, high=3)).to_json())
    with pytest.raises(SpaceError, match="has 70000 categories"):
        Spaces.of_spec(EnvSpec.of(Discrete(70_000, start=-2), Discrete(2)).to_json())
    with pytest.raises(SpaceError, match="finite bounds"):
        Spaces.of_spec(EnvSpec.of(Box((1,)), Box((2,))).to_json())
    with pytest.raises(SpaceError, match="legal actions"):
        Spaces.of_spec(
            EnvSpec.of(
                {"o": Box((1,)), "m": MultiBinary(3)}, Discrete(2), roles={"m": "mask"}
            ).to_json()
        )
    with pytest.raises(SpaceError, match="would have no input"):
        Spaces.of_spec(EnvSpec.of({"o": Box((1,))}, Discrete(2), roles={"o": "critic"}).to_json())


def test_both_sides_see_the_same_spaces(fake, tmp_path):
    """What the trainer puts into a policy, the collector finds in its environment: same numbers."""
    spec = EnvSpec.of(
        {
            "room": Discrete(3, start=2),
            "bits": MultiBinary(2),
            "dials": MultiDiscrete((2, 5), (-1, 9)),
            "below": Discrete(5, start=-2),
            "far": Discrete(5, start=10**9),
            "many": MultiDiscrete((200, 200), (-100, 5)),
            "image": Box((3, 4, 4), "uint8", 0, 255),
            "legal": MultiBinary(4),
        },
        Discrete(4, start=-1),
        roles={"legal": "mask"},
    )
    assert set(Spaces.of_spec(spec.to_json()).observations) == set(spec.observations)
    service = fake(spec, [[9, 4]])
    with closing(loader_of(service, tmp_path, DataConfig(batch=3, window=4))) as loader:
        batch = loader.load(0).batch
        torch.manual_seed(0)
        config = AgentConfig.from_dict({"trajectory_encoder": {"kind": "identity"}})
        loss, _ = Agent(config, Spaces.of_spec(spec.to_json()))(batch)
        assert bool(torch.isfinite(loss))
        known = batch.prev_action[batch.time_idx > 0]
        assert int(known.min()) >= -2 and int(known.max()) <= 2


def test_stream_is_a_door_for_any_learner(fake, tmp_path):
    """Numpy or torch batches from a select, the same ones for the same seed."""
    service = fake(None, LENGTHS)
    options = {"window": 6, "batch": 5, "client": service, "cache": tmp_path, "batches": 3}
    arrays = [
        {**b, "obs": b["obs"]["observation"].copy(), "mask": b["mask"].copy()}
        for b in stream("SELECT id FROM trajectories", numpy=True, **options)
    ]
    assert len(arrays) == 3
    assert arrays[0]["obs"].shape[0] == 5 and arrays[0]["obs"].dtype == np.float32
    tensors = stream("SELECT id FROM trajectories", start=1, **options)
    second = next(tensors)
    assert torch.equal(second.obs["observation"], torch.from_numpy(arrays[1]["obs"]))
    tensors.close()
