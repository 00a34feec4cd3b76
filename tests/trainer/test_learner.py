"""The arithmetic of an update, what is kept of it, and a task that must be solved."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from amago_model import Agent, ExpFilterConfig, FeedForwardConfig
from amago_model.config import Spaces
from collector.builtin.recall import Recall
from stepwell import Box, Discrete, EnvSpec, Trajectory
from stepwell.testing import make_spec
from tests.trainer.small_runs import loader_of
from trainer import checkpoint as checkpoints
from trainer.config import DataConfig, TrainConfig
from trainer.learner import Learner, TrainingDiverged, merge_ranks
from trainer.recipes import recipe

LENGTHS = [[5, 40, 17], [64, 9]]


def learner_of(config: TrainConfig, spec: EnvSpec, **changes) -> Learner:
    torch.manual_seed(0)
    agent = Agent(config.agent, Spaces.of_spec(spec.to_json()))
    optimizer = config.optimizer.replace(**changes)
    accelerator = Accelerator(cpu=True)
    return Learner(agent, optimizer, accelerator, seed=config.seed, updates=config.updates)


@pytest.mark.parametrize("filtering", ["binary", "normalised"])
def test_micro_batches_equal_one_batch_of_their_union(fake, tmp_path, filtering):
    """Windows of unequal length in 1, 2, 3 or 5 parts, sampled actions and all: the same loss,
    gradient, weights, metrics and statistics, which move once."""
    service = fake(make_spec(action_known=True), LENGTHS)
    data = DataConfig(batch=10, window=12, padding="both")
    batch = loader_of(service, tmp_path, data).load(0).batch
    config = recipe("pendulum_stitch")
    if filtering == "normalised":
        losses = config.agent.losses.replace(filter=ExpFilterConfig(batch_norm=True))
        config = config.replace(agent=config.agent.replace(losses=losses))
    results = []
    for parts in (1, 2, 3, 5):
        learner = learner_of(config, service.spec, accumulate=parts)
        before = {k: v.clone() for k, v in learner.agent.state_dict().items()}
        gradients = []
        for p in learner.parameters:
            # The last part's call holds the sum.
            p.register_post_accumulate_grad_hook(lambda p, into=gradients: into.append(p.grad))
        seen = learner.update(0, batch, detailed=True).metrics
        assert len(gradients) == parts * len(learner.parameters)
        after = {k: v.clone() for k, v in learner.agent.state_dict().items()}
        assert not torch.equal(before["critics.popart.w"], after["critics.popart.w"])
        summed = {i: g.clone() for i, g in enumerate(gradients[-len(learner.parameters) :])}
        results.append((seen, summed, after))
    for got in results[1:]:
        for mine, whole in zip(got, results[0], strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("early", [False, True])
def test_target_networks_move_after_the_step_or_as_published_before_it(fake, tmp_path, early):
    """With tau 1 a copy is the weights: those after the step, or those before."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    config = recipe("pendulum_stitch")
    losses = config.agent.losses.replace(tau=1.0, targets_before_step=early, lagged_critics=True)
    agent = config.agent.replace(losses=losses)
    learner = learner_of(config.replace(agent=agent), service.spec)
    learner.update(0, batch)  # before it, copies are the weights anyway
    before = learner.agent.critics.online.weights[0].detach().clone()
    learner.update(1, batch)
    after = learner.agent.critics.online.weights[0].detach()
    assert not torch.equal(before, after)
    assert torch.equal(learner.agent.critics.target.weights[0], before if early else after)
    # Those that DPG asks are always from before the step.
    assert torch.equal(learner.agent.critics.lagged.weights[0], before)


def test_the_gradient_norm_that_is_shown_is_the_one_before_clipping(fake, tmp_path):
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    key = "optimizer/gradient_norm"
    free = learner_of(recipe("pendulum_stitch"), service.spec, grad_clip=0.0)
    clipped = learner_of(recipe("pendulum_stitch"), service.spec, grad_clip=1e-3)
    shown = [float(x.update(0, batch).metrics[key]) for x in (free, clipped)]
    assert shown[0] == shown[1] > 1e-3


def test_what_is_logged_changes_nothing_and_parts_make_up_the_gradient(fake, tmp_path):
    """Detailed or not, with dropout even: the same weights, and the same random numbers after."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    config = recipe("pendulum_stitch")
    critic = config.agent.critic.replace(dropout=0.2)
    config = config.replace(agent=config.agent.replace(critic=critic))
    after, metrics = [], {}
    for detailed in (False, True):
        learner = learner_of(config, service.spec)
        for update in range(2):
            metrics = learner.update(update, batch, detailed=detailed).metrics
        assert learner.agent.training
        after.append((learner.agent.state_dict(), torch.get_rng_state()))
    (plain, state), (logged, its_state) = after
    assert all(torch.equal(plain[name], value) for name, value in logged.items())
    assert torch.equal(state, its_state)
    parts = [float(metrics[f"optimizer/gradient_norm_{k}"]) for k in ("actor", "critic", "encoder")]
    assert min(parts) > 0
    total = float(metrics["optimizer/gradient_norm"])
    assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(total, rel=1e-5)
    assert 0 <= float(metrics["dormant/actor"]) <= 1 and "dormant/critic" in metrics


def test_an_agent_of_your_own_says_what_its_losses_are_means_of(fake, tmp_path, monkeypatch):
    """Else a further loss of it would be weighed by part."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    learner = learner_of(recipe("pendulum_stitch"), service.spec, accumulate=2)
    seen = []

    class Mine(Agent):
        def loss_counts(self, batch):
            return super().loss_counts(batch) | {"mine": batch.truncated.sum()}

        def forward(self, batch, detailed=True, counts=None):
            seen.append(counts)
            return super().forward(batch, detailed, counts)

    monkeypatch.setattr(learner.agent, "__class__", Mine)
    learner.update(0, batch)
    whole = {name: int(count) for name, count in learner.agent.loss_counts(batch).items()}
    assert seen == [whole, whole]


def test_numbers_of_processes_are_joined_by_how_much_each_has_seen():
    """Counts add up, means weigh them, extremes stay extreme; a share of nothing says nothing."""
    ranks = [
        {
            "count/critic": critic,
            "count/bc": bc_mask,
            "value/target_mean": mean,
            "value/target_max": largest,
            "value/target_min": least,
            "policy/log_prob": log_prob,
            "loss/total": loss,
            "relabel/cpu_ms": ms,
        }
        for critic, bc_mask, mean, largest, least, log_prob, loss, ms in (
            (3, 1, 2.0, -4.0, -9.0, -1.0, 4.0, 1.0),
            (1, 3, 6.0, -2.0, -3.0, -5.0, 2.0, 3.0),
            (0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0),
        )
    ]
    assert merge_ranks(ranks) == {
        "count/critic": 4,
        "count/bc": 4,
        "value/target_mean": 3.0,
        "value/target_max": -2.0,
        "value/target_min": -9.0,
        "policy/log_prob": -4.0,
        "loss/total": 2.0,
        "relabel/cpu_ms": 3.0,
    }
    assert merge_ranks(ranks[:1]) == ranks[0]


def test_noise_belongs_to_the_update(fake, tmp_path):
    """Whatever was drawn before, an update draws the same: so a resumed run needs no generator."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    losses = []
    for disturb in (0, 1000):
        learner = learner_of(recipe("pendulum_stitch"), service.spec)
        torch.rand(disturb)
        losses.append(float(learner.update(7, batch).metrics["loss/total"]))
    assert losses[0] == losses[1]
    assert float(
        learner_of(recipe("pendulum_stitch"), service.spec).update(8, batch).metrics["loss/total"]
    )
    assert losses[0] != float(
        learner_of(recipe("pendulum_stitch"), service.spec).update(8, batch).metrics["loss/total"]
    )


def test_the_step_size_warms_up_and_falls():
    learner = learner_of(
        recipe("pendulum_stitch").replace(updates=100), make_spec(), warmup=10, learning_rate=1.0
    )
    rates = [learner.learning_rate(u) for u in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(rates[9])
    assert rates[99] < 0.001 and rates[50] == pytest.approx(0.5)
    steady = learner_of(recipe("pendulum_stitch"), make_spec(), warmup=0, decay="none")
    assert steady.learning_rate(0) == steady.learning_rate(10**6) == 1e-3


def test_a_bad_gradient_is_skipped_counted_and_at_last_fatal(fake, tmp_path):
    """Weights stay untouched; after max_bad_updates training stops and says what to do."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    learner = learner_of(recipe("bc"), service.spec, max_bad_updates=2)
    learner.update(0, batch)
    before = [p.clone() for p in learner.parameters]
    hook = learner.parameters[0].register_hook(lambda grad: grad * float("nan"))
    result = learner.update(1, batch)
    assert learner.check_finite(1, result) == (True, None)
    assert "optimizer/gradient_norm" not in result.metrics
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))
    skipped, ending = learner.check_finite(2, learner.update(2, batch))
    assert skipped and learner.skipped == 2 and isinstance(ending, TrainingDiverged)
    assert "2 updates" in str(ending) and "learning_rate" in str(ending)
    hook.remove()
    result = learner.update(3, batch)
    assert learner.check_finite(3, result) == (False, None)
    assert float(result.metrics["optimizer/gradient_norm"]) > 0
    assert all(bool(torch.isfinite(p).all()) for p in learner.parameters)


@pytest.mark.parametrize("first_bad", [0, 2])
@pytest.mark.parametrize("published", [False, True], ids=["ours", "published"])
def test_an_update_that_is_checked_later_changes_what_one_checked_at_once_does(
    fake, tmp_path, published, first_bad
):
    """As on a GPU: a bad gradient, the very first or one in between, moves no weight, target
    network, kept critic or memory of the optimiser, though nobody knows of it at the step."""
    service = fake(None, LENGTHS)
    batch = loader_of(service, tmp_path, DataConfig(batch=4, window=8)).load(0).batch
    config = recipe("pendulum_stitch")
    losses = config.agent.losses.replace(
        lagged_critics=published, targets_before_step=published, use_target_actor=True
    )
    config = config.replace(agent=config.agent.replace(losses=losses, ema_decay=0.9))
    found = []
    for late in (False, True):
        torch.manual_seed(0)
        learner = learner_of(config, service.spec)
        learner.defers_check = late
        results = []
        for update in range(5):
            bad = update in (first_bad, 3)
            hook = learner.parameters[0].register_hook(
                lambda grad, bad=bad: grad * float("nan") if bad else grad
            )
            results.append(learner.update(update, batch))
            hook.remove()
        checked = [learner.check_finite(update, result)[0] for update, result in enumerate(results)]
        assert [i for i, skipped in enumerate(checked) if skipped] == sorted({first_bad, 3})
        memory = [
            value
            for p in learner.parameters
            for _, value in sorted(learner.optimizer.state[p].items())
        ]
        found.append([*learner.agent.state_dict().values(), *memory])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_brings_everything_back(fake, tmp_path):
    """Weights, target networks, averages, statistics and the optimiser's memory: it goes on
    bit-equal."""
    service = fake(None, LENGTHS)
    loader = loader_of(service, tmp_path, DataConfig(batch=4, window=8))
    config = recipe("pendulum_stitch")
    losses = config.agent.losses.replace(lagged_critics=True, targets_before_step=True)
    config = config.replace(agent=config.agent.replace(losses=losses, ema_decay=0.9))
    learner = learner_of(config, service.spec)
    for step in range(3):
        learner.update(step, loader.load(step).batch)
    state = {"views": [], "config": {}}
    path = checkpoints.save(tmp_path / "c", 3, learner.agent, learner.optimizer, state, keep=2)
    found = checkpoints.newest(tmp_path / "c")
    assert found is not None and found.path == path and found.state["update"] == 3
    torch.manual_seed(99)
    other = learner_of(config.replace(seed=0), service.spec)
    with torch.no_grad():
        for parameter in other.parameters:
            parameter.mul_(2.0)
    checkpoints.restore(found, other.agent, other.optimizer)
    for step in range(3, 6):
        for each in (learner, other):
            each.update(step, loader.load(step).batch)
    for name, value in learner.agent.state_dict().items():
        assert torch.equal(value, other.agent.state_dict()[name]), name
    assert learner.agent.average is not None and learner.agent.average.updates == 6


@pytest.mark.filterwarnings("ignore:.*meta parameter in the current model, which is a no-op")
def test_a_checkpoint_goes_to_the_device_of_whoever_takes_it_up(fake, tmp_path):
    """A GPU if there is one; else device meta stands for any other than where it was written."""
    service = fake(None, LENGTHS)
    loader = loader_of(service, tmp_path, DataConfig(batch=4, window=8))
    learner = learner_of(recipe("pendulum_stitch"), service.spec)
    learner.update(0, loader.load(0).batch)
    checkpoints.save(tmp_path / "c", 1, learner.agent, learner.optimizer, {}, keep=1)
    found = checkpoints.newest(tmp_path / "c")
    assert found is not None
    elsewhere = "cuda" if torch.cuda.is_available() else "meta"
    agent = Agent(recipe("pendulum_stitch").agent, Spaces.of_spec(service.spec.to_json())).to(
        elsewhere
    )
    optimizer = torch.optim.AdamW(agent.trainable_parameters())
    checkpoints.restore(found, agent, optimizer)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert len(kept) == 3 * len(agent.trainable_parameters())
    assert {value.device.type for value in (*agent.state_dict().values(), *kept)} == {elsewhere}


# ------------------------------------------------------------------------------------ a task solved

SYMBOLS, DELAY = 2, 8


@pytest.fixture
def recall_data(fake):
    """2000 episodes of a random actor, as a shard."""
    env, rng = Recall(SYMBOLS, DELAY), np.random.default_rng(0)
    shape = env.observation_space.shape
    service = fake(EnvSpec.of(Box(shape), Discrete(SYMBOLS), env="Recall"))
    episodes = []
    for seed in range(2000):
        obs, actions, rewards, done = [env.reset(seed=seed)[0]], [], [], False
        while not done:
            actions.append(int(rng.integers(SYMBOLS)))
            o, reward, done, *_ = env.step(actions[-1])
            obs.append(o)
            rewards.append(reward)
        episodes.append(
            Trajectory.from_arrays(
                obs=np.stack(obs),
                actions=actions,
                rewards=rewards,
                terminated=True,
                spec=service.spec,
            )
        )
    service.add_shard(episodes)
    return service


def score(agent: Agent, episodes: int = 64) -> float:
    """Mean greedy return over fixed seeds, all episodes side by side."""
    agent.eval()
    envs = [Recall(SYMBOLS, DELAY) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=10**6 + i)[0] for i, env in enumerate(envs)])
    hidden = agent.policy.initial_hidden(episodes, "cpu")
    action, reward = torch.zeros(episodes, dtype=torch.int64), torch.zeros(episodes)
    total, done = np.zeros(episodes), False
    time_idx = torch.zeros(episodes, dtype=torch.int64)
    while not done:
        seen = {"observation": torch.from_numpy(obs)}
        action, hidden = agent.policy.act(seen, action, reward, time_idx, hidden, sample=False)
        steps = [env.step(int(a)) for env, a in zip(envs, action, strict=True)]
        obs = np.stack([s[0] for s in steps])
        reward = torch.tensor([float(s[1]) for s in steps])
        total += reward.numpy()
        done, time_idx = steps[0][2], time_idx + 1
    return float(total.mean())


@pytest.mark.long
@pytest.mark.parametrize("memory", [True, False], ids=["transformer", "feed_forward"])
def test_recall_is_solved_with_memory_and_not_without(recall_data, tmp_path, memory):
    """From shards to scores: the Transformer answers right, the memory-free twin guesses."""
    config = recipe("recall").replace(updates=400)
    if not memory:
        blind = FeedForwardConfig(d_model=32)
        config = config.replace(agent=config.agent.replace(trajectory_encoder=blind))
    learner = learner_of(config, recall_data.spec)
    with closing(loader_of(recall_data, tmp_path, config.data)) as loader:
        for update in range(config.updates):
            learner.update(update, next(loader).batch)
    got = score(learner.agent)
    assert got >= 0.95 if memory else 0.25 <= got <= 0.75
