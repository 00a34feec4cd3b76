"""Gymnasium's spaces become specs, its values become arrays, and back."""

import dataclasses
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from amago_model.config import Spaces
from amago_model.data.batch import decode_action, encode_action
from amago_model.errors import SpaceError
from collector.envs import EnvError, make, parse_pairs
from collector.interface import BrokenEnv, interface_of
from stepwell.errors import InvalidSpace
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.trajectory import Trajectory


class Shell(gymnasium.Env):  # type: ignore[type-arg]
    """Nothing but spaces."""

    def __init__(self, observation: gs.Space, action: gs.Space):  # type: ignore[type-arg]
        self.observation_space, self.action_space = observation, action


NESTED = gs.Dict(
    {
        "arm": gs.Dict({"angle": gs.Box(-1, 1, (2, 3), np.float64), "grip": gs.MultiBinary(4)}),
        "camera": gs.Box(0, 255, (4, 5, 3), np.uint8),
        "room": gs.Discrete(7),
        "switches": gs.MultiDiscrete([2, 3]),
        "dials": gs.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [-2, 7]]),
    }
)


def test_one_of_everything_becomes_a_flat_spec() -> None:
    """Nested keys are joined by "/"; float64 becomes float32; the spec says so."""
    interface = interface_of(Shell(NESTED, gs.Discrete(3, start=-1)), "Shell-v0")
    assert dict(interface.spec.observations) == {
        "arm/angle": Box((2, 3), "float32", -1.0, 1.0),
        "arm/grip": MultiBinary(4),
        "camera": Box((4, 5, 3), "uint8", 0.0, 255.0),
        "room": Discrete(7),
        "switches": MultiDiscrete((2, 3)),
        "dials": MultiDiscrete((2, 3, 4, 5), (1, 0, -2, 7)),
    }
    assert dict(interface.spec.actions) == {"action": Discrete(3, start=-1)}
    assert interface.spec.env == "Shell-v0"
    kept = interface_of(Shell(NESTED, gs.Discrete(2)), "Shell-v0", keep_float64=True)
    assert kept.spec.observations["arm/angle"].dtype == "float64"


DEEP = gs.Tuple(
    [gs.Discrete(3), gs.Dict({"pair": gs.Tuple([gs.MultiBinary(2), gs.Box(-1, 1, (2,))])})]
)


def test_tuples_are_named_by_their_indices() -> None:
    """Joined as nested keys are, to the name that the Tuple itself would have."""
    interface = interface_of(Shell(gs.Dict({"deep": DEEP}), DEEP), "Shell-v0")
    members = {"0": Discrete(3), "1/pair/0": MultiBinary(2), "1/pair/1": Box((2,), low=-1, high=1)}
    assert dict(interface.spec.observations) == {f"deep/{k}": s for k, s in members.items()}
    assert dict(interface.spec.actions) == {f"action/{k}": s for k, s in members.items()}
    short = (1, {"pair": (np.zeros(2, np.int8),)})
    with pytest.raises(BrokenEnv, match="'deep/1/pair/1'"):
        interface.encode_observation({"deep": short})


def test_other_characters_in_names_become_underscores() -> None:
    spaces = gs.Dict({"bottom burner": gs.Discrete(2), "a-b": gs.Dict({"c.d": gs.Discrete(3)})})
    interface = interface_of(Shell(spaces, spaces), "Shell-v0")
    assert dict(interface.spec.observations) == {
        "bottom_burner": Discrete(2),
        "a_b/c_d": Discrete(3),
    }
    action = {"bottom burner": 1, "a-b": {"c.d": 2}}
    assert interface.decode_action(interface.encode_action(action)) == action
    with pytest.raises(InvalidSpace, match="both be named 'a_b'"):
        both = gs.Dict({"a b": gs.Discrete(2), "a_b": gs.Discrete(2)})
        interface_of(Shell(both, gs.Discrete(2)), "Shell-v0")


def test_a_constructor_that_fails_without_a_message_shows_its_line() -> None:
    class Old(Shell):
        def __init__(self) -> None:
            raise RuntimeError

    gymnasium.register("OldApi-v0", Old)
    with pytest.raises(EnvError, match=r"made: raise RuntimeError \(RuntimeError at test_envs"):
        make("OldApi-v0")


def test_a_text_is_no_action() -> None:
    with pytest.raises(InvalidSpace, match="'action': a space that cannot be recorded"):
        interface_of(Shell(gs.Discrete(2), gs.Text(5)), "Shell-v0")


def test_bounds_that_differ_by_element_are_kept_in_order() -> None:
    box = gs.Box(np.float32([[-1, -2], [0, 0]]), np.float32([[1, 2], [np.inf, 9]]))
    interface = interface_of(Shell(box, gs.Discrete(2)), "Shell-v0")
    space = interface.spec.observations["observation"]
    assert space == Box((2, 2), "float32", (-1, -2, 0, 0), (1, 2, np.inf, 9))


@pytest.mark.parametrize(
    "space",
    [
        *(NESTED, DEEP, gs.Box(-1, 1, (), np.float32), gs.Discrete(4, start=2)),
        *(gs.MultiBinary(3), gs.MultiBinary((2, 2)), gs.MultiDiscrete([[2, 3], [4, 5]])),
        gs.MultiDiscrete([3, 2], start=[-1, 5]),
        gs.Tuple([gs.MultiDiscrete([3, 2], start=[-1, 5]), gs.Discrete(2, start=9)]),
        gs.Dict({"a": gs.MultiDiscrete([[3, 2]], start=[[-1, 5]]), "b": gs.Discrete(2, start=-9)}),
    ],
)
def test_what_was_seen_fits_the_spec(space: gs.Space) -> None:  # type: ignore[type-arg]
    """Random values of the space make a trajectory that the spec accepts, unchanged by the way."""
    interface = interface_of(Shell(space, space), "Shell-v0")
    space.seed(3)
    seen = [interface.encode_observation(space.sample()) for _ in range(4)]
    acted = [interface.encode_action(space.sample()) for _ in range(3)]
    trajectory = Trajectory(
        obs={k: np.stack([o[k] for o in seen]) for k in seen[0]},
        actions={k: np.stack([a[k] for a in acted]) for k in acted[0]},
        rewards=np.zeros(3, np.float32),
    )
    trajectory.check(interface.spec)
    for arrays in acted:
        native = interface.decode_action(arrays)
        assert space.contains(native)
        again = interface.encode_action(native)
        assert all(np.array_equal(arrays[k], again[k]) for k in arrays)


def test_an_offset_is_recorded_as_the_environment_has_it() -> None:
    space = gs.MultiDiscrete([[3, 2]], start=[[-1, 5]])
    interface = interface_of(Shell(space, space), "Shell-v0")
    assert interface.spec.actions["action"] == MultiDiscrete((3, 2), (-1, 5))
    value = np.array([[1, 5]])
    assert interface.encode_observation(value)["observation"].tolist() == [1, 5]
    assert interface.encode_action(value)["action"].tolist() == [1, 5]
    assert interface.decode_action({"action": np.array([1, 5])}).tolist() == [[1, 5]]


def test_a_dataset_of_the_same_choices_from_0_is_refused() -> None:
    """As older versions recorded them: the same number would be two choices."""
    space = gs.MultiDiscrete([3, 2], start=[-1, 5])
    interface = interface_of(Shell(space, space), "Shell-v0")
    older = EnvSpec.of(MultiDiscrete((3, 2)), MultiDiscrete((3, 2)))
    with pytest.raises(InvalidSpace, match="a dataset of its own|collect into a dataset of its"):
        interface.for_dataset(older, "old")
    with pytest.raises(InvalidSpace, match="other (observation|actions)"):
        interface.check_policy(Spaces.of_spec(older.to_json()), "old/1")


SMALL, PAIR = gs.Box(-9, 9, (1,), np.float32), gs.Tuple((gs.Discrete(5),))
ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("space", "value", "names"),
    [
        (gs.Dict(a=SMALL), {"a": ONE, "goal": ONE, "info x": 1}, "goal, info x"),
        (PAIR, (1, 7), "1"),
        (gs.Dict(a=gs.Dict(b=SMALL), t=PAIR), {"a": {"b": ONE, "c": ONE}, "t": [1, 2]}, "a/c, t/1"),
        (gs.Dict(a=SMALL, b=gs.Dict()), {"a": ONE, "b": {"c": 1}}, "b/c"),
    ],
    ids=str,
)
def test_members_that_a_space_does_not_declare_are_said_once(
    space: gs.Space,  # type: ignore[type-arg]
    value: Any,
    names: str,
) -> None:
    noted: list[str] = []
    interface = dataclasses.replace(interface_of(Shell(space, space), "Own-v0"), note=noted.append)
    for _ in range(2):
        interface.encode_observation(value)
        interface.encode_action(value)
    assert len(noted) == 2
    for what, text in zip(("observations", "actions"), noted, strict=True):
        assert text.startswith(f"{what} have members") and f"recorded: {names}; declare" in text


def test_an_observation_is_owned() -> None:
    """The environment may write into its buffer afterwards."""
    interface = interface_of(Shell(gs.Box(-1, 1, (2,)), gs.Discrete(2)), "Shell-v0")
    buffer = np.zeros(2, np.float32)
    seen = interface.encode_observation(buffer)["observation"]
    buffer[:] = 1
    np.testing.assert_array_equal(seen, [0, 0])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"a": np.zeros(3, np.float32)}, "shape"),
        ({"a": np.array([0, np.inf], np.float32)}, "infinity"),
        ({"b": np.zeros(2, np.float32)}, "'a'"),
        (None, "'a'"),
    ],
)
def test_an_observation_that_its_space_does_not_allow_is_a_broken_environment(
    raw: object, says: str
) -> None:
    interface = interface_of(Shell(gs.Dict({"a": gs.Box(-1, 1, (2,))}), gs.Discrete(2)), "Shell-v0")
    with pytest.raises(BrokenEnv, match=says):
        interface.encode_observation(raw)


@pytest.mark.parametrize(
    "space",
    [
        gs.Graph(gs.Discrete(2), None),
        gs.Sequence(gs.Discrete(2)),
        gs.Dict({"a": gs.Tuple([gs.Sequence(gs.Discrete(2))])}),
        gs.Box(0, 1, (0,)),
        gs.Dict(OrderedDict([("a/b", gs.Discrete(2)), ("a", gs.Dict({"b": gs.Discrete(2)}))])),
    ],
    ids=str,
)
def test_a_space_without_a_place_in_a_spec_is_refused_by_name(
    space: gs.Space,  # type: ignore[type-arg]
) -> None:
    with pytest.raises(InvalidSpace):
        interface_of(Shell(space, gs.Discrete(2)), "Shell-v0")


def test_the_agents_view_gives_back_the_same_actions() -> None:
    """Environment units → what networks see → environment units, through amago_model's own code."""
    for action in (
        gs.Discrete(3, start=5),
        gs.MultiDiscrete([3, 2]),
        gs.MultiDiscrete([3, 2], start=[-1, 5]),
        gs.MultiBinary(3),
        gs.Box(np.float32([-2, 0]), np.float32([2, 10])),
    ):
        interface = interface_of(Shell(gs.Box(-1, 1, (2,)), action), "Shell-v0")
        space = Spaces.of_spec(interface.spec.to_json()).action
        action.seed(0)
        for _ in range(20):
            arrays = interface.encode_action(action.sample())
            x = encode_action(space, torch.from_numpy(np.asarray(arrays["action"])))
            back = decode_action(space, x.argmax(-1) if space.kind == "discrete" else x)
            np.testing.assert_allclose(back.numpy(), arrays["action"], rtol=1e-5, atol=1e-5)


def test_categories_and_roles_reach_the_agent() -> None:
    env = Shell(gs.Dict({"legal": gs.MultiBinary(3), "room": gs.Discrete(4)}), gs.Discrete(3))
    spaces = Spaces.of_spec(interface_of(env, "Shell-v0", roles={"legal": "mask"}).spec.to_json())
    assert spaces.observations["room"].n == 4
    assert spaces.keys("mask") == ["legal"] and spaces.keys("policy") == ["room"]


@pytest.mark.parametrize(
    "action",
    [
        gs.Box(0, 9, (1,), np.int64),
        gs.Dict({"a": gs.Discrete(2), "b": gs.Discrete(2)}),
    ],
)
def test_what_the_agent_cannot_play_can_still_be_recorded(action: gs.Space) -> None:  # type: ignore[type-arg]
    interface = interface_of(Shell(gs.Discrete(2), action), "Shell-v0")
    with pytest.raises(SpaceError, match="agent"):
        Spaces.of_spec(interface.spec.to_json())


def test_an_imported_dataset_takes_its_own_environment() -> None:
    """D4RL knows neither bounds of observations nor gymnasium's name; layout and dtypes count."""
    notes: list[str] = []
    interface = interface_of(make("Pendulum-v1"), "Pendulum-v1")
    interface = dataclasses.replace(interface, note=notes.append)
    imported = EnvSpec.of(Box((3,)), Box((1,), low=-1.5, high=2.5), env="pendulum")
    fitted = interface.for_dataset(imported, "d")
    assert len(notes) == 1 and "-1.5 … 2.5 instead of -2 … 2" in notes[0]
    interface.for_dataset(EnvSpec.of(Box((3,)), Box((1,), low=-3.0, high=2.5), env="p"), "d")
    assert len(notes) == 1, "wider bounds clip nothing"
    assert fitted.spec.digest == imported.digest and fitted.spec.env == "Pendulum-v1"
    # What is recorded is inside both: the dataset's -1.5, the environment's 2.0.
    wide = {"action": np.array([[-9.0], [9.0]])}
    np.testing.assert_array_equal(fitted.clip_actions(wide)["action"][:, 0], [-1.5, 2.0])


@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec.of(Box((4,)), Box((1,), low=-2.0, high=2.0)),
        EnvSpec.of(Box((3,), "uint8"), Box((1,), low=-2.0, high=2.0)),
        EnvSpec.of({"other": Box((3,))}, Box((1,), low=-2.0, high=2.0)),
        EnvSpec.of(Box((3,)), Discrete(3)),
        EnvSpec.of(Box((3,)), Box((1,), low=-2.0, high=2.0), infos={"x": Discrete(3)}),
    ],
)
def test_a_dataset_of_another_layout_is_refused_before_anything_is_played(spec: EnvSpec) -> None:
    interface = interface_of(make("Pendulum-v1"), "Pendulum-v1")
    with pytest.raises(InvalidSpace, match="dataset other"):
        interface.for_dataset(spec, "other")


def test_a_policy_of_another_environment_is_refused() -> None:
    pendulum = interface_of(make("Pendulum-v1"), "Pendulum-v1")
    cart = interface_of(make("CartPole-v1"), "CartPole-v1")
    pendulum.check_policy(Spaces.of_spec(pendulum.spec.to_json()), "p/1")
    with pytest.raises(InvalidSpace, match="p/1 cannot play CartPole-v1"):
        cart.check_policy(Spaces.of_spec(pendulum.spec.to_json()), "p/1")


def test_environments_we_ship_are_known_and_take_arguments() -> None:
    env = make("stepwell/Recall-v0", {"delay": 3, "symbols": 2})
    assert env.unwrapped.delay == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "says"),
    [
        ("NoSuchThing-v0", {}, "--plugin"),
        ("Pendulum-v1", {"no_such": 1}, "no_such"),
        ("no.such.module:Thing-v0", {}, "no.such"),
    ],
)
def test_an_environment_that_cannot_be_made_says_what_to_do(
    env_id: str, kwargs: dict[str, object], says: str
) -> None:
    with pytest.raises(EnvError, match=says):
        make(env_id, kwargs)


def test_pairs_are_json_where_they_can_be() -> None:
    assert parse_pairs(("a=1", "b=x=y", "c=[1, 2]", "d=true"), "--env-args") == {
        "a": 1,
        "b": "x=y",
        "c": [1, 2],
        "d": True,
    }
    with pytest.raises(EnvError, match="--env-args: expected KEY=VALUE"):
        parse_pairs(("novalue",), "--env-args")


@pytest.mark.parametrize(
    ("space", "lie"),
    [
        (gs.Discrete(3), 3),
        (gs.Discrete(3, start=5), 2),
        (gs.Discrete(3), 1.5),
        (gs.MultiDiscrete([2, 3]), np.array([1, 3])),
        (gs.MultiDiscrete([2, 3], start=[4, 4]), np.array([1, 2])),
        (gs.MultiBinary(2), np.array([0, 2])),
        (gs.Box(0, 255, (2,), np.uint8), np.array([3, 300])),
        (gs.Box(0, 255, (2,), np.uint8), np.array([0.5, 3.0])),
        (gs.Box(0, 255, (2,), np.uint8), np.array([1, -1])),
    ],
)
def test_what_would_become_another_number_is_refused(space: gs.Space, lie: object) -> None:
    """Bytes that wrap and categories that are none would be recorded as something else."""
    interface = interface_of(Shell(space, gs.Discrete(2)), "Liar-v0")
    with pytest.raises(BrokenEnv, match="observation 'observation'"):
        interface.encode_observation(lie)


def test_the_same_numbers_in_another_type_are_taken() -> None:
    """Many environments answer int64 or float64 where their space says bytes."""
    interface = interface_of(Shell(gs.Box(0, 255, (2,), np.uint8), gs.Discrete(2)), "Loose-v0")
    assert interface.encode_observation(np.array([7.0, 255.0]))["observation"].tolist() == [7, 255]
    assert interface.encode_observation([0, 9])["observation"].dtype == np.uint8


@pytest.mark.parametrize(
    ("env_id", "use"),
    [
        ("FrozenLake-v0", "FrozenLake-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("CartPole", "CartPole-v1"),
        ("collector.builtin:stepwell/Recall", "collector.builtin:stepwell/Recall-v0"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_id_that_does_not_work_is_refused_by_the_one_that_does(env_id: str, use: str) -> None:
    with pytest.raises(EnvError, match=f"use {use}$") as refused:
        make(env_id)
    assert "plugin" not in str(refused.value)


def test_an_environment_has_one_name_whoever_registers_it() -> None:
    env = make("collector.builtin:stepwell/Recall-v0")
    found = interface_of(env, "collector.builtin:stepwell/Recall-v0")
    assert found.env_id == found.spec.env == env.spec.id == "stepwell/Recall-v0"  # type: ignore[union-attr]


def test_a_bound_is_said_as_it_is_declared() -> None:
    """It is compared with room for rounding, and shown without."""
    interface = interface_of(Shell(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2)), "Shell-v0")
    found = interface.outside({"observation": np.array([0.5, -0.25], np.float32)})
    assert found == "observation 'observation'[1] is -0.25, its space says 0 to 1"
