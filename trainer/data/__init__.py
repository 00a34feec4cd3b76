"""From a snapshot to batches. The public function is `stream`; the trainer uses the parts.

for batch in trainer.data.stream("SELECT id FROM trajectories WHERE env = 'Hopper-v5'",
                                 window=64, batch=256):
    ...
"""

from trainer.data.streaming import stream

__all__ = ["stream"]
