"""Benchmarks. Each program writes its results with command, commit, machine and date."""
