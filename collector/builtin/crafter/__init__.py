"""Crafter with instructions: env.py is the environment, goals.py defines the possible goals.

world.py adapts the game of the package `crafter` (pip install 'stepwell[crafter]'). The package is
imported only when the first environment is made.
"""
