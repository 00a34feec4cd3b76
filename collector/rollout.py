"""N environments, one actor: episodes out. The only file that knows gymnasium's autoreset modes.

A slot is the place of one environment among N. One slot, an episode of two steps, then the next:

    call to step   1      2          3           4
    DISABLED       o1     o2 end     o1'         o2'     reset in between, with a seed of ours
    NEXT_STEP      o1     o2 end     o0'         o1'     call 3 only resets: its action does nothing
    SAME_STEP      o1     o0' end    o1'         o2'     o2 hides in info["final_obs"]

All three become the same trajectory: o0 a0 r0 o1 a1 r1 o2. `EnvSlots` steps plain environments one
by one, which is DISABLED without a vector environment around it: every episode has its own seed and
one failing environment harms no other. `VectorSlots` takes a vector environment as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from collector.actor import Actor, Seen
from collector.envs import Arrays, BrokenEnv, Env, Interface
from collector.exploration import Exploration
from collector.recorder import BROKEN, INTERRUPTED, MAX_STEPS, Episode, Recorder, Sink
from stepwell._plugins import told
from stepwell.trajectory import About

MAX_BREAKS = 10
"""Failures in a row, without one good step between, after which an environment is given up."""


@dataclass(frozen=True, slots=True)
class Began:
    """The first observation of an episode."""

    obs: Arrays
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an action led to. `obs` is the true one after it, also at the end of an episode; None
    where a vector environment lost it."""

    obs: Arrays | None
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Broke:
    """The environment raised, or answered what cannot be."""

    error: str


Event = Began | Stepped | Broke


class Slots(Protocol):
    """N environments. Each call answers for each slot asked, with what happened, in order."""

    interface: Interface
    count: int
    resets_itself: bool
    """Whether the next episode begins by itself, at a moment and with a seed not ours."""

    def begin(self, seeds: Mapping[int, int | None]) -> dict[int, Event]:
        """Reset the slots named, each with its seed."""
        ...

    def step(self, actions: Arrays, slots: Sequence[int]) -> dict[int, list[Event]]:
        """`actions` [N, *shape]; only `slots` count."""
        ...

    def rebuild(self, slot: int) -> None:
        """Throw a broken environment away and make another."""
        ...

    def close(self) -> None: ...


class EnvSlots:
    """N environments of our own making, stepped one after the other in this process."""

    resets_itself = False

    def __init__(self, make: Callable[[], Env], envs: Sequence[Env], interface: Interface):
        self._make, self._envs, self.interface = make, list(envs), interface
        self.count = len(self._envs)

    def begin(self, seeds: Mapping[int, int | None]) -> dict[int, Event]:
        return {slot: self._reset(slot, seed) for slot, seed in seeds.items()}

    def _reset(self, slot: int, seed: int | None) -> Event:
        try:
            obs, info = self._envs[slot].reset(seed=seed)
            return Began(self.interface.observe(obs), info if isinstance(info, Mapping) else {})
        except Exception as error:  # whatever a stranger's environment raises
            return Broke(f"reset(seed={seed}) failed: {told(error)}")

    def step(self, actions: Arrays, slots: Sequence[int]) -> dict[int, list[Event]]:
        return {
            slot: [self._step(slot, {k: a[slot] for k, a in actions.items()})] for slot in slots
        }

    def _step(self, slot: int, action: Arrays) -> Event:
        try:
            answer = self._envs[slot].step(self.interface.native_action(action))
            obs, reward, terminated, truncated, info = answer
            return _stepped(self.interface, obs, reward, terminated, truncated, info)
        except Exception as error:  # whatever a stranger's environment raises
            return Broke(f"step failed: {told(error)}")

    def rebuild(self, slot: int) -> None:
        try:
            self._envs[slot].close()
        except Exception:  # noqa: S110 - it is broken; that closing fails too is no news
            pass
        self._envs[slot] = self._make()

    def close(self) -> None:
        for env in self._envs:
            env.close()


class VectorSlots:
    """A gymnasium vector environment in any autoreset mode.

    Its failures cannot be told apart by slot, so they raise `BrokenEnv`. Where it resets by itself,
    only the first episode of each slot has a seed.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], interface: Interface):
        self._env, self.interface, self.count = env, interface, env.num_envs
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise BrokenEnv(
                f"{interface.env_id}: metadata['autoreset_mode'] is {mode!r}; set it to one of "
                "gymnasium.vector.AutoresetMode, or where an episode ends is guesswork"
            )
        self._mode = mode
        self.resets_itself = mode is not AutoresetMode.DISABLED
        self._ended = np.zeros(self.count, np.bool_)
        self._started = False

    def begin(self, seeds: Mapping[int, int | None]) -> dict[int, Event]:
        options: dict[str, Any] | None = None
        if self._started:
            assert not self.resets_itself, "a vector environment that resets itself is begun once"
            options = {"reset_mask": np.array([i in seeds for i in range(self.count)])}
        self._started = True
        obs, infos = self._env.reset(
            seed=[seeds.get(i) for i in range(self.count)],  # type: ignore[arg-type]
            options=options,
        )
        self._ended[list(seeds)] = False
        rows = list(iterate(self._env.observation_space, obs))
        return {i: Began(self.interface.observe(rows[i]), _info_of(infos, i)) for i in seeds}

    def step(self, actions: Arrays, slots: Sequence[int]) -> dict[int, list[Event]]:
        if self._mode is AutoresetMode.DISABLED:
            # Gymnasium refuses to step an ended episode, and steps all: so idle slots play too.
            idle = [i for i in range(self.count) if self._ended[i]]
            if idle:
                self.begin(dict.fromkeys(idle))
        native = [
            self.interface.native_action({k: a[i] for k, a in actions.items()})
            for i in range(self.count)
        ]
        single = self._env.single_action_space
        room = create_empty_array(single, self.count)
        batch = concatenate(single, native, room)  # type: ignore[arg-type]
        obs, rewards, terminated, truncated, infos = self._env.step(batch)
        rows = list(iterate(self._env.observation_space, obs))
        began, self._ended = self._ended, terminated | truncated
        return {
            i: self._events(i, rows[i], rewards[i], terminated[i], truncated[i], infos, began[i])
            for i in slots
        }

    def _events(
        self,
        slot: int,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        infos: dict[str, Any],
        had_ended: bool,
    ) -> list[Event]:
        info, face = _info_of(infos, slot), self.interface
        if self._mode is AutoresetMode.NEXT_STEP and had_ended:
            return [Began(face.observe(obs), info)]
        if self._mode is AutoresetMode.SAME_STEP and (terminated or truncated):
            final_obs, final_info = info.pop("final_obs"), info.pop("final_info", {})
            last = _stepped(face, final_obs, reward, terminated, truncated, final_info)
            began = Began(face.observe(obs), info)
            # Gymnasium keeps a reference, so an environment that writes into one buffer has
            # overwritten its final observation by now: then it is lost, and must not be invented.
            if last.obs is not None and _equal(last.obs, began.obs):
                last = replace(last, obs=None)
            return [last, began]
        return [_stepped(face, obs, reward, terminated, truncated, info)]

    def rebuild(self, slot: int) -> None:
        raise BrokenEnv(f"{self.interface.env_id}: slot {slot} of a vector environment broke")

    def close(self) -> None:
        self._env.close()


def _stepped(
    interface: Interface,
    obs: Any,
    reward: Any,
    terminated: Any,
    truncated: Any,
    info: Mapping[str, Any],
) -> Stepped:
    number = float(reward)
    if not abs(number) <= np.finfo(np.float32).max:
        raise BrokenEnv(f"the reward is {number}; a finite float32 is needed")
    info = info if isinstance(info, Mapping) else {}
    return Stepped(interface.observe(obs), number, bool(terminated), bool(truncated), info)


def _equal(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def _info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """One environment's info out of a vector environment's (which masks each key by "_key")."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if (key.startswith("_") and key[1:] in infos) or (mask is not None and not mask[slot]):
            continue
        if isinstance(value, Mapping):
            found[key] = _info_of(value, slot)
        else:
            found[key] = value[slot] if isinstance(value, np.ndarray | list | tuple) else value
    return found


class Rollout:
    """Plays episodes in all slots; `step` is one action in each.

    `seeds` says how many episodes there will be and how each is reset: when it is exhausted, slots
    fall idle as their episodes end, and `done` is true when all have. One episode, one author: the
    actor is asked for its newest policy only where an episode begins.
    """

    def __init__(
        self,
        slots: Slots,
        actor: Actor,
        *,
        seeds: Iterator[int | None],
        sink: Sink,
        about: About | None = None,
        exploration: Exploration | None = None,
        max_steps: int = MAX_STEPS,
    ):
        self._slots, self._actor, self._seeds, self._exploration = slots, actor, seeds, exploration
        self._face, n = slots.interface, slots.count
        about = about or About(env=slots.interface.env_id)
        self._recorders = [
            Recorder(self._face.spec, about, sink, max_steps=max_steps, slot=i) for i in range(n)
        ]
        self.seen = Seen.blank(self._face.spec, n)
        self.steps = 0
        """Transitions played, all slots together."""
        self.broken = 0
        """How often an environment failed."""
        self.last_error = ""
        """How it failed last."""
        self._waiting = set(range(n))
        self._begun = 0
        self._breaks = [0] * n
        self._exhausted = False
        self._started = False

    @property
    def done(self) -> bool:
        """Whether no episode runs and none will begin."""
        return self._exhausted and not any(r.running for r in self._recorders)

    def step(self) -> list[Episode]:
        """One action everywhere; the episodes that ended, in order of slots."""
        self._begin_waiting()
        ended: list[Episode] = []
        # Between two episodes of an environment that resets itself, a step is what begins the next.
        resetting = self._slots.resets_itself and not self._exhausted
        playing = [i for i, r in enumerate(self._recorders) if r.running or resetting]
        if not playing:
            return ended
        self.seen.playing[:] = [r.running for r in self._recorders]
        actions = self._actor.act(self.seen)
        if self._exploration is not None:
            actions = self._exploration.apply(actions, self.seen)
        actions = self._face.legal(actions)
        for slot, events in self._slots.step(actions, playing).items():
            action = {k: a[slot].copy() for k, a in actions.items()}
            for event in events:
                if (episode := self._handle(slot, action, event)) is not None:
                    ended.append(episode)
        return ended

    def interrupt(self) -> list[Episode]:
        """Stop now: what runs becomes truncated trajectories tagged "interrupted"."""
        self._exhausted, self._waiting = True, set()
        cut = [recorder.cut(INTERRUPTED) for recorder in self._recorders]
        return [episode for episode in cut if episode is not None]

    def finish(self) -> None:
        """Begin no further episode; those that run may end."""
        self._exhausted, self._waiting = True, set()

    def _begin_waiting(self) -> None:
        """Begin an episode in every slot that waits for one, while there are any."""
        if self._slots.resets_itself and self._started:
            return
        seeds: dict[int, int | None] = {}
        for slot in sorted(self._waiting):
            if not self._exhausted:
                self._take_seed(slot, seeds)
        self._started = True
        if not seeds:
            return
        for slot, event in self._slots.begin(seeds).items():
            self._waiting.discard(slot)
            if isinstance(event, Began):
                self._begin(slot, event, seeds[slot])
            else:
                assert isinstance(event, Broke)
                self._broke(slot, event)

    def _take_seed(self, slot: int, seeds: dict[int, int | None]) -> None:
        try:
            seeds[slot] = next(self._seeds)
        except StopIteration:
            self._exhausted, self._waiting = True, set()

    def _begin(self, slot: int, event: Began, seed: int | None) -> None:
        self._actor.begin(slot, seed)
        if self._exploration is not None:
            self._exploration.begin(slot)
        self.seen.begin(slot, event.obs)
        self._recorders[slot].begin(
            event.obs,
            index=self._begun,
            seed=seed,
            author=self._actor.author(slot),
            info=event.info,
        )
        self._begun += 1

    def _handle(self, slot: int, action: Arrays, event: Event) -> Episode | None:
        recorder = self._recorders[slot]
        if isinstance(event, Began):
            seeds: dict[int, int | None] = {}
            if not self._exhausted:
                self._take_seed(slot, seeds)
            if slot in seeds:
                self._begin(slot, event, None)  # it has reset itself: no seed of ours was used
            return None
        if isinstance(event, Broke):
            return self._broke(slot, event)
        if not recorder.running:
            return None
        self._breaks[slot] = 0
        self.steps += 1
        if event.obs is not None:
            self.seen.step(slot, action, event.reward, event.obs)
        episode = recorder.append(
            action, event.reward, event.obs, event.terminated, event.truncated, event.info
        )
        if episode is not None and not self._exhausted and not self._slots.resets_itself:
            self._waiting.add(slot)
        return episode

    def _broke(self, slot: int, event: Broke) -> Episode | None:
        episode = self._recorders[slot].cut(BROKEN, event.error)
        self._breaks[slot] += 1
        self.broken, self.last_error = self.broken + 1, event.error
        if self._breaks[slot] >= MAX_BREAKS:
            raise BrokenEnv(
                f"{self._face.env_id} failed {MAX_BREAKS} times in a row without one step; "
                f"last: {event.error}"
            )
        self._slots.rebuild(slot)
        if not self._exhausted:
            self._waiting.add(slot)
        return episode
