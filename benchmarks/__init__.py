"""Measurements. Each program writes its result, with command, commit, machine and date."""
