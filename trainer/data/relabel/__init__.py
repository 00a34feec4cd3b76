"""Hindsight relabeling: whole trajectories are modified when they are sampled, before a window is
cut from them. The guide is docs/reference/relabeling.md; examples/relabel_template.py is a template
for a custom relabeler."""

from trainer.data.relabel.episode import Episode
from trainer.data.relabel.hindsight import Hindsight
from trainer.data.relabel.instructions import CrafterGoals, Instructions, MazeRunnerGoals
from trainer.data.relabel.registry import Relabeler, make_relabelers, register, registered

__all__ = [
    "CrafterGoals",
    "Episode",
    "Hindsight",
    "Instructions",
    "MazeRunnerGoals",
    "Relabeler",
    "make_relabelers",
    "register",
    "registered",
]
