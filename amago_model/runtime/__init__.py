"""How an update runs, not what it computes: compiling, optimiser step, memory."""
