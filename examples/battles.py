"""Data of metamon's shape, made here: battles of two teams, of which an observation is a text, some
numbers and the legal actions, and in which some actions are unknown.

    stepwell serve --data ./data
    python examples/battles.py --dataset battles
    stepwell run examples/15_battles.toml --url http://127.0.0.1:8000
    python examples/battles.py --dataset battles --check battle-v0

metamon (Grigsby et al., 2025) learns Pokémon battles from reconstructed replays of people, and from
battles of its own policies. This game has the shape of its data, not its difficulty: three fighters
each, of kinds that beat each other in a circle; the first four actions are moves, the others switch
to a fighter. Three sources are told apart by their tags:

    ladder-low    people who often act at random; a fifth of their actions are unknown
    ladder-high   people who rarely do; a fifth of their actions are unknown, too
    self-play     a rule of our own, of which every action is known

An action is unknown where a replay does not show it: it has `action_known` false and no policy
imitates it; critics that need it leave it out. An illegal action is a lost turn, and is counted
in the metric `illegal`; the last command fails unless a policy that samples has none.
"""

import argparse
import sys
from dataclasses import replace

import gymnasium
import numpy as np

import stepwell
from collector.interface import interface_of
from collector.texts import WordSpace
from stepwell import Client, Trajectory

KINDS = ("water", "fire", "grass")
"""Each beats the next one."""
FIGHTERS, MOVES = 3, 4
ACTIONS = MOVES + FIGHTERS
POWER = {"strike": 0.2, "element": 0.25, "blast": 0.5, "rest": 0.0}
LONGEST = 60
USES = (LONGEST, 20, 3, 3)
"""How often each move may be made in a battle; a strike always, so that some action is legal."""


class Battle(gymnasium.Env):
    """A battle against an opponent that draws a legal action. Reward: 100 for a win and -100 for a
    loss, and 3 for each fighter's worth of damage, so that returns are between -109 and 109."""

    metadata = {"render_modes": [], "roles": {"legal": "mask"}, "partially_observable": True}

    observation_space = gymnasium.spaces.Dict(
        {
            "text": WordSpace([*KINDS, "mine", "foe", "fainted", "begin", *POWER, "switch"], 8),
            "numbers": gymnasium.spaces.Box(0.0, 1.0, (FIGHTERS + MOVES + 1,), np.float32),
            "legal": gymnasium.spaces.MultiBinary(ACTIONS),
        }
    )
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.kinds = self.np_random.integers(len(KINDS), size=(2, FIGHTERS))
        self.health = np.ones((2, FIGHTERS))
        self.uses = np.tile(USES, (2, 1))
        self.active, self.turn, self.illegal, self.seen = [0, 0], 0, 0, "begin"
        return self._observe(), {}

    def legal(self, side):
        """[ACTIONS] bool: moves that are left to a fighter that stands, and switches to others."""
        stands = self.health[side] > 0
        others = stands & (np.arange(FIGHTERS) != self.active[side])
        moves = (self.uses[side] > 0) & stands[self.active[side]]
        return np.concatenate((moves, others))

    def step(self, action):
        before = self.health.sum(axis=1)
        if self.legal(0)[action]:
            self._act(0, int(action))
        else:
            self.illegal += 1
        if self.health[1].any():
            foe = int(self.np_random.choice(np.flatnonzero(self.legal(1))))
            self._act(1, foe)
            self.seen = [*POWER, *["switch"] * FIGHTERS][foe]
        self.turn += 1
        mine, foes = before - self.health.sum(axis=1)
        won, lost = not self.health[1].any(), not self.health[0].any()
        reward = 3.0 * (foes - mine) + 100.0 * (float(won) - float(lost))
        over = won or lost
        info = {"log/illegal": float(self.illegal), "is_success": won} if over else {}
        return self._observe(), reward, over, self.turn >= LONGEST and not over, info

    def _act(self, side, action):
        if action >= MOVES:
            self.active[side] = action - MOVES
            return
        self.uses[side, action] -= 1
        move = [*POWER][action]
        if move == "rest":
            own = self.active[side]
            self.health[side, own] = min(1.0, self.health[side, own] + 0.4)
            return
        target = self.active[1 - side]
        damage = self.damage(side, action)
        self.health[1 - side, target] = max(0.0, self.health[1 - side, target] - damage)

    def damage(self, side, action):
        """Of a move; a strike has no kind."""
        name = [*POWER][action]
        mine, theirs = (self.kinds[i, self.active[i]] for i in (side, 1 - side))
        factor = (1.0, 2.0, 0.5)[(theirs - mine) % 3] if name != "strike" else 1.0
        return factor * POWER[name]

    def _observe(self):
        mine = [
            KINDS[kind] if health > 0 else "fainted"
            for kind, health in zip(self.kinds[0], self.health[0], strict=True)
        ]
        active = KINDS[self.kinds[1, self.active[1]]]
        numbers = (*self.health[0], *self.uses[0] / USES, self.health[1, self.active[1]])
        return {
            "text": " ".join(["mine", *mine, "foe", active, self.seen]),
            "numbers": np.array(numbers, np.float32),
            "legal": self.legal(0).astype(np.int8),
        }


gymnasium.register("Battle-v0", Battle)


def good_action(battle):
    """A rule: the move that does the most damage; against a foe that beats the active fighter, a
    switch to one that beats it."""
    legal = battle.legal(0)
    foe = battle.kinds[1, battle.active[1]]
    by_kind = (foe - battle.kinds[0]) % 3  # 1: beats the foe, 2: is beaten
    moves = [action for action in range(MOVES) if legal[action]]
    switches = [action for action in range(MOVES, ACTIONS) if legal[action]]
    if not moves or by_kind[battle.active[0]] == 2:
        strong = [action for action in switches if by_kind[action - MOVES] == 1]
        if strong or not moves:
            return (strong or switches)[0]
    return max(moves, key=lambda action: battle.damage(0, action))


def play(env, interface, seed, mistakes, unknown):
    """One battle as arguments of a `Trajectory`; the player acts at random with the probability
    `mistakes`, and actions are unknown with the probability `unknown`."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    rows, actions, rewards = [interface.encode_observation(obs)], [], []
    done = False
    while not done:
        action = good_action(env.unwrapped)
        if rng.random() < mistakes:
            action = int(rng.choice(np.flatnonzero(env.unwrapped.legal(0))))
        obs, reward, terminated, truncated, info = env.step(action)
        rows.append(interface.encode_observation(obs))
        actions.append(action)
        rewards.append(reward)
        done = terminated or truncated
    known = rng.random(len(actions)) >= unknown
    return {
        "obs": {key: np.stack([row[key] for row in rows]) for key in rows[0]},
        "actions": np.where(known, actions, 0),  # what stands for an unknown one is not read
        "action_known": known,
        "rewards": rewards,
        "terminated": terminated,
        "truncated": truncated,
        "success": bool(info.get("is_success", False)),
        "seed": seed,
    }


SOURCES = {  # tag: (share of random actions, share of unknown actions)
    "ladder-low": (0.7, 0.2),
    "ladder-high": (0.1, 0.2),
    "self-play": (0.3, 0.0),
}


def make_data(client, dataset, battles):
    """`battles` of each source, and a table of what is there."""
    env = gymnasium.make("Battle-v0", disable_env_checker=True)
    interface = interface_of(env, "examples.battles:Battle-v0")
    spec = replace(interface.spec, action_known=True)  # its trajectories say which actions are
    client.create_dataset(dataset, spec, exist_ok=True)
    for number, (tag, (mistakes, unknown)) in enumerate(SOURCES.items()):
        played = [
            play(env, interface, number * 1_000_000 + i, mistakes, unknown) for i in range(battles)
        ]
        trajectories = [
            Trajectory.from_arrays(**one, spec=spec, env=interface.env_id, policy=tag, tags=[tag])
            for one in played
        ]
        client.post(dataset, trajectories, spec=spec, wait_sealed=True)
    query = """
        SELECT tags[1], count(*), avg("length"), avg("return"), avg(success::INT)
        FROM trajectories WHERE dataset = ? AND purpose = 'train' GROUP BY 1 ORDER BY 1"""
    for tag, count, length, total, won in client.sql(query, [dataset]):
        print(f"{tag:12} {count} battles of {length:.1f} turns, return {total:.1f}, {won:.0%} won")


def check(policy, battles=20):
    """Play with a policy that samples its actions; fail if one of them was illegal."""
    env, illegal, won = gymnasium.make("Battle-v0", disable_env_checker=True), 0.0, 0
    interface = interface_of(env, "examples.battles:Battle-v0")
    for seed in range(5_000_000, 5_000_000 + battles):
        obs, _ = env.reset(seed=seed)
        policy.reset()
        reward, done = 0.0, False
        while not done:
            action = policy.act(interface.encode_observation(obs), reward)
            obs, reward, terminated, truncated, info = env.step(action)
            done = terminated or truncated
        illegal, won = illegal + env.unwrapped.illegal, won + bool(info.get("is_success"))
    print(f"{battles} battles with sampled actions: {won} won, {illegal:.0f} illegal actions")
    return illegal == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="battles", help="(default: %(default)s)")
    parser.add_argument("--battles", type=int, default=1000, help="of each source (%(default)s)")
    parser.add_argument("--check", metavar="RUN", help="make no data, but play with its policy")
    args = parser.parse_args()
    with Client() as client:
        if args.check:
            policy = stepwell.load_policy(args.check, client=client, sample=True)
            sys.exit(0 if check(policy) else 1)
        make_data(client, args.dataset, args.battles)
