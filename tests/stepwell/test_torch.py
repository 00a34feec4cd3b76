"""`stepwell.torch`: what a DataLoader gives is what was posted, in every kind of worker."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stepwell import BadRequest, Box, Client, EnvSpec, Gone, InvalidData, MultiBinary, NotFound
from stepwell import _selection as selection
from stepwell.testing import make_spec, make_trajectory, wait_until
from stepwell.torch import Trajectories, Windows, pad_trajectories
from trainer.data.sampler import start_range

LENGTHS = (3, 8, 20, 40)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stepwell" / "shards"


@pytest.fixture
def address(service, client) -> dict[str, str]:
    return {"url": service.url}


def post(client: Client, name: str, spec: EnvSpec, lengths=LENGTHS, **options):
    """Trajectories of these lengths, each in a shard of its own."""
    client.create_dataset(name, spec)
    sent = [make_trajectory(spec, length=n, seed=i, **options) for i, n in enumerate(lengths)]
    for trajectory in sent:
        client.post(name, [trajectory], spec=spec, wait_sealed=True)
    return sent


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    values = tensor.numpy()
    return values.dtype == array.dtype and np.array_equal(values, array)


# --- what comes out -------------------------------------------------------------------------------


def test_trajectories_are_those_that_were_posted(client, name, address) -> None:
    spec = make_spec(discrete=4, image=(5, 4, 3), infos=True, action_known=True)
    sent = post(client, name, spec, first_step=7)
    episodes = Trajectories(name, **address)
    assert len(episodes) == len(sent) and episodes.ids == [t.id for t in sent]
    for one, trajectory in zip([episodes[i] for i in range(len(sent))], sent, strict=True):
        assert set(one["obs"]) == {"observation", "image"}
        assert one["obs"]["image"].dtype == torch.uint8
        assert all(same(one["obs"][k], v) for k, v in trajectory.obs.items())
        assert one["actions"].dtype == torch.int64
        assert same(one["actions"], trajectory.actions["action"])
        assert same(one["rewards"], trajectory.rewards)
        assert same(one["action_known"], trajectory.action_known)
        ends = [False] * (len(trajectory) - 1)
        assert one["terminated"].tolist() == [*ends, True]
        assert not one["truncated"].any()
        assert one["mask"].all() and one["next_obs_valid"].all()
        assert one["time_idx"].tolist() == list(range(7, 8 + len(trajectory)))


def test_every_kind_of_array(client, name, address) -> None:
    observations = {
        "flag": Box((), "bool", 0, 1),
        "grid": Box((2, 2), "bool", 0, 1),
        "depth": Box((2, 3), "uint16", 0, 60_000),
        "wide": Box((2,), "float64"),
        "one": Box((), "float32"),
        "byte": Box((), "uint8", 0, 255),
    }
    actions = {"arm": Box((2,), low=-1, high=1), "grip": MultiBinary(3)}
    spec = EnvSpec.of(observations, actions)
    sent = post(client, name, spec, lengths=(3, 5), truncated=True, final_obs_valid=False)
    for i, trajectory in enumerate(sent):
        one = Trajectories(name, **address)[i]
        assert all(same(one["obs"][k], v) for k, v in trajectory.obs.items())
        assert all(
            np.array_equal(one["actions"][k].numpy(), v) for k, v in trajectory.actions.items()
        )
        assert one["actions"]["grip"].dtype == torch.int64
        assert one["truncated"].tolist()[-2:] == [False, True] and not one["terminated"].any()
        assert one["next_obs_valid"].tolist() == [True] * (len(trajectory) - 1) + [False]


def test_a_window_is_a_slice_then_zeros(client, name, address) -> None:
    sent = {len(t): t for t in post(client, name, make_spec(), terminated=True)}
    windows = Windows(name, length=10, **address)
    found = {}
    for one in islice(windows, 400):
        assert one["obs"].shape == (11, 3) and one["actions"].shape == (10, 1)
        length, start = int(one["mask"].sum()), int(one["time_idx"][0])
        # Rewards are random, so they say which trajectory it is.
        reward = one["rewards"][0].item()
        source = next(
            t for t in sent.values() if start < len(t) and t.rewards[start].item() == reward
        )
        assert same(one["obs"][: length + 1], source.obs["observation"][start:][: length + 1])
        assert same(one["actions"][:length], source.actions["action"][start:][:length])
        assert same(one["rewards"][:length], source.rewards[start:][:length])
        last = start + length == len(source)
        assert length == 10 or last
        assert one["terminated"].sum().item() == last
        assert not last or one["terminated"][length - 1]
        for key in ("actions", "rewards", "terminated", "next_obs_valid", "mask"):
            assert not one[key][length:].any()
        assert not one["obs"][length + 1 :].any() and not one["time_idx"][length + 1 :].any()
        found.setdefault(len(source), set()).add(start)
    low, high = start_range(np.array(LENGTHS), 10, "right")
    ranges = zip(LENGTHS, low.tolist(), high.tolist(), strict=True)
    assert found == {n: set(range(a, b + 1)) for n, a, b in ranges}


@pytest.mark.parametrize("draw", ["steps", "trajectories"])
def test_what_is_drawn_is_uniform(client, name, address, draw: str) -> None:
    sent = post(client, name, make_spec(observation=1), lengths=(2, 6))
    windows = Windows(name, length=100, draw=draw, **address)  # longer than every trajectory
    n = 4000
    counts = Counter(int(one["mask"].sum()) for one in islice(windows, n))
    assert set(counts) == {len(t) for t in sent}
    share = 2 / 8 if draw == "steps" else 1 / 2
    assert abs(counts[2] / n - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_a_mixture_keeps_its_shares_and_weights(client, name, address) -> None:
    post(client, name, make_spec(observation=1), lengths=(2, 3, 4))
    first = f"SELECT id, length AS weight FROM trajectories WHERE dataset = '{name}' AND length < 4"
    both = [
        {"select": first, "share": 0.8},
        {"select": f"SELECT id FROM trajectories WHERE dataset = '{name}'", "share": 0.2},
    ]
    made = client.create_snapshot(sources=both)
    windows = Windows(snapshot=made.id, length=4, draw="trajectories", **address)
    assert windows.snapshot == made.id
    n = 4000
    counts = Counter(int(one["mask"].sum()) for one in islice(windows, n))
    for length, share in ((2, 0.8 * 2 / 5 + 0.2 / 3), (3, 0.8 * 3 / 5 + 0.2 / 3), (4, 0.2 / 3)):
        assert abs(counts[length] / n - share) < 5 * (share * (1 - share) / n) ** 0.5
    assert len(Trajectories(snapshot=made.id, **address)) == 3  # each once
    assert len(Trajectories(select=first, **address)) == 2


# --- loaders --------------------------------------------------------------------------------------


def batches(windows: Windows, count: int = 6, **options) -> list[torch.Tensor]:
    loader = DataLoader(windows, batch_size=8, **options)
    return [batch["rewards"] for batch in islice(loader, count)]


# A spawned worker of torch that is ended while it sends a batch may abort as its interpreter ends;
# what it has sent is not touched, and the loader says so from its `__del__`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_have_streams_of_their_own(client, name, address, method: str) -> None:
    """Determined by seed and worker, and the same however a worker is started."""
    post(client, name, make_spec())
    windows = Windows(name, length=8, seed=3, **address)
    windows.set_epoch(2)
    found = batches(windows, num_workers=2, multiprocessing_context=method)
    alone = batches(windows)
    # Batches come from the workers in turn, and a program without workers is worker 0.
    assert all(map(torch.equal, found[::2], alone))
    assert not any(map(torch.equal, found[1::2], alone))
    held = client.snapshot(windows.snapshot).leased_until
    assert held is not None, "a worker that ends must not give the lease back"


def test_the_same_seed_is_the_same_stream(client, name, address) -> None:
    post(client, name, make_spec())
    first, again, other = (Windows(name, length=8, seed=s, **address) for s in (0, 0, 1))
    assert all(map(torch.equal, batches(first), batches(again)))
    assert all(map(torch.equal, batches(first), batches(first))), "a pass begins anew"
    assert not any(map(torch.equal, batches(first), batches(other)))
    first.set_epoch(5)
    assert not any(map(torch.equal, batches(first), batches(again)))


def test_workers_that_stay_hear_of_the_epoch(client, name, address) -> None:
    post(client, name, make_spec())
    windows = Windows(name, length=8, **address)
    loader = DataLoader(windows, batch_size=8, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        windows.set_epoch(epoch)
        assert torch.equal(next(iter(loader))["rewards"], batches(windows, 1)[0])


def test_a_pass_over_trajectories_has_each_once_and_padded(client, name, address) -> None:
    sent = post(client, name, make_spec(image=(2, 2, 1)))
    episodes = Trajectories(name, **address)
    loader = DataLoader(
        episodes, batch_size=3, shuffle=True, num_workers=2, collate_fn=pad_trajectories
    )
    seen = []
    for batch in loader:
        longest = int(batch["mask"].sum(1).max())
        size = len(batch["mask"])
        assert batch["obs"]["image"].shape == (size, longest + 1, 2, 2, 1)
        assert batch["obs"]["image"].dtype == torch.uint8
        assert batch["rewards"].shape == batch["mask"].shape == (size, longest)
        for i, length in enumerate(batch["mask"].sum(1).tolist()):
            assert batch["mask"][i, :length].all() and not batch["rewards"][i, length:].any()
            seen.append(batch["rewards"][i, :length].tolist())
    assert sorted(seen) == sorted(t.rewards.tolist() for t in sent)


# --- the folder and the lease ---------------------------------------------------------------------


def test_shards_are_fetched_once_and_damage_is_noticed(client, name, address, folder) -> None:
    sent = post(client, name, make_spec())
    Trajectories(name, **address).close()
    files = sorted(folder.iterdir())
    assert len(files) == len(sent) and {f.suffix for f in files} == {".arrow"}
    before = [f.stat().st_mtime_ns for f in files]
    Windows(name, length=4, **address).close()
    assert [f.stat().st_mtime_ns for f in files] == before
    whole = files[0].read_bytes()
    for place in (len(whole) // 2, len(whole) - 1):
        files[0].write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        episodes = Trajectories(name, **address)
        assert files[0].read_bytes() == whole
        assert all(same(episodes[i]["rewards"], t.rewards) for i, t in enumerate(sent))
    files[0].write_bytes(whole[:100])
    Trajectories(name, **address)
    assert files[0].read_bytes() == whole and sorted(folder.iterdir()) == files


def test_the_lease_is_renewed_in_use_and_given_back(client, name, address, monkeypatch) -> None:
    monkeypatch.setattr(selection, "LEASE_SECONDS", 60.0)
    real, every = selection.BackgroundLoop, []

    def often(*args, **options):
        every.append(options.pop("every"))
        return real(*args, every=0.05, **options)

    monkeypatch.setattr(selection, "BackgroundLoop", often)
    post(client, name, make_spec(), lengths=(4,))
    episodes, windows = Trajectories(name, **address), Windows(name, length=4, **address)
    assert every == [15.0, 15.0]
    ids = episodes.snapshot, windows.snapshot
    leased = [client.snapshot(one).leased_until for one in ids]

    def later() -> bool:
        now = [client.snapshot(one).leased_until for one in ids]
        return all(a and a > b + 0.1 for a, b in zip(now, leased, strict=True))

    wait_until(later, what="both leases renewed")
    child = multiprocessing.get_context("fork").Process(target=episodes.close)
    child.start()
    child.join()
    assert child.exitcode == 0 and client.snapshot(ids[0]).leased_until, "it is not the child's"
    episodes.close()
    assert client.snapshot(ids[0]).leased_until is None
    assert len(episodes[0]["rewards"]) == 4, "what is on disk remains usable"
    del windows
    gc.collect()
    assert client.snapshot(ids[1]).leased_until is None


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_selected_is_refused(client, name, address) -> None:
    with pytest.raises(NotFound, match=name):
        Windows(name, length=4, **address)
    post(client, name, make_spec(), lengths=(4,))
    with pytest.raises(BadRequest, match=rf"dataset = '{name}' AND \(length > 9\)") as empty:
        Windows(name, length=4, where="length > 9", **address)
    assert empty.value.code == "empty_selection"
    with pytest.raises(BadRequest, match=r"SELECT id FROM trajectories WHERE 1 = 2"):
        Trajectories(select="SELECT id FROM trajectories WHERE 1 = 2", **address)
    with pytest.raises(BadRequest, match="no_such_column"):
        Trajectories(name, where="no_such_column > 1", **address)
    with pytest.raises((NotFound, Gone)):
        Trajectories(snapshot="sn_nothing", **address)
    for arguments in ({}, {"dataset": name, "select": "SELECT 1"}, {"where": "length > 1"}):
        with pytest.raises(InvalidData, match="which trajectories"):
            Trajectories(**arguments, **address)
    for arguments in ({"length": 0}, {"length": 4, "seed": -1}, {"length": 4, "draw": "episodes"}):
        with pytest.raises(InvalidData, match="expected"):
            Windows(name, **arguments, **address)


def test_a_shard_that_is_deleted_in_use_is_named(client, name, address, folder) -> None:
    """By a worker, which opens it anew; the process that made the dataset still has it."""
    import pickle  # as a worker that is spawned gets it

    post(client, name, make_spec(), lengths=(4,))
    episodes = Trajectories(name, **address)
    copy = pickle.loads(pickle.dumps(episodes))
    for file in folder.iterdir():
        file.unlink()
    assert len(episodes[0]["rewards"]) == 4
    with pytest.raises(InvalidData, match="create the dataset again"):
        copy[0]


def test_without_torch_only_this_module_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None; import stepwell; import stepwell.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'stepwell[agent]'" in done.stderr.splitlines()[-1]
