"""A policy as bytes, and that acting sees exactly what learning saw."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from amago_model import (
    ActingPolicy,
    Agent,
    AmagoError,
    GRUConfig,
    IdentityConfig,
    LossConfig,
    PolicyFileError,
    TransformerConfig,
    get_values,
    load_agent,
    load_policy,
    save_policy,
)
from amago_model.heads.distributions import Categorical
from amago_model.policy_file import FORMAT

MEMORIES = {
    "identity": IdentityConfig(),
    "gru": GRUConfig(d_hidden=8, d_output=8),
    "transformer": TransformerConfig(d_model=16, n_heads=2, d_ff=24, n_layers=2, context=5),
}


def _trained(agent: Agent, batch) -> Agent:  # type: ignore[no-untyped-def]
    """One real update, so that statistics and weights differ from those of a fresh agent."""
    optimizer = torch.optim.SGD(agent.trainable_parameters(), lr=0.1)
    agent(batch)[0].backward()
    optimizer.step()
    return agent


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_one_trajectory_gives_the_same_policy_in_learning_and_in_acting(
    make_spaces, make_config, make_batch, memory: str, kind: str
) -> None:
    spaces = make_spaces(kind)
    agent = _trained(Agent(make_config(MEMORIES[memory]), spaces), make_batch(spaces)).eval()
    policy = load_policy(save_policy(agent))
    batch = make_batch(spaces, lengths=(12, 12), size=12, first=0)  # past the context of 5
    batch.next_obs_valid[:] = True

    rows = agent.policy.encode_timesteps(
        batch.obs,
        batch.prev_action,
        batch.prev_reward,
        batch.time_idx,
        valid=batch.timestep_mask,
        previous_known=batch.previous_known,
    )
    learned = agent.policy.actor.acting(agent.policy.encode_trajectory(rows, batch.time_idx))

    seen = []
    real_acting = policy.actor.acting

    def spy(state, legal=None):  # type: ignore[no-untyped-def]
        seen.append(real_acting(state, legal))
        return seen[-1]

    policy.actor.acting = spy  # type: ignore[method-assign]
    hidden, actions = policy.initial_hidden(2), []
    for t in range(13):
        action, hidden = policy.act(
            {"observation": batch.obs["observation"][:, t]},
            batch.prev_action[:, t] if t else torch.full_like(batch.prev_action[:, 0], 3),
            batch.prev_reward[:, t] if t else torch.full((2,), 9.0),
            batch.time_idx[:, t],
            hidden,
            sample=False,
        )
        actions.append(action)
    if isinstance(learned, Categorical):
        acted = torch.stack([d.probs for d in seen], dim=1)
        torch.testing.assert_close(acted, learned.probs, rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.stack(actions, dim=1), learned.greedy() + spaces.action.start)
    else:
        for part in ("loc", "scale"):
            acted = torch.stack([getattr(d, part) for d in seen], dim=1)
            torch.testing.assert_close(acted, getattr(learned, part), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_policy_survives_its_file(make_spaces, make_config, make_batch, tmp_path, memory) -> None:
    spaces = make_spaces()
    agent = _trained(Agent(make_config(MEMORIES[memory]), spaces), make_batch(spaces))
    path = tmp_path / "policy.safetensors"
    data = save_policy(agent, step=12, extra={"run": "demo"})
    path.write_bytes(data)
    for policy in (load_policy(data), load_policy(path)):
        assert isinstance(policy, ActingPolicy) and not policy.training
        assert policy.config == agent.config and policy.spaces == spaces
        assert policy.metadata["step"] == 12 and policy.metadata["extra"] == {"run": "demo"}
        for name, tensor in agent.policy.state_dict().items():
            assert torch.equal(policy.state_dict()[name], tensor), name


def test_a_policy_file_holds_acting_weights_and_of_an_agent_the_critics(
    make_spaces, make_config
) -> None:
    agent = Agent(make_config(), make_spaces())
    acting = load_tensors(save_policy(agent.policy))
    assert {name.split(".")[0] for name in acting} == {"timestep_encoder", "actor"}
    more = load_tensors(save_policy(agent)).keys() - acting.keys()
    parts = {".".join(name.split(".")[:3]) for name in more}
    assert parts == {"agent.critics.online", "agent.critics.popart", "agent.gammas"}


AGENTS: dict[str, dict] = {
    "mean": {},
    "iql": {"losses": {"value_expectile": 0.8, "dpg_weight": 0.0}},
    "lagged": {"losses": {"lagged_critics": True}},
    "bins": {"critic": {"kind": "twohot", "n_bins": 8}},
}


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("settings", AGENTS.values(), ids=AGENTS)
def test_an_agent_values_data_as_before_it_was_saved(
    make_spaces, make_config, make_batch, settings: dict, kind: str
) -> None:
    spaces = make_spaces(kind)
    agent = _trained(Agent(make_config(**settings), spaces), make_batch(spaces))
    with torch.no_grad():  # target networks of their own
        for p in agent.critics.target.parameters():
            p.add_(0.1)
    agent.update_lagged_critics()
    loaded = load_agent(save_policy(agent))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    batch = make_batch(spaces)
    before, after = (
        get_values(one, dataclasses.replace(batch, noise=noise))
        for noise in [agent.draw_noise(*batch.mask.shape)]
        for one in (agent, loaded)
    )
    for name in ("q", "v", "advantage", "weight"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert before.q.abs().sum() > 0


def test_a_file_of_format_4_acts_and_says_how_to_get_critics(make_spaces, make_config) -> None:
    agent = Agent(make_config(), make_spaces())
    old = save_policy(agent.policy).replace(WRITTEN, b'"stepwell_policy":"4"')
    assert load_policy(old).metadata["format"] == 4
    with pytest.raises(PolicyFileError, match="no critics .format 4; .*resume its run"):
        load_agent(old)


def test_a_policy_without_critics_in_its_config_says_so(make_spaces, make_config) -> None:
    config = make_config().replace(
        critic=None, losses=LossConfig(dpg_weight=0.0, filter={"kind": "behavior_cloning"})
    )
    with pytest.raises(PolicyFileError, match="agent.critic = false"):
        load_agent(save_policy(Agent(config, make_spaces())))


def test_damaged_critics_are_refused(make_spaces, make_config) -> None:
    good = save_policy(Agent(make_config(), make_spaces()))
    length = int.from_bytes(good[:8], "little")
    metadata = json.loads(good[8 : 8 + length])["__metadata__"]
    tensors = load_tensors(good)
    tensors.pop(next(name for name in tensors if name.startswith("agent.critics.online.")))
    with pytest.raises(PolicyFileError, match="tensors are missing"):
        load_agent(save_tensors(tensors, metadata=metadata))


def test_a_policy_goes_to_the_device_it_is_asked_to_and_its_file_names_none(
    make_spaces, make_config
) -> None:
    """Wherever it was trained: device meta stands for any other than this one."""
    agent = Agent(make_config(), make_spaces())
    elsewhere = load_policy(save_policy(agent), device="meta")
    assert {p.device.type for p in elsewhere.state_dict().values()} == {"meta"}
    here = load_policy(save_policy(agent.policy))
    assert {p.device.type for p in here.state_dict().values()} == {"cpu"}


def test_saving_a_loaded_policy_gives_the_same_tensors(make_spaces, make_config) -> None:
    data = save_policy(Agent(make_config(MEMORIES["gru"]), make_spaces()).policy)
    again = load_tensors(save_policy(load_policy(data)))
    assert all(torch.equal(again[k], v) for k, v in load_tensors(data).items())


def test_sampling_follows_its_generator_and_leaves_the_global_one_alone(
    make_spaces, make_config
) -> None:
    policy = Agent(make_config(), make_spaces("continuous")).policy.eval()

    def draw(seed: int) -> torch.Tensor:
        return policy.act(
            {"observation": torch.zeros(4, 3)},
            torch.zeros(4, 2),
            torch.zeros(4),
            torch.zeros(4, dtype=torch.int64),
            policy.initial_hidden(4),
            generator=torch.Generator().manual_seed(seed),
        )[0]

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_acting_in_training_mode_uses_no_dropout_and_moves_no_statistic(
    make_spaces, make_config
) -> None:
    policy = Agent(make_config(MEMORIES["transformer"]), make_spaces()).policy.train()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    policy.act(
        {"observation": torch.randn(2, 3)},
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        policy.initial_hidden(2),
    )
    assert policy.training
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())


# --------------------------------------------------------------------------------------- bad bytes


@pytest.fixture
def good(make_spaces, make_config) -> bytes:
    return save_policy(Agent(make_config(), make_spaces()))


WRITTEN = f'"stepwell_policy":"{FORMAT}"'.encode()


def _rewritten(good: bytes, **changes: object) -> bytes:
    """The same tensors under an edited header."""
    length = int.from_bytes(good[:8], "little")
    about = json.loads(json.loads(good[8 : 8 + length])["__metadata__"]["policy"])
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = about
        for parent in parents:
            target = target[parent]
        target[last] = value
    metadata = {"stepwell_policy": str(FORMAT), "policy": json.dumps(about)}
    return save_tensors(load_tensors(good), metadata=metadata)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda good: b"", "not a policy file"),
        (lambda good: b"\x00" * 4096, "not a policy file"),
        (lambda good: b"\xff" * 4096, "not a policy file"),
        (
            lambda good: pickle.dumps({"weights": [1, 2, 3]} | {"pad": "x" * 4096}),
            "not a policy file",
        ),
        (lambda good: good[:100], "truncated"),
        (lambda good: good[:-8], "damaged"),
        (lambda good: save_tensors({"w": torch.zeros(2)}), "not a policy file"),
        (lambda good: good.replace(WRITTEN, b'"stepwell_policy":"7"'), "format 4 or 5, got 7"),
        (lambda good: good.replace(WRITTEN, b'"stepwell_policy":"1"'), "tensors differ"),
        (lambda good: _rewritten(good, config__losses={"gama": 1}), "unknown setting 'gama'"),
        (lambda good: _rewritten(good, config__actor__d_hidden=17), r"config expects \[17"),
        (lambda good: _rewritten(good, config__actor__d_hidden=65_536), r"config expects \[65536"),
        (lambda good: _rewritten(good, config__actor__n_layers=3), "tensors are missing"),
        (lambda good: _rewritten(good, config__actor__n_layers=1), "not in its config"),
        (lambda good: _rewritten(good, spaces=[]), "damaged"),
    ],
)
def test_bytes_that_are_no_policy_are_refused(good: bytes, make, words: str) -> None:
    with pytest.raises(PolicyFileError, match=words) as error:
        load_policy(make(good))
    assert isinstance(error.value, AmagoError)


def test_every_prefix_and_many_flips_either_load_or_are_refused_by_type(good: bytes) -> None:
    length = int.from_bytes(good[:8], "little")
    cuts = [good[:n] for n in range(0, len(good), 997)]
    flips = [good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :] for i in range(0, 8 + length, 7)]
    refused = 0
    for data in cuts + flips:
        try:
            load_policy(data)
        except PolicyFileError:
            refused += 1
    assert refused >= len(cuts)


def test_the_same_policy_is_the_same_bytes_in_every_process(make_spaces, make_config) -> None:
    """A version is immutable: a resumed run that publishes it again must publish equal bytes.

    Left alone, safetensors orders its metadata by chance, another time in another process.
    """
    policy = ActingPolicy(make_config(), make_spaces("discrete"))
    data = save_policy(policy, extra={"b": 1})
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    keys = [*json.loads(header)]
    assert keys == sorted(keys) and len(header) % 8 == 0
    assert [*json.loads(header)["__metadata__"]] == ["policy", "stepwell_policy"]
    assert all(value.equal(policy.state_dict()[name]) for name, value in load_tensors(data).items())
