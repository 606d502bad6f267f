"""Reinforcement learning: a trainer's log-probabilities have the bits that generation returned.

`logprobs` runs the engine's forward pass over the weights of a transformers model in training; its backward
pass is ordinary torch arithmetic. `samewise.rl.trl` connects both to TRL's GRPOTrainer.

A `TrainingForward` owns a copy of the packed weights and KV pages of its own; the trainer's model is read and
never changed. May import `llm` and everything below it; `samewise.rl.trl` alone imports TRL.
"""

from samewise.rl.batch import TokenBatch
from samewise.rl.forward import Scores, TrainingForward, logprobs
from samewise.rl.rollout import llm_over

__all__ = ["Scores", "TokenBatch", "TrainingForward", "llm_over", "logprobs"]
