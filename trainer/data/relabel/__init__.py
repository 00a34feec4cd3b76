"""Hindsight relabeling: whole trajectories are rewritten when they are drawn, before a window is
cut from them. docs/relabeling.md is the guide; examples/relabel_template.py is a template of a
custom relabeler."""

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
