"""The update as slow loops, in float64: one transition, discount, critic and sample at a time.

Read it beside the docstring of `Agent`. Of the agent it takes the weights, the settings and the
memory's state vectors; everything else is written out here, by hand and from scalars: the MLP of
one critic, one distribution, one return, one weight. `slow_update` gives what `Agent.forward` must
give, and its terms can be differentiated like the real ones.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amago_model import Agent, Batch, PopArtConfig
from amago_model.data.batch import encode_action
from amago_model.encoders.transformer import SigmaLinear
from tests.amago_model.reference_parts import (
    NOTHING,
    SlowPolicy,
    SlowPopArt,
    moved_moments,
    normal_cdf,
    plain,
    slow_centres,
    slow_filter,
    slow_label,
    slow_lambda,
    slow_n_step,
)

Place = tuple[int, int, int]
"""Window, transition, discount."""


@dataclass
class SlowUpdate:
    """What `Agent.forward` must give, and what it did on the way, by (b, t, g)."""

    loss: Tensor
    terms: dict[str, Tensor]
    popart: list[SlowPopArt]
    inputs: dict[str, Tensor]
    """Mean and variance of the inputs, after the batch."""
    targets: dict[Place, float] = field(default_factory=dict)
    weights: dict[Place, float] = field(default_factory=dict)
    advantages: dict[Place, float] = field(default_factory=dict)
    log_probs: dict[Place, float] = field(default_factory=dict)
    values: dict[Place, list[float]] = field(default_factory=dict)
    """What each critic says of the data's action, in units of multiplied reward."""


def slow_update(agent: Agent, batch: Batch, noise: Tensor) -> tuple[SlowUpdate, Agent]:
    """The update of an agent in float64 by loops, and the twin whose parameters get the gradients.

    noise: [B, T, width], standard normal: for each transition the K_c x G x W numbers of the next
    actions, then the K_a x G x W of the policy's own, then the C x G that order the critics.
    Statistics move if the agent is in training mode. No dropout.
    """
    moving = agent.training
    agent = copy.deepcopy(agent)
    for part in agent.modules():
        if isinstance(part, SigmaLinear) and moving:  # its power iteration, once
            part.iterate()
    agent.eval()
    slow = _Loops(agent, batch, noise)
    inputs = slow.move_inputs() if moving else {}
    return slow.run(moving, inputs), agent


class _Loops:
    def __init__(self, agent: Agent, batch: Batch, noise: Tensor) -> None:
        self.agent, self.batch = agent, batch
        self.c, self.space = agent.config.losses, agent.spaces.action
        self.gammas = [plain(g) for g in agent.gammas]
        self.b, self.t = batch.mask.shape
        self._split(noise)
        self.scalar = agent.critics is None or agent.config.critic.kind == "scalar"
        self.exact = self.space.kind == "discrete" and not agent.sampled
        norm = agent.critics and agent.critics.popart
        self.popart = [
            SlowPopArt(
                *(plain(x[g]) for x in (norm.moments.mean, norm.moments.variance)),
                plain(norm.moments.updates),
                *(plain(x[g]) for x in (norm.w, norm.b)),
                (agent.config.critic.popart or PopArtConfig()).beta,
                (agent.config.critic.popart or PopArtConfig()).preserve_outputs,
                agent.config.critic.popart is not None,
            )
            for g in (range(len(self.gammas)) if norm is not None else ())
        ]

    def _split(self, noise: Tensor) -> None:
        c, g, critics = self.c, len(self.gammas), self.agent.config.critic
        width = 0 if self.space.kind == "discrete" and not self.agent.sampled else None
        width = int(self.agent.policy.actor.noise_width) if width is None else width
        k_c, k_a = c.n_actions_in_critic_loss * g * width, c.n_actions_in_actor_loss * g * width
        self.next_noise = noise[..., :k_c].unflatten(-1, (c.n_actions_in_critic_loss, g, width))
        own = noise[..., k_c : k_c + k_a]
        self.policy_noise = own.unflatten(-1, (c.n_actions_in_actor_loss, g, width))
        rest = noise[..., k_c + k_a :]
        self.ensemble_noise = rest.unflatten(-1, (critics.n_critics, g)) if rest.numel() else None

    # ---------------------------------------------------------------------- what is there

    def critic_mask(self, i: int, k: int) -> bool:
        allowed = self.batch.critic_mask is None or bool(self.batch.critic_mask[i, k])
        return allowed and self.known(i, k) and self.usable(i, k)

    def bc_mask(self, i: int, k: int) -> bool:
        return self.dpg_mask(i, k) and self.known(i, k)

    def dpg_mask(self, i: int, k: int) -> bool:
        allowed = self.batch.actor_mask is None or bool(self.batch.actor_mask[i, k])
        return allowed and bool(self.batch.mask[i, k])

    def known(self, i: int, k: int) -> bool:
        return bool(self.batch.mask[i, k] and self.batch.action_known[i, k])

    def usable(self, i: int, k: int) -> bool:
        arrives = bool(self.batch.next_obs_valid[i, k])
        if self.c.bc_target_penalty > 0:
            arrives = arrives and k + 1 < self.t and self.known(i, k + 1)
        return bool(self.batch.mask[i, k]) and (bool(self.batch.terminated[i, k]) or arrives)

    def rows(self, i: int) -> list[int]:
        """Rows of window i that hold an observation."""
        mask, known = self.batch.mask[i], self.batch.next_obs_valid[i]
        first = [0] if bool(mask[:1].any()) else []
        return first + [k + 1 for k in range(self.t) if mask[k] and known[k]]

    def action(self, i: int, k: int) -> Tensor:
        """[A]: the data's action as the policy imitates it."""
        return encode_action(self.space, self.batch.action[i, k]).double()

    def shown(self, i: int, k: int) -> Tensor:
        """[A]: the same as critics see it."""
        x = self.action(i, k)
        if self.space.kind == "discrete" and self.agent.config.critic.soften_data_actions:
            low, high = self.agent.config.actor.prob_low, self.agent.config.actor.prob_high
            soft = [min(max(plain(p), low), high) for p in x]
            x = torch.tensor([p / sum(soft) for p in soft], dtype=torch.float64)
        return x

    # ------------------------------------------------------------------------- statistics

    def move_inputs(self) -> dict[str, Tensor]:
        """Take the batch's rows into the twin's input statistics, feature by feature."""
        batch, moved = self.batch, {}
        taken: dict[str, list[list[float]]] = {"inputs": [], "privileged": []}
        for i in range(self.b):
            for r in self.rows(i):
                reward, action = 0.0, [0.0] * self.space.width
                if batch.time_idx[i, r] > 0:
                    reward = plain(batch.prev_reward[i, r].float())
                    if r == 0 or self.known(i, r - 1):
                        action = encode_action(self.space, batch.prev_action[i, r]).tolist()
                seen = batch.obs["observation"][i, r].double().tolist()
                taken["inputs"].append([*seen, reward, *action])
                if "truth" in batch.obs:
                    taken["privileged"].append(batch.obs["truth"][i, r].double().tolist())
        norms = {"inputs": self.agent.policy.timestep_encoder.input_norm.moments}
        if "truth" in batch.obs and self.agent.critics is not None:
            norms["privileged"] = self.agent.critics.privileged_encoder.norm.moments
        for name, moments in norms.items():
            updates = plain(moments.updates)
            for f in range(len(moments.mean)):
                column = [row[f] for row in taken[name]]
                start = plain(moments.mean[f]), plain(moments.variance[f]), updates
                mean, variance, after = moved_moments(*start, column, moments.beta)
                moments.mean[f], moments.variance[f] = mean, variance
                moments.updates.fill_(after)
            moved |= {f"{name}.mean": moments.mean, f"{name}.variance": moments.variance}
        return moved

    # ---------------------------------------------------------------------------- networks

    def states(self, i: int) -> tuple[Tensor, Tensor]:
        """Window i by itself: what the actor sees [rows, D] and what critics see [rows, D + P]."""
        n = int(self.batch.mask[i].sum())
        one = self.batch._map(lambda x: x[i : i + 1])
        rows = self.agent.policy.encode_timesteps(
            {key: x[:, : n + 1] for key, x in one.obs.items()},
            one.prev_action[:, : n + 1],
            one.prev_reward[:, : n + 1],
            one.time_idx[:, : n + 1],
            valid=one.timestep_mask[:, : n + 1],
            previous_known=one.previous_known[:, : n + 1],
            return_to_go=None if one.return_to_go is None else one.return_to_go[:, : n + 1],
        )
        state = seen = self.agent.policy.encode_trajectory(rows, one.time_idx[:, : n + 1])[0]
        if self.agent.critics is not None and self.agent.critics.privileged_encoder.width:
            more = self.agent.critics.privileged_encoder(
                {key: x[:, : n + 1] for key, x in one.obs.items()}, one.timestep_mask[:, : n + 1]
            )[0]
            seen = torch.cat((state, more), -1)
        return state, seen

    def policy(self, actor, state: Tensor, i: int, r: int, g: int) -> SlowPolicy:  # type: ignore[no-untyped-def]
        legal = None
        if "legal" in self.batch.obs and r in self.rows(i):
            legal = [bool(x > 0) for x in self.batch.obs["legal"][i, r]]
        x = actor.mlp(state[None])[0].unflatten(-1, (len(self.gammas), -1))[g]
        return SlowPolicy(self.agent, x, legal)

    def critic(self, critic, c: int, seen: Tensor, g: int, action: Tensor, *, constant: bool):  # type: ignore[no-untyped-def]
        """What critic c says of one action in one state: its raw number, or logits of the bins."""
        x = seen
        if not critic.table:
            if self.space.kind == "continuous":
                action = action.clamp(-0.999, 0.999)
            x = torch.cat((seen, critic.gamma_features[g], action))
        last = len(critic.weights) - 1
        for layer, (w, b) in enumerate(zip(critic.weights, critic.biases, strict=True)):
            w, b = (w.detach(), b.detach()) if constant else (w, b)
            x = x @ w[c] + b[c, 0]
            x = self.hidden(x) if layer < last else x
        if not critic.table:
            return x if not self.scalar else x[0]
        n = self.space.n
        return (x[g * n : (g + 1) * n] * action).sum()

    def hidden(self, x: Tensor) -> Tensor:
        """The activation of a critic, and its layer norm."""
        x = torch.stack([a if plain(a) > 0 else 0.01 * a for a in x])
        if not self.agent.config.critic.layer_norm:
            return x
        mean = sum(x, NOTHING) / len(x)
        variance = sum(((a - mean) ** 2 for a in x), NOTHING) / len(x)
        return torch.stack([(a - mean) / (variance + 1e-5) ** 0.5 for a in x])

    def number(self, out: Tensor) -> Tensor:
        """A critic's answer as one number."""
        if self.scalar:
            return out
        centres, _ = slow_centres(self.agent)
        z = sum((p * at for p, at in zip(out.softmax(-1), centres, strict=True)), NOTHING)
        return z.sign() * (z.abs().exp() - 1) if self.agent.config.critic.symlog else z

    def value_of(self, critic, c, seen, g, policy, noise, *, constant):  # type: ignore[no-untyped-def]
        """Critic c's value of the policy's own actions: all with their odds, or some samples."""
        if self.exact:
            total = NOTHING
            for a, p in enumerate(policy.probs):
                one = torch.eye(self.space.n, dtype=torch.float64)[a]
                total = total + p * self.number(
                    self.critic(critic, c, seen, g, one, constant=constant)
                )
            return total
        drawn = [policy.sample(e[g]) for e in noise]
        each = [self.number(self.critic(critic, c, seen, g, a, constant=constant)) for a in drawn]
        return sum(each) / len(each)

    # ------------------------------------------------------------------------- the loops

    def next_value(self, i: int, k: int, g: int, state: Tensor, seen: Tensor) -> float:
        """Where transition k of window i arrives, in units of multiplied reward."""
        a = self.agent
        if self.c.value_expectile is not None:
            return self.popart[g].to_return(plain(self.state_value(seen[k + 1], g)))
        actor = a.target_actor if self.c.use_target_actor else a.policy.actor
        policy = self.policy(actor, state[k + 1], i, k + 1, g)
        policy.smoothed = True
        values = [
            plain(
                self.value_of(
                    a.critics.target,
                    c,
                    seen[k + 1],
                    g,
                    policy,
                    self.next_noise[i, k],
                    constant=True,
                )
            )
            for c in range(a.config.critic.n_critics)
        ]
        value = self.reduced(values, i, k, g)
        value = self.popart[g].to_return(value) if self.scalar else value
        return value - self.c.bc_target_penalty * self.next_error(policy, i, k, g)

    def next_error(self, policy: SlowPolicy, i: int, k: int, g: int) -> float:
        """How far the policy's next actions are from the data's, if that is known."""
        if self.c.bc_target_penalty == 0 or k + 1 >= self.t or not self.known(i, k + 1):
            return 0.0
        errors = [
            (plain(a) - plain(b)) ** 2
            for e in self.next_noise[i, k]
            for a, b in zip(policy.sample(e[g]), self.action(i, k + 1), strict=True)
        ]
        return sum(errors) / len(errors)

    def reduced(self, values: list[float], i: int, k: int, g: int) -> float:
        """The lowest or the mean of those target critics that the noise draws."""
        critics = self.agent.config.critic
        m = critics.n_critics_target
        if critics.subset_replacement:
            ranges = [normal_cdf(plain(self.ensemble_noise[i, k, j, g])) for j in range(m)]
            values = [values[min(int(u * len(values)), len(values) - 1)] for u in ranges]
        elif m < len(values):
            order = sorted(
                range(len(values)), key=lambda c: -plain(self.ensemble_noise[i, k, c, g])
            )
            values = [values[c] for c in order[:m]]
        how = self.c.target_reduction
        if how == "auto":
            how = "min" if self.c.dpg_weight > 0 else "mean"
        return min(values) if how == "min" else sum(values) / len(values)

    def state_value(self, seen: Tensor, g: int) -> Tensor:
        """V(s) of one state: a critic of the only action that its network knows."""
        x, net = seen, self.agent.critics.state_value
        last = len(net.weights) - 1
        for layer, (w, b) in enumerate(zip(net.weights, net.biases, strict=True)):
            x = x @ w[0] + b[0, 0]
            x = self.hidden(x) if layer < last else x
        return x[g]

    def target(self, i: int, k: int, g: int, q: list[float]) -> float:
        batch, c, n = self.batch, self.c, int(self.batch.mask[i].sum())
        rewards = [plain(batch.reward[i, j]) * c.reward_multiplier for j in range(n)]
        ended = [bool(batch.terminated[i, j]) for j in range(n)]
        usable = [self.usable(i, j) for j in range(n)]
        case = rewards, ended, usable, q, self.gammas[g]
        if c.td_lambda is None:
            y = slow_n_step(*case, c.n_step, k)
        else:
            y = slow_lambda(*case, c.td_lambda, k)
        if c.target_low is not None:
            y = max(y, c.target_low * c.reward_multiplier)
        if c.target_high is not None:
            y = min(y, c.target_high * c.reward_multiplier)
        return y

    def normalized(self, x: Tensor, g: int) -> Tensor:
        return self.popart[g].to_normalized(x) if self.scalar else self.popart[g].normalize(x)

    def run(self, moving: bool, inputs: dict[str, Tensor]) -> SlowUpdate:
        agent, c = self.agent, self.c
        every = [(i, k, g) for i in range(self.b) for k in range(self.t) for g in self._discounts]
        every = [(i, k, g) for i, k, g in every if self.batch.mask[i, k]]
        states = {i: self.states(i) for i in range(self.b) if self.batch.mask[i].any()}
        result = SlowUpdate(NOTHING, {}, self.popart, inputs)
        terms: dict[str, list[Tensor]] = {"critic": [], "value": [], "dpg": [], "bc": []}
        advantages: dict[Place, float] = {}
        climbed: dict[Place, Tensor] = {}
        alone: dict[Place, float] = {}
        baseline: dict[Place, float] = {}
        own = agent.policy.actor

        if agent.critics is not None:
            for i, (state, seen) in states.items():
                fixed, n = (state.detach(), seen.detach()), int(self.batch.mask[i].sum())
                for g in self._discounts:
                    arrives = [bool(self.batch.next_obs_valid[i, k]) for k in range(n)]
                    q = [self.next_value(i, k, g, *fixed) if arrives[k] else 0.0 for k in range(n)]
                    for k in range(n):
                        if self.critic_mask(i, k):
                            result.targets[i, k, g] = self.target(i, k, g, q)
            if moving:
                for g in self._discounts:
                    self.popart[g].update([y for (_, _, h), y in result.targets.items() if h == g])
            # As published, regressing critics judge the policy's actions as they were a step ago.
            judge = (
                agent.critics.lagged if c.lagged_critics and self.scalar else agent.critics.online
            )
            for i, k, g in every:
                state, seen = states[i]
                n_critics = range(agent.config.critic.n_critics)
                # The critics' copy of the state is a constant; the actor's only if it is told so.
                acts_on = state[k].detach() if c.dpg_detach_state else state[k]
                policy = self.policy(own, acts_on, i, k, g)
                noise = self.policy_noise[i, k]
                v = [
                    self.value_of(
                        judge, j, seen[k].detach(), g, policy, noise, constant=True
                    )
                    for j in n_critics
                ]  # fmt: skip
                norm_v = dpg_v = [self.normalized(x, g) for x in v]
                if c.lagged_critics and not self.scalar:
                    dpg_v = [
                        self.normalized(
                            self.value_of(
                                agent.critics.lagged, j, seen[k].detach(), g, policy,
                                self.policy_noise[i, k], constant=True,
                            ),
                            g,
                        )
                        for j in n_critics
                    ]  # fmt: skip
                if c.dpg_normalization == "mean_abs_q":
                    dpg_v = [self.popart[g].to_return(x) if self.scalar else x for x in v]
                if self.dpg_mask(i, k):
                    climbed[i, k, g] = min(dpg_v, key=plain)
                if not self.known(i, k):
                    continue
                action = self.shown(i, k)
                out = [
                    self.critic(agent.critics.online, j, seen[k], g, action, constant=False)
                    for j in n_critics
                ]
                q_sa = [self.number(x) for x in out]
                if c.filter.kind != "behavior_cloning" and c.filter.advantage == "raw":
                    gain = [a - b for a, b in zip(q_sa, v, strict=True)]
                else:
                    gain = [self.normalized(a, g) - b for a, b in zip(q_sa, norm_v, strict=True)]
                if c.value_expectile is not None:
                    slow = agent.critics.target
                    data_q = [
                        plain(self.critic(slow, j, seen[k], g, action, constant=True))
                        for j in n_critics
                    ]
                    goal, value = self.reduced(data_q, i, k, g), self.state_value(seen[k], g)
                    error = self.normalized(NOTHING + goal, g) - self.normalized(value, g)
                    tilt = c.value_expectile if plain(error) > 0 else 1 - c.value_expectile
                    if self.critic_mask(i, k):
                        terms["value"].append(tilt * error**2)
                    raw = c.filter.kind != "behavior_cloning" and c.filter.advantage == "raw"
                    gain = [goal - value if raw else error]
                    alone[i, k, g] = plain(self.normalized(NOTHING + goal, g))
                    baseline[i, k, g] = plain(self.normalized(value, g))
                else:
                    alone[i, k, g] = sum(plain(self.normalized(x, g)) for x in q_sa) / len(q_sa)
                    baseline[i, k, g] = sum(plain(x) for x in norm_v) / len(norm_v)
                if self.bc_mask(i, k):
                    advantages[i, k, g] = plain(sum(gain)) / len(gain)
                units = self.popart[g].to_return if self.scalar else (lambda x: x)
                result.values[i, k, g] = [plain(units(x)) for x in q_sa]
                if self.critic_mask(i, k):
                    terms["critic"].append(self._critic_error(out, result.targets[i, k, g], g))

        for (_, _, g), value in climbed.items():
            size = [abs(plain(x)) for (_, _, h), x in climbed.items() if h == g]
            unit = sum(size) / len(size) if c.dpg_normalization == "mean_abs_q" else 1.0
            terms["dpg"].append(-value / unit)
        if c.filter.kind != "behavior_cloning" and c.filter.n_step > 1:
            for i, k, g in advantages:
                value = self._value_of_actions(i, k, g, alone)
                p = self.popart[g]
                advantages[i, k, g] = p.normalize(value) - baseline[i, k, g]
                if c.filter.advantage == "raw" and p.enabled:
                    advantages[i, k, g] *= float(1 / p.w if self.scalar else p.sigma)
        result.advantages = dict(advantages)
        result.weights = self._weights(advantages)
        for i, k, g in every:
            if not self.bc_mask(i, k):
                continue
            policy = self.policy(own, states[i][0][k], i, k, g)
            soft = agent.sampled and self.space.kind == "discrete"
            log_prob = policy.log_prob(self.shown(i, k) if soft else self.action(i, k))
            result.log_probs[i, k, g] = plain(log_prob)
            terms["bc"].append(-result.weights.get((i, k, g), 1.0) * log_prob)

        weights = {"critic": c.critic_weight, "dpg": c.dpg_weight, "bc": c.bc_weight}
        weights["value"] = c.critic_weight if c.value_expectile is not None else 0.0
        for name, parts in terms.items():
            there = weights[name] > 0 and (agent.critics is not None or name == "bc")
            if there:
                result.terms[name] = sum(parts, NOTHING) / max(len(parts), 1)
                result.loss = result.loss + weights[name] * result.terms[name]
        return result

    @property
    def _discounts(self) -> range:
        return range(len(self.gammas))

    def _critic_error(self, out: list[Tensor], y: float, g: int) -> Tensor:
        if self.scalar:
            goal = self.popart[g].normalize(y)
            each = [(self.popart[g].to_normalized(x) - goal) ** 2 for x in out]
        else:
            label = slow_label(self.agent, y)
            each = [
                -sum((p * x for p, x in zip(label, logits.log_softmax(-1), strict=True)), NOTHING)
                for logits in out
            ]
        return sum(each, NOTHING) / len(each)

    def _value_of_actions(self, i: int, k: int, g: int, alone: dict[Place, float]) -> float:
        """n - 1 rewards and the value of the n-th action, as a return."""
        total, discount, last = 0.0, 1.0, k + self.c.filter.n_step - 1
        while k < last and self._followed(i, k):
            total += discount * float(self.batch.reward[i, k]) * self.c.reward_multiplier
            discount *= self.gammas[g]
            k += 1
        p = self.popart[g]
        return total + discount * (
            p.sigma * alone[i, k, g] + p.mean if p.enabled else alone[i, k, g]
        )

    def _followed(self, i: int, k: int) -> bool:
        """Whether transition k has its outcome and action, and transition k + 1, too."""
        return k + 1 < self.t and all(
            self.batch.mask[i, j]
            and self.known(i, j)
            and (self.batch.terminated[i, j] or self.batch.next_obs_valid[i, j])
            for j in (k, k + 1)
        )

    def _weights(self, advantages: dict[Place, float]) -> dict[Place, float]:
        if self.c.filter.kind == "behavior_cloning" or not advantages:
            return {}
        if self.c.filter.batch_norm:
            for g in self._discounts:
                mine = {key: a for key, a in advantages.items() if key[2] == g}
                mean = sum(mine.values()) / len(mine)
                variance = sum((a - mean) ** 2 for a in mine.values()) / len(mine)
                for key, a in mine.items():
                    advantages[key] = (a - mean) / math.sqrt(variance + 1e-10)
        return {key: slow_filter(self.agent, a) for key, a in advantages.items()}
