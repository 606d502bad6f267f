"""Reinforcement learning: a trainer's log-probabilities have the bits that generation returned.

Holds: `forward` runs the engine's forward pass over the weights of a transformers model in training;
`gradients` its backward pass, in ordinary torch arithmetic; `batch` the sequences of padded and packed
batches; `alias` the model's modules over the same memory; `rollout` an engine over the model;
`seeds` those of answers; `trl` connects all of it to TRL's GRPOTrainer, and alone imports TRL.
State: a `TrainingForward` owns packed weights and KV pages of its own; the trainer's model is read and never
changed.
Imports: llm, engine, verify, execute, model, kernels, and the base modules.
"""

from samewise.rl.batch import TokenBatch
from samewise.rl.forward import Scores, TrainingForward, logprobs
from samewise.rl.rollout import llm_over
from samewise.rl.seeds import answer_seed

__all__ = ["Scores", "TokenBatch", "TrainingForward", "answer_seed", "llm_over", "logprobs"]
