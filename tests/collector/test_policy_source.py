"""The newest policy is at hand, and trouble on the way never takes the present one away."""

import hashlib
import threading

import pytest
import torch

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.errors import AmagoError
from amago_model.policy_file import save_policy
from collector.config import UsageError
from collector.envs import make
from collector.interface import interface_of
from collector.policy_actor import ActorError
from collector.policy_source import PolicySource, parse_reference
from stepwell.client import DownloadedPolicy
from stepwell.errors import InvalidSpace, NotFound, ServiceUnreachable
from stepwell.testing import wait_until

INTERFACE = interface_of(make("CartPole-v1"), "CartPole-v1")
SMALL = {
    "timestep_encoder": {"kind": "any", "d_hidden": 16, "d_output": 16},
    "trajectory_encoder": {"kind": "identity"},
}


def policy_file(step: int = 0, env_id: str = "CartPole-v1") -> bytes:
    torch.manual_seed(step)
    spaces = Spaces.of_spec(interface_of(make(env_id), env_id).spec.to_json())
    return save_policy(ActingPolicy(AgentConfig.from_dict(SMALL), spaces), step=step)


class Shelf:
    """A client that knows policies and nothing else; counts the downloads."""

    def __init__(self) -> None:
        self.files: list[bytes] = []
        self.down = False
        self.sent = 0
        self.asked = 0

    def download_policy(self, run, which="latest", *, etag=None):  # type: ignore[no-untyped-def]
        self.asked += 1
        if self.down:
            raise ServiceUnreachable("nobody there")
        if not self.files:
            raise NotFound({"status": 404, "code": "not_found", "detail": f"no run {run}"})
        version = len(self.files) - 1 if which == "latest" else int(which)
        data = self.files[version]
        digest = hashlib.sha256(data).hexdigest()
        if etag == f'"{digest}"':
            return None
        self.sent += 1
        return DownloadedPolicy(data, version, digest, f'"{digest}"')


def test_references() -> None:
    assert parse_reference("demo") == ("demo", "latest")
    assert parse_reference("demo/7") == ("demo", "7")
    assert parse_reference("demo/best") == ("demo", "best")
    for wrong in ("", "/7", "a/b/c"):
        with pytest.raises(UsageError, match="RUN:VERSION"):
            parse_reference(wrong)


def test_a_policy_is_fetched_once_and_again_when_it_changed() -> None:
    """The ETag saves the download; policy id and learner's step come with the file."""
    shelf = Shelf()
    shelf.files.append(policy_file(step=100))
    source = PolicySource(shelf, "demo")  # type: ignore[arg-type]
    assert source.poll() and not source.poll() and not source.poll()
    assert (shelf.sent, source.current.policy_id, source.current.step) == (1, "demo/0", 100)
    shelf.files.append(policy_file(step=200))
    assert source.poll()
    assert (shelf.sent, source.current.policy_id, source.current.step) == (2, "demo/1", 200)


def test_the_lag_of_a_version_is_counted_from_the_newest_one() -> None:
    shelf = Shelf()
    source = PolicySource(shelf, "demo")  # type: ignore[arg-type]
    assert source.lag("demo/0") is None
    shelf.files += [policy_file(step=i) for i in range(3)]
    source.poll()
    assert [source.lag(f"demo/{version}") for version in range(3)] == [2, 1, 0]
    assert source.lag("random") is None and source.lag("other/1") is None
    fixed = PolicySource(shelf, "demo/1")  # type: ignore[arg-type]
    fixed.poll()
    assert fixed.lag("demo/1") is None  # it is played on purpose


def test_an_outage_leaves_the_policy_in_play() -> None:
    shelf = Shelf()
    shelf.files.append(policy_file())
    source = PolicySource(shelf, "demo", every=0.01)  # type: ignore[arg-type]
    source.poll()
    playing = source.current
    shelf.down = True
    source.start()
    wait_until(lambda: "nobody there" in source.last_error)
    assert source.current is playing
    shelf.down = False
    wait_until(lambda: source.last_error == "")
    source.close()
    assert source.current is playing


def test_a_first_policy_that_is_not_there_yet_is_waited_for_and_no_error() -> None:
    """A collector that warms up starts before the trainer has registered the run."""
    shelf = Shelf()
    source = PolicySource(shelf, "demo", every=0.01)  # type: ignore[arg-type]
    source.start()
    wait_until(lambda: source.last_error == "no policy demo yet: no run demo")
    shelf.files.append(policy_file())
    wait_until(lambda: source.ready and source.last_error == "")
    source.close()


def test_no_error_ends_the_thread_that_looks_for_policies() -> None:
    """The unexpected is shown, and the next policy still arrives."""
    shelf = Shelf()
    shelf.files.append(policy_file(1))
    source = PolicySource(shelf, "demo", every=0.01)  # type: ignore[arg-type]
    source.poll()
    honest = shelf.download_policy
    shelf.download_policy = lambda *_, **__: {}["unexpected"]  # type: ignore[method-assign]
    source.start()
    wait_until(lambda: "unexpected" in source.last_error)
    shelf.files.append(policy_file(2))
    shelf.download_policy = honest  # type: ignore[method-assign]
    wait_until(lambda: source.current.policy_id == "demo/1")
    source.close()
    assert source.last_error == ""


@pytest.mark.parametrize(
    "bad", [b"\x80\x04not a policy", policy_file(env_id="Pendulum-v1")], ids=["pickle", "foreign"]
)
def test_unusable_bytes_are_told_and_not_fetched_again(bad: bytes) -> None:
    """Neither a damaged file nor one for other spaces takes over; the next good one does."""
    shelf = Shelf()
    shelf.files.append(policy_file())
    source = PolicySource(
        shelf,  # type: ignore[arg-type]
        "demo",
        accept=lambda policy: INTERFACE.check_policy(policy.spaces, "demo"),
    )
    source.poll()
    shelf.files.append(bad)
    with pytest.raises((AmagoError, InvalidSpace)):
        source.poll()
    assert source.current.policy_id == "demo/0"
    assert not source.poll() and shelf.sent == 2
    shelf.files.append(policy_file(step=9))
    assert source.poll() and source.current.policy_id == "demo/2"


def test_the_first_policy_may_be_waited_for() -> None:
    """It takes the run's first policy as soon as it is there; other trouble is not waited out."""
    shelf = Shelf()
    source = PolicySource(shelf, "demo", every=0.01)  # type: ignore[arg-type]
    with pytest.raises(ActorError, match="no policy demo yet"):
        _ = source.current
    assert not source.wait(lambda: shelf.asked > 2)
    assert not source.wait(lambda: False, timeout=0.05)
    shelf.down = True
    assert not source.wait(lambda: False, timeout=0.05) and "nobody there" in source.last_error
    shelf.down = False
    threading.Timer(0.05, lambda: shelf.files.append(policy_file())).start()
    assert source.wait(lambda: False, timeout=60) and source.ready
    foreign = Shelf()
    foreign.files.append(policy_file(env_id="Pendulum-v1"))
    picky = PolicySource(
        foreign,  # type: ignore[arg-type]
        "demo",
        accept=lambda policy: INTERFACE.check_policy(policy.spaces, "demo"),
    )
    with pytest.raises(InvalidSpace):
        picky.wait(lambda: False)


def test_a_thread_keeps_it_fresh_and_a_numbered_version_rests() -> None:
    shelf = Shelf()
    shelf.files.append(policy_file(1))
    source = PolicySource(shelf, "demo", every=0.01)  # type: ignore[arg-type]
    source.poll()
    source.start()
    shelf.files.append(policy_file(2))
    wait_until(lambda: source.current.policy_id == "demo/1")
    source.close()
    pinned = PolicySource(shelf, "demo/0", every=0.01)  # type: ignore[arg-type]
    pinned.poll()
    pinned.start()
    assert "policy" not in {t.name for t in threading.enumerate() if t.is_alive()}
    pinned.close()
    assert pinned.current.policy_id == "demo/0"
