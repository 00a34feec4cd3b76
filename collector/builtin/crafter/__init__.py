"""Crafter with instructions: env.py is the environment, goals.py what can be asked of it.

The game, in world.py, is the package `crafter` (pip install 'stepwell[crafter]'): imported when the
first environment is made, and not before.
"""
