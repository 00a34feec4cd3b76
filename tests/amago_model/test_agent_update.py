"""The whole update: against a slow loop, blind to padding, and gradients only where they belong."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    Batch,
    FeedForwardConfig,
    GRUConfig,
    ObsSpace,
    Spaces,
    TrajectoryEncoderConfig,
    TransformerConfig,
    encode_action,
    make_agent,
)
from amago_model.losses import binary_filter, ensemble_subset, exp_filter

KINDS = ("discrete", "continuous")
MEMORIES = {
    "identity": TrajectoryEncoderConfig(kind="identity"),
    "feedforward": TrajectoryEncoderConfig(
        kind="feedforward", feedforward=FeedForwardConfig(d_model=12)
    ),
    "gru": TrajectoryEncoderConfig(kind="gru", gru=GRUConfig(d_hidden=12, d_output=12)),
    "transformer": TrajectoryEncoderConfig(
        kind="transformer",
        transformer=TransformerConfig(
            d_model=12, n_heads=2, d_ff=16, n_layers=2, dropout_ff=0.0, dropout_emb=0.0
        ),
    ),
}


def _gradients(agent: Agent, batch: Batch, **kw):  # type: ignore[no-untyped-def]
    agent.zero_grad()
    torch.manual_seed(7)
    loss, metrics = agent(batch, **kw)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in agent.named_parameters() if p.grad is not None}
    return loss.detach(), metrics, grads


def _assert_close(a: dict, b: dict, **kw) -> None:  # type: ignore[no-untyped-def]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], msg=lambda m, k=key: f"{k}: {m}", **kw)


# ------------------------------------------------------------------------------ against a slow loop


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_three_losses_equal_a_slow_loop(
    make_spaces, make_config, make_batch, kind: str, n_step: int
) -> None:
    losses = {"n_step": n_step, "online_weight": 0.5, "offline_weight": 2.0}
    agent = Agent(make_config(losses=losses, critic={"n_critics_target": 3}), make_spaces(kind))
    agent.eval()  # statistics stand still, so the loop below may read them
    with torch.no_grad():  # values worth telling apart
        agent.value_norm.moments.mean.fill_(2.0)
        agent.value_norm.moments.variance.fill_(9.0)
        agent.value_norm.w.fill_(0.7)
        agent.value_norm.b.fill_(-0.2)
        for p in agent.target_critic.parameters():
            p.mul_(1.5)
    batch = make_batch(agent.spaces)
    batch.action_known[0, 2] = False
    torch.manual_seed(7)
    _, metrics = agent(batch)
    expected = _slow_losses(agent, batch, seed=7)
    for name, value in expected.items():
        assert float(metrics[f"loss/{name}"]) == pytest.approx(value, rel=2e-4, abs=1e-5), name
    c = agent.config.losses
    total = c.critic_weight * expected["critic"] + 0.5 * expected["climb"] + 2 * expected["clone"]
    assert float(metrics["loss/total"]) == pytest.approx(total, rel=2e-4)


@torch.no_grad()
def _slow_losses(agent: Agent, batch: Batch, seed: int) -> dict[str, float]:
    """One window, transition, discount and critic at a time. Nothing of losses.py is used."""
    c, spaces = agent.config, agent.spaces
    discrete = spaces.action.kind == "discrete"
    b, t = batch.mask.shape
    gammas = c.losses.gammas
    norm = agent.value_norm
    mean, sigma = float(norm.mean[0]), float(norm.sigma[0])
    w, bias = float(norm.w[0]), float(norm.b[0])
    state = agent.policy.states(
        agent.policy.rows(
            batch.obs,
            batch.prev_action,
            batch.prev_reward,
            batch.time_idx,
            valid=batch.row_mask,
            previous_known=batch.previous_known,
        ),
        batch.time_idx,
    ).detach()
    torch.manual_seed(seed)  # the draw of the update: [target | own] for each discount
    width = spaces.action.width
    noises = torch.randn(t, b, 2, len(gammas), width).unbind(2)

    def q(critic, s, action, g):  # type: ignore[no-untyped-def]
        """Raw outputs [C] of one state for one action (index, probabilities or array)."""
        if discrete:
            every = critic.action_values(s[None])[:, 0, g]
            return every[:, action] if isinstance(action, int) else (every * action).sum(-1)
        filled = torch.zeros(1, 1, len(gammas), width)
        filled[0, 0, g] = action
        return critic.values(critic.state_part(s[None]), filled)[:, 0, 0, g]

    def own(actor, s, g, noise):  # type: ignore[no-untyped-def]
        d = actor(s[None])
        return d.probs[0, g] if discrete else d.rsample(noise[None])[0, g]

    sums = {"critic": [0.0, 0], "climb": [0.0, 0], "clone": [0.0, 0]}
    for i in range(b):
        for k in range(t):
            if not batch.mask[i, k]:
                continue
            known = bool(batch.action_known[i, k])
            s = state[i, k]
            data = (
                int(batch.action[i, k]) - spaces.action.start
                if discrete
                else encode_action(spaces.action, batch.action[i, k])
            )
            for g, gamma in enumerate(gammas):
                v = q(agent.critic, s, own(agent.policy.actor, s, g, noises[1][k, i]), g)
                value = w * v + bias
                sums["climb"][0] += -float(value.min())
                sums["climb"][1] += 1
                if not known:
                    continue
                q_sa = w * q(agent.critic, s, data, g) + bias
                d = agent.policy.actor(s[None])
                if discrete:
                    log_prob = d.probs[0, g, data].log()
                else:
                    log_prob = type(d)(d.loc[0, g], d.scale[0, g], d.clip).log_prob(data)
                approved = float(q_sa.mean() - value.mean()) > 0
                sums["clone"][0] += -float(log_prob) * approved
                sums["clone"][1] += 1
                y, usable = 0.0, False
                for m in range(c.losses.n_step):
                    j = k + m
                    if j >= t or not batch.mask[i, j]:
                        break
                    if not (batch.terminated[i, j] or batch.next_obs_valid[i, j]):
                        break
                    usable = True
                    y += gamma**m * float(batch.reward[i, j]) * c.losses.reward_multiplier
                    tail = 0.0
                    if batch.terminated[i, j]:
                        break
                    actor = agent.target_actor
                    nxt = state[i, j + 1]
                    raw = q(agent.target_critic, nxt, own(actor, nxt, g, noises[0][j, i]), g)
                    tail = gamma ** (m + 1) * (sigma * (w * float(raw.min()) + bias) + mean)
                if usable:
                    goal = (y + tail - mean) / sigma
                    sums["critic"][0] += float((q_sa - goal).square().mean())
                    sums["critic"][1] += 1
    return {name: total / count for name, (total, count) in sums.items()}


# ------------------------------------------------------------------------------------------ padding


def _garbage(batch: Batch) -> Batch:
    """The same batch with the worst imaginable values wherever nothing was recorded."""
    dirty = copy.deepcopy(batch)
    rows = batch.row_mask
    for x in dirty.obs.values():
        x[~rows] = torch.nan
    later = torch.cat((torch.ones_like(rows[:, :1]), batch.mask), dim=1)
    dirty.prev_reward[~later] = torch.inf
    dirty.prev_action[~later] = -(10**6) if dirty.prev_action.dtype == torch.int64 else torch.nan
    dirty.time_idx[~later] = 10**6
    dirty.terminated[~batch.mask] = True
    dirty.truncated[~batch.mask] = True
    dirty.next_obs_valid[~batch.mask] = True
    dirty.action_known[~batch.mask] = True
    return dirty


def _longer(batch: Batch, k: int) -> Batch:
    """k more padded transitions at the end of every window."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.zeros_like(x[:, :1]).expand(-1, k, *x.shape[2:])), dim=1)

    return batch._map(pad)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_loss_metric_statistic_or_gradient(
    make_spaces, make_config, make_batch, kind: str, memory: str
) -> None:
    # 8 windows and 2 x 2 action numbers: CPU noise is drawn 16 at a time.
    spaces = make_spaces(kind)
    batch = make_batch(spaces, lengths=(6, 3, 1, 0, 4, 2, 6, 5))
    agent = Agent(make_config(MEMORIES[memory], losses={"n_step": 2}), spaces)
    twin = copy.deepcopy(agent)
    other = _garbage(_longer(batch, 3))
    loss, metrics, grads = _gradients(agent, batch)
    loss_2, metrics_2, grads_2 = _gradients(twin, other)
    torch.testing.assert_close(loss_2, loss, rtol=1e-5, atol=1e-6)
    _assert_close(metrics_2, metrics, rtol=1e-4, atol=1e-5)
    _assert_close(grads_2, grads, rtol=1e-3, atol=1e-5)
    _assert_close(dict(twin.named_buffers()), dict(agent.named_buffers()), rtol=1e-4, atol=1e-6)


HEADS = {
    "multitask": ("discrete", {"algorithm": "multitask"}, {"kind": "twohot"}, {}),
    "hlgauss": ("continuous", {}, {"kind": "hlgauss"}, {"td_lambda": 0.8}),
    "switches": ("multi_binary", {}, {"subset_replacement": True}, {"filter": "leaky_relu"}),
    "choices": ("multi_discrete", {}, {"kind": "twohot"}, {"filter_batch_norm": True}),
}


@pytest.mark.parametrize("name", HEADS)
def test_padding_changes_nothing_for_any_head_nor_for_privileged_critics(
    make_spaces, make_config, make_batch, name: str
) -> None:
    kind, algorithm, critic, losses = HEADS[name]
    truth = ObsSpace(shape=(2,), dtype="float32", role="critic")
    spaces = make_spaces(kind)
    spaces = Spaces(observations={**spaces.observations, "truth": truth}, action=spaces.action)
    config = dataclasses.replace(make_config(losses=losses, critic=critic), **algorithm)
    agent = make_agent(config, spaces)
    twin = copy.deepcopy(agent)
    batch = make_batch(spaces, lengths=(6, 3, 1, 0, 4, 2, 6, 5, 1, 1, 2, 2, 3, 3, 4, 4))
    loss, metrics, grads = _gradients(agent, batch)
    loss_2, metrics_2, grads_2 = _gradients(twin, _garbage(_longer(batch, 3)))
    torch.testing.assert_close(loss_2, loss, rtol=1e-5, atol=1e-5)
    _assert_close(metrics_2, metrics, rtol=1e-4, atol=1e-4)
    _assert_close(grads_2, grads, rtol=1e-3, atol=1e-4)
    _assert_close(dict(twin.named_buffers()), dict(agent.named_buffers()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_nothing_gives_zero_losses_and_finite_everything(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    spaces = make_spaces(kind)
    agent = Agent(make_config(), spaces)
    before = {n: b.clone() for n, b in agent.named_buffers()}
    loss, metrics, grads = _gradients(agent, _garbage(make_batch(spaces, lengths=(0, 0))))
    assert float(loss) == 0.0
    assert all(torch.isfinite(x).all() for x in (*metrics.values(), *grads.values()))
    _assert_close(dict(agent.named_buffers()), before)


# ------------------------------------------------------------------------------------ masks by name


def test_truncation_bootstraps_and_termination_does_not(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(losses={"reward_multiplier": 1.0}), make_spaces()).eval()
    batch = make_batch(agent.spaces, lengths=(1,), size=1)
    reward = float(batch.reward[0, 0])
    batch.truncated[:] = True
    open_end = float(agent(batch)[1]["value/target_mean"])
    assert open_end != pytest.approx(reward, abs=1e-3)
    batch.truncated[:], batch.terminated[:] = False, True
    assert float(agent(batch)[1]["value/target_mean"]) == pytest.approx(reward, abs=1e-5)


def test_a_cut_without_its_last_observation_teaches_the_actor_and_not_the_critic(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces())
    batch = make_batch(agent.spaces, lengths=(4,), size=4)
    batch.next_obs_valid[0, 3] = False
    counts = Agent.loss_counts(batch)
    assert {k: int(v) for k, v in counts.items()} == {"climb": 4, "clone": 4, "critic": 3}
    batch.terminated[0, 3] = True
    assert int(Agent.loss_counts(batch)["critic"]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_action_has_no_influence_on_anything(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    agent = Agent(
        make_config(losses={"online_weight": 0.0, "offline_weight": 1.0}), make_spaces(kind)
    )
    agent.eval()
    batch = make_batch(agent.spaces)
    batch.action_known[0, 2] = False
    other = copy.deepcopy(batch)
    other.prev_action[0, 3] = -7 if kind == "discrete" else torch.nan
    _, metrics, grads = _gradients(agent, batch)
    _, metrics_2, grads_2 = _gradients(agent, other)
    _assert_close(metrics_2, metrics)
    _assert_close(grads_2, grads)


def test_legal_actions_reach_the_targets_and_the_policy() -> None:
    action = ActionSpace(kind="discrete", n=3)
    obs = {
        "observation": ObsSpace(shape=(2,), dtype="float32"),
        "legal": ObsSpace(shape=(3,), dtype="int8", role="mask"),
    }
    spaces = Spaces(observations=obs, action=action)
    policy = Agent(AgentConfig(), spaces).policy
    legal = torch.tensor([[0, 0, 1], [1, 0, 0]], dtype=torch.int8)
    action_taken, _ = policy.act(
        {"observation": torch.randn(2, 2), "legal": legal},
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        policy.initial_hidden(2),
        sample=True,
    )
    assert action_taken.tolist() == [2, 0]


# ------------------------------------------------------------------------- gradients and the copies


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_copies_have_no_gradient_and_everything_else_has_one(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    agent = Agent(make_config(), make_spaces(kind))
    trainable = {id(p) for p in agent.trainable_parameters()}
    loss, _ = agent(make_batch(agent.spaces))
    loss.backward()
    for name, p in agent.named_parameters():
        assert (id(p) in trainable) == (not name.startswith("target_")) == (p.grad is not None), (
            name
        )


@pytest.mark.parametrize("kind", KINDS)
def test_climbing_trains_the_actor_alone(make_spaces, make_config, make_batch, kind: str) -> None:
    losses = {"offline_weight": 0.0, "critic_weight": 1e-30}
    agent = Agent(make_config(losses=losses), make_spaces(kind))
    loss, _ = agent(make_batch(agent.spaces))
    loss.backward()
    moved = {
        n.split(".")[1]
        for n, p in agent.named_parameters()
        if p.grad is not None and p.grad.abs().max() > 1e-12
    }
    assert moved == {"actor"}


def test_behaviour_cloning_builds_no_critic(make_spaces, make_config, make_batch) -> None:
    losses = {"fake_filter": True, "online_weight": 0.0, "offline_weight": 1.0}
    agent = Agent(make_config(losses=losses), make_spaces())
    loss, metrics = agent(make_batch(agent.spaces))
    loss.backward()
    assert agent.critic is None and not any("target" in n for n, _ in agent.named_parameters())
    assert set(k for k in metrics if k.startswith("loss/")) == {"loss/clone", "loss/total"}
    assert all(p.grad is not None for p in agent.trainable_parameters())
    agent.update_targets()


def test_targets_move_a_fraction_towards_the_learned_weights(make_spaces, make_config) -> None:
    agent = Agent(make_config(losses={"tau": 0.25}), make_spaces())
    with torch.no_grad():
        for p in agent.trainable_parameters():
            p.add_(1.0)
    before = [p.clone() for p in agent.target_critic.parameters()]
    agent.update_targets()
    for old, new in zip(before, agent.target_critic.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)
    for online, target in zip(
        agent.policy.actor.parameters(), agent.target_actor.parameters(), strict=True
    ):
        torch.testing.assert_close(online - target, torch.full_like(online, 0.75))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_with_the_union_s_counts_equal_the_union(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    # All critics in the target and no sampled actions, for the draws of the parts would differ.
    losses = {"fake_filter": True, "online_weight": 0.0} if kind == "continuous" else {}
    agent = Agent(make_config(losses=losses, critic={"n_critics_target": 3}), make_spaces(kind))
    agent.eval()  # statistics see one micro-batch at a time
    batch = make_batch(agent.spaces, lengths=(6, 1, 3, 2))
    total = {k: float(v) for k, v in Agent.loss_counts(batch).items()}
    _, _, whole = _gradients(agent, batch)
    agent.zero_grad()
    for part in (slice(0, 1), slice(1, 4)):
        loss, _ = agent(batch._map(lambda x, part=part: x[part]), counts=total)
        loss.backward()
    parts = {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}
    _assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("critic", ["twohot", "hlgauss"])
def test_micro_batches_of_classified_returns_equal_the_union(
    make_spaces, make_config, make_batch, critic: str
) -> None:
    agent = Agent(make_config(critic={"n_critics_target": 3, "kind": critic}), make_spaces()).eval()
    batch = make_batch(agent.spaces, lengths=(6, 1, 3, 2))
    total = {k: float(v) for k, v in Agent.loss_counts(batch).items()}
    _, _, whole = _gradients(agent, batch)
    agent.zero_grad()
    for part in (slice(0, 1), slice(1, 4)):
        agent(batch._map(lambda x, part=part: x[part]), counts=total)[0].backward()
    parts = {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}
    _assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_metrics_are_detached_scalars_and_brief_ones_are_the_losses(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces()).eval()
    batch = make_batch(agent.spaces)
    full, brief = agent(batch)[1], agent(batch, detailed=False)[1]
    assert all(v.ndim == 0 and not v.requires_grad for v in full.values())
    assert set(brief) == {k for k in full if k.startswith("loss/")}


def test_evaluation_mode_moves_no_statistic(make_spaces, make_config, make_batch) -> None:
    agent = Agent(make_config(), make_spaces()).eval()
    before = {n: b.clone() for n, b in agent.named_buffers()}
    agent(make_batch(agent.spaces))
    _assert_close(dict(agent.named_buffers()), before)


# ---------------------------------------------------------------------------------- small functions


def test_a_subset_never_holds_a_critic_twice() -> None:
    q = torch.arange(4.0).reshape(4, 1).expand(4, 20_000)
    least = ensemble_subset(q, 2, minimum=True, noise=torch.randn(4, 20_000))
    # Of 6 pairs, 3 have minimum 0, 2 have 1, 1 has 2; 3 could only be drawn twice.
    frequency = torch.bincount(least.long(), minlength=4) / 20_000
    torch.testing.assert_close(frequency, torch.tensor([3, 2, 1, 0]) / 6, atol=0.02, rtol=0)
    torch.testing.assert_close(
        ensemble_subset(q, 4, minimum=False, noise=q), torch.full((20_000,), 1.5)
    )


def test_filters_weigh_by_advantage() -> None:
    advantage = torch.tensor([-1.0, 0.0, 0.5, 100.0])
    assert binary_filter(advantage, 0.0).tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(
        exp_filter(advantage, 2.0, 20.0), torch.tensor([-2.0, 0.0, 1.0, 3.0]).exp().clamp(max=20)
    )


@pytest.mark.parametrize(
    ("encoder", "count"),
    [("feedforward", 657_664), ("gru", 855_808), ("transformer", 2_440_996)],
)
def test_parameter_counts_are_the_published_ones(encoder: str, count: int) -> None:
    obs = {"observation": ObsSpace(shape=(4,), dtype="float32")}
    config = AgentConfig(trajectory_encoder=TrajectoryEncoderConfig(kind=encoder))  # type: ignore[arg-type]
    discrete = ActionSpace(kind="discrete", n=5)
    box = ActionSpace(kind="continuous", shape=(6,), low=(-1.0,) * 6, high=(1.0,) * 6)
    for action, expected in (
        (discrete, (400_128, 562_316, 140_579)),
        (box, (400_640, 534_532, 153_172)),
    ):
        agent = Agent(config, Spaces(observations=obs, action=action))
        parts = agent.policy.timestep_encoder, agent.critic, agent.policy.actor
        assert tuple(sum(p.numel() for p in m.parameters()) for m in parts) == expected
        assert sum(p.numel() for p in agent.policy.trajectory_encoder.parameters()) == count


def test_permuted_observation_keys_give_the_same_update(make_config, make_batch) -> None:
    obs = {
        "b": ObsSpace(shape=(2, 2), dtype="uint8"),
        "a": ObsSpace(shape=(3,), dtype="float32"),
        "c": ObsSpace(shape=(), dtype="int64", n=5),
        "seen by nobody": ObsSpace(shape=(9,), dtype="float32", role="critic"),
    }
    action = ActionSpace(kind="discrete", n=3)
    spaces = Spaces(observations=obs, action=action)
    batch = make_batch(spaces)
    batch.obs["c"] = torch.randint(0, 5, batch.time_idx.shape)
    batch.obs["b"] = torch.randint(0, 256, batch.obs["b"].shape, dtype=torch.uint8)
    agent = Agent(make_config(), spaces).eval()
    other = Agent(
        make_config(), Spaces(observations=dict(reversed(obs.items())), action=action)
    ).eval()
    other.load_state_dict(agent.state_dict())
    shuffled = dataclasses.replace(batch, obs=dict(reversed(batch.obs.items())))
    torch.manual_seed(1)
    loss, _ = agent(batch)
    torch.manual_seed(1)
    torch.testing.assert_close(other(shuffled)[0], loss)
