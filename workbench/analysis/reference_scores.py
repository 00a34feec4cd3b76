"""D4RL's reference scores: what a return means on the scale where random is 0 and expert is 100.

Numbers as published in `d4rl/infos.py` of Farama-Foundation/D4RL (Fu et al., 2020); the maze2d v0
and maze2d-eval ones from `d4rl/pointmaze/__init__.py` there. v1 and v2 of the MuJoCo sets and v1 of
the Adroit sets reuse the numbers of v0. Not for anything that D4RL never scored: no score is
invented, the answer is None.
"""

import re

REFERENCE_SCORES: dict[str, tuple[float, float]] = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "antmaze": (0.0, 1.0),
    "kitchen": (0.0, 4.0),
    "pen": (96.262799, 3076.8331017826877),
    "hammer": (-274.856578, 12794.134825156867),
    "relocate": (-6.425911, 4233.877797728884),
    "door": (-56.512833, 2880.5693087298737),
    "minigrid-fourrooms": (0.01442, 2.89685),
    "maze2d-open-v0": (0.01, 20.66),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782),
    "maze2d-umaze-v0": (0.94, 62.6),
    "maze2d-medium-v0": (5.77, 85.14),
    "maze2d-large-v0": (4.83, 191.99),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002),
    "maze2d-eval-umaze-v1": (36.63, 141.4),
    "maze2d-eval-medium-v1": (13.07, 204.93),
    "maze2d-eval-large-v1": (16.4, 302.22),
    "bullet-halfcheetah": (-1275.766996, 2381.6725),
    "bullet-hopper": (20.058972, 1441.8059623430963),
    "bullet-ant": (373.705955, 2650.495),
    "bullet-walker2d": (16.523877, 1623.6476303317536),
    "flow-ring": (-165.22, 24.42),
    "flow-merge": (118.67993, 330.03179),
}
"""Environment family -> (min, max): the mean return of a random policy and of the reference expert.

Each maze2d entry is a separate family because each maze, reward and version was scored separately.
"""

# Whole-name patterns, so that a set of someone's own making that merely begins like one of D4RL's
# (`pen-...`, `maze2d-medium-selfmade`) is not scored by D4RL's numbers. Group 1 is the family.
_DATASET_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(halfcheetah|hopper|walker2d|ant)"
        r"-(?:random|medium|expert|medium-replay|full-replay|medium-expert)-v[012]",
        r"(antmaze)-(?:umaze|umaze-diverse|(?:medium|large)-(?:play|diverse))-v[02]",
        r"(kitchen)-(?:complete|partial|mixed)-v0",
        r"(pen|hammer|relocate|door)-(?:human|cloned|expert)-v[01]",
        r"(minigrid-fourrooms)(?:-random)?-v0",
        r"(bullet-(?:halfcheetah|hopper|ant|walker2d))"
        r"-(?:random|medium|expert|medium-replay|medium-expert)-v0",
        r"(flow-(?:ring|merge))-(?:random|controller)-v0",
    )
)

# Gymnasium's MuJoCo environments. Their physics is newer than D4RL's, so a score is near to, but
# not the same as, one measured in D4RL's own environment.
_GYMNASIUM_ID = re.compile(r"(HalfCheetah|Hopper|Walker2d|Ant)-v[2-5]")


def reference_family(env_or_dataset_id: str) -> str | None:
    """The key of REFERENCE_SCORES that scores this environment or dataset, or None.

    Example: `hopper-medium-replay-v2`, `Hopper-v5` and `hopper` are all scored as `hopper`.
    """
    if env_or_dataset_id in REFERENCE_SCORES:
        return env_or_dataset_id
    if match := _GYMNASIUM_ID.fullmatch(env_or_dataset_id):
        return match[1].lower()
    for pattern in _DATASET_NAMES:
        if match := pattern.fullmatch(env_or_dataset_id):
            return match[1]
    return None


def normalised_score(env_or_dataset_id: str, ret: float) -> float | None:
    """The return `ret` as 100 * (ret - min) / (max - min), or None where D4RL has no reference.

    Not clipped: worse than random is below 0, better than the expert above 100. Beware that
    `d4rl.get_normalized_score` and Minari give a hundredth of this number.
    """
    family = reference_family(env_or_dataset_id)
    if family is None:
        return None
    lowest, highest = REFERENCE_SCORES[family]
    # Divided first: the expert's own return is then 100 exactly.
    return 100.0 * ((ret - lowest) / (highest - lowest))
