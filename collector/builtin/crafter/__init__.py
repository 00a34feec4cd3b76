"""Crafter with instructions: env.py is the environment, goals.py defines the possible goals.

The game, in world.py, is the package `crafter` (pip install 'stepwell[crafter]'). It is imported
only when the first environment is made.
"""
