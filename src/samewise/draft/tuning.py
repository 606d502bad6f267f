"""Every hand-set constant of drafting, with its unit, why it has this value, and how the value was found.

None of them can change the output: they only decide when and how far drafts go. Users do not set them; tests
and experiments pass a `Tuning` to `Engine`. Where no way of finding a value is named, it was set by hand and
not measured against others. Host only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samewise.errors import BadParameter
from samewise.types import RESYNC_TOKENS


@dataclass(frozen=True, slots=True)
class CostModelTuning:
    """Measured seconds and measured acceptance (cost_model.py)."""

    # Weight of a new measurement in the moving average of a cost. Follows a change in about ten measurements.
    sample_weight: float = 0.2
    # A measurement above this multiple of the average is taken for a disturbance (another process ran) ...
    outlier_factor: float = 4.0
    # ... and gets this weight: a lasting change is still followed, in some hundred measurements.
    outlier_weight: float = 0.01
    # First measurements of a size of which the lowest is kept: they may include compiling or page faults.
    num_first_samples: int = 4
    # Frame sizes with decode rows that are enough to fit a line without frames that read prompts.
    min_sizes_for_fit: int = 3
    # Measurements at which a size's own average weighs as much as the fitted line. On an H200 frames of 32
    # rows take 8 % more than a line through 1 and 128 rows says.
    line_samples: float = 8.0
    # Frames after each of which costs are computed anew, and the interval afterwards: it takes 20 µs.
    quick_samples: int = 64
    refit_every: int = 16

    # Trials over which an acceptance rate fades. About twelve drafts of sixteen tokens.
    rate_memory: float = 200.0
    # The same for the rates of one sequence, which is shorter than a workload.
    sequence_rate_memory: float = 40.0
    # Bins of confidence in a Calibration, and the trials that a rate known beforehand counts for.
    confidence_bins: int = 12
    # Trials over which each bin of a Calibration fades.
    calibration_memory: float = 100.0


@dataclass(frozen=True, slots=True)
class SuffixTuning:
    """Suffix tries (suffix_counts.py). Values were compared with bench/drafts.py."""

    # Longest context with counts, in tokens. 4, 6, 8 and 16 bring the same tokens per frame within 0.3 %; a
    # match that goes on in one place only is followed further without cost.
    max_context: int = 4
    # Next tokens of a context that are kept in order. 2 to 8 bring the same tokens per frame within 0.2 %.
    max_successors: int = 3
    # Entries of all stored texts together: tokens, and their counts after contexts. On recorded text a token
    # makes 2.8 entries and an entry takes 31 bytes of host memory (82 without a compiler): 180 thousand
    # tokens in 16 MB.
    store_entries: int = 500_000
    # Pools (cache salts) kept at once; the least recently used is dropped first.
    max_pools: int = 64
    # Last tokens of a request that are stored: storing takes 0.3 µs per token while a request ends.
    stored_tokens: int = 4096
    # Last tokens of a prompt, and first tokens of a prediction, that are indexed: 3 MB at most for each. An
    # answer is indexed whole.
    indexed_tokens: int = 32_768
    # Tokens of new texts that are indexed in one step, while the device computes: about 1 ms in C++, 0.3 to
    # 0.5 µs each; in Python ten times that. A longer text gets its first tree some steps later.
    tokens_per_step: int = 2048
    # Last tokens of an answer that must occur in the caller's prediction to find the place in it again.
    min_resync: int = RESYNC_TOKENS


@dataclass(frozen=True, slots=True)
class EstimateTuning:
    """Learning how likely candidates are (estimates.py). Values were compared with bench/drafts.py."""

    # Step of Adagrad, in log-odds. 0.3 to 0.8 bring the same tokens per frame within 0.3 %; 0.1 loses 1 %.
    step: float = 0.5
    # Squared gradients to begin with, in units of one certain mistake ...
    first_squares: float = 1.0
    # ... and at most: the steps stay large enough to follow another kind of text.
    max_squares: float = 400.0


@dataclass(frozen=True, slots=True)
class TreeTuning:
    """Growing trees (tree.py, tree_drafter.py). Values were compared with bench/drafts.py."""

    # A node is expanded once nothing in the heap exceeds this share of its probability. About what the best
    # child of a node has on average. At 1.0 half of the nodes are expanded for nothing: a tree of 16 costs
    # 1.7 times as much and brings no more.
    patience: float = 0.4
    # Nodes after which growing looks whether any further node can pay. Set by hand; nodes grown in vain are
    # fewer than this, and are cut off again.
    check_nodes: int = 8
    # Candidates of a row used below the root; all 8 bring no more.
    deep_ranks: int = 3
    # Committed rows whose runners-up are candidates. One row brings 1 % less, three bring no more.
    num_rows: int = 2
    # Bytes of all tables of recycled candidates, one for each cache salt: 32 bytes per token of the
    # vocabulary, 5 MB for 152 thousand tokens, so that 27 salts of such a model can run at once; the least
    # recently used is dropped first. Set by hand: what a server with a key for each user can spare. In C++ a
    # page of memory is taken when its first row is written.
    table_bytes: int = 128 * 2**20
    # Without `auto`: the least probability of a drafted node, and the most nodes.
    min_prob: float = 0.03
    max_nodes: int = 16
    suffixes: SuffixTuning = field(default_factory=SuffixTuning)
    estimates: EstimateTuning = field(default_factory=EstimateTuning)


@dataclass(frozen=True, slots=True)
class ModelTuning:
    """The draft model (model.py)."""

    # Rows of one pass that reads committed tokens, and rows read in one step before it drafts: a long prompt
    # is read in pieces between other work. On a CPU time grows with the rows, on CUDA hardly up to 256.
    cpu_pass_rows: int = 64
    cpu_read_rows: int = 64
    cuda_pass_rows: int = 256
    cuda_read_rows: int = 1024
    # Alternatives of a drafted token that may become leaves of the draft's tree.
    num_alternatives: int = 3
    # Probability above which, on a CPU, a greedy token's alternatives are not computed: ranking takes longer.
    sure_probability: float = 0.95
    # Chance of being reached and right below which a token is left out of the draft, even in a padding row.
    min_chance: float = 0.02
    # Acceptance of a drafted token before anything was measured, and the trials it counts for.
    prior_chance: float = 0.75
    prior_trials: float = 8.0
    # Acceptance of the first alternative of a rejected token before anything was measured (of the second
    # half of it, and so on), and the trials it counts for.
    alternative_prior: float = 0.4
    alternative_prior_trials: float = 2.0
    # Passes of a draft until a pass was timed.
    untimed_passes: int = 4

    # Without `auto`: steps with drafts over which their throughput is measured; older ones fade.
    throughput_steps: float = 32.0
    # Steps with drafts before they may be found not to pay.
    min_steps: int = 16
    # Throughput with drafts, as a multiple of that without, below which drafting pauses: estimates are a few
    # percent off.
    min_speedup: float = 0.97
    # Frames of the first pause; each further pause in a row is twice as long, up to the longest.
    pause_frames: int = 64
    max_pause_frames: int = 2048
    # A change of the number of live sequences by this factor ends a pause.
    live_factor: float = 2.0

    # Share of free memory for the draft model's KV where `kv_memory` is not set.
    kv_share: float = 0.1


@dataclass(frozen=True, slots=True)
class AutoTuning:
    """What `auto` asks of drafts before it pays for them (auto/)."""

    # Throughput a drafter must promise, as a multiple of not drafting: estimates are a few percent off.
    min_speedup: float = 1.05
    # Multiple of its row's price that a node must bring: the nodes that look best are overestimated most.
    price_factor: float = 1.15
    # Nodes per sequence while no frame was timed.
    untimed_nodes: int = 4
    # Accepted nodes, expected and found alike, that what trees bring is taken to have begun with ...
    brought_prior: float = 20.0
    # ... and expected nodes over which it fades.
    brought_memory: float = 400.0
    # The most that a node is taken to bring beyond its estimate.
    max_brought: float = 1.25
    # Acceptance of a drafter before anything was measured, and the trials it counts for: optimistic, so that
    # it is tried, and soon outweighed.
    drafter_prior: float = 0.85
    drafter_prior_trials: float = 4.0
    # Weight of one step in the average of what trees bring, which a drafter has to beat. About 20 steps.
    trees_weight: float = 0.05
    # Steps after which a drafter that did not pay is tried again: at most one trial in 400 steps is lost.
    retry_steps: int = 400
    # The same for a drafter whose pass was never timed; the first pass of a size is not timed.
    retry_steps_untimed: int = 8
    # Steps before a drafter that pays on average, but got no sequence because each one's tree promised more,
    # is asked for again: till then frames are follow-ups, and at most one in so many takes the slower loop.
    # Set by hand.
    retry_assign_steps: int = 32
    # Tokens of a trial draft.
    trial_tokens: int = 4
    # Sequences of a trial. Trials of all 32 sequences of a 1.5B model on an H200 took 14 % of a run of half a
    # second: their texts were read first, and of each other number of sequences the first pass is not timed.
    trial_sequences: int = 2
    # Steps that a chosen drafter may take until its first draft (a draft model reads the prompt first).
    max_wait_steps: int = 32
    # Trials at which a sequence's own acceptance weighs as much as that of all sequences.
    own_rate_trials: float = 12.0

    # Frames for which `auto` is not asked after it had nothing to propose, where the device runs beside the
    # host. Trees that would pay end the pause earlier; so does a new sequence with a drafter ready.
    pause_frames: int = 96
    # Frames of a pause after which trees are grown to see whether they would pay.
    probe_frames: int = 4
    # Nodes of each of these trees, at most.
    probe_nodes: int = 16
    # Weight of a frame in the average of what asking brings. Follows a change of text in about ten frames.
    advantage_weight: float = 0.1
    # Tokens per second with asking over those without that end a pause; at 1 and below a pause begins.
    wake_advantage: float = 1.03
    # Sequences whose rows and text are followed during a pause, at most: 5 µs each, while the device
    # computes. With more, their texts are read when the pause ends.
    max_followed: int = 48


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadParameter(f"{name}={value!r}: give a whole number from {low} to {high}", param=name)


@dataclass(frozen=True, slots=True)
class SearchTuning:
    """The layer-set search, SWIFT's phase 1 (skip/search.py, skip/optimiser.py)."""

    # Committed tokens between two scores.
    every: int = 16
    # Share of the time that scoring may take.
    share: float = 0.02
    # Scores after which the search ends.
    rounds: int = 64
    # Seconds: a first round (`min_rounds` scores) that takes no longer in all does not wait until its share
    # of the time was saved; later steps wait longer. Some passes of a GPU; on a CPU a round takes longer.
    max_first_round: float = 0.06
    # Scores without a better set after which the search ends.
    patience: int = 24
    # Rows of a scoring pass: committed tokens that a candidate is scored on, at most.
    window: int = 64
    # Sets that share a scoring pass on CUDA, each with a window of rows: the pass reads the weights once for
    # all of them. More sets would be scored at once without learning from each other.
    batch: int = 4
    # The same on a CPU, where each row costs, and a pass for one set saves the time of what it skips.
    cpu_batch: int = 1
    # Tokens to score on below which no score is taken.
    min_targets: int = 24

    # -log(agreement) that one skipped sublayer is believed to cost before anything is known, and the standard
    # deviation of that belief. Checked with bench/search.py: after 40 rounds 82 % of the possible gain where
    # all sublayers lose about alike, none where one in five matters; there the hint below is needed.
    prior_loss: float = 0.15
    prior_loss_std: float = 0.3
    # With a hint (the share that a sublayer adds to the residual stream): loss = slope * share + loss floor,
    # standard deviation = slope * share + deviation floor. Checked with bench/search.py, where hints are off
    # by a factor of two: after 5 rounds 99 % and 84 % of the possible gain in these two cases.
    hint_slope: float = 0.5
    hint_loss_floor: float = 0.001
    hint_std_floor: float = 0.004
    # Variance of a score beyond that of its trials, in -log(agreement) squared: losses only nearly add up.
    model_variance: float = 0.01
    # Chance that an unguided candidate is the incumbent with one to `max_flips` sublayers changed; else it is
    # drawn at random.
    mutation_chance: float = 0.5
    max_flips: int = 3
    # Scores before the search may end because nothing better is believed possible: SWIFT's round of 24 sets
    # between two of its Bayesian model ...
    min_rounds: int = 24
    # ... which is when the incumbent has this share of the throughput believed possible.
    good_enough: float = 0.98
    # Throughput by which a candidate must exceed the incumbent: scores are estimates.
    min_gain: float = 1.01

    # A search that found nothing is tried again after so many committed tokens, then after twice as many ...
    retry_tokens: int = 4096
    # ... up to this.
    max_retry_tokens: int = 2**20
    # Factor on the price of a frame over the window, for a scoring step that was never timed.
    first_step_factor: float = 1.5
    # Seconds: longer gaps between steps are idle time and add nothing to the time that may be spent.
    max_gap: float = 1.0

    # Rows of one piece of text to score on, in KV pages.
    piece_pages: int = 2
    # Ended answers whose last tokens are kept to score on.
    recent_answers: int = 8
    # Paths through the model (one per layer set) kept for the next score: incumbent, candidates, full model.
    max_paths: int = 6

    def __post_init__(self) -> None:
        _whole("search.every", self.every, 1, 10**9)
        _whole("search.rounds", self.rounds, 1, 10**6)
        _whole("search.window", self.window, 32, 4096)
        _whole("search.batch", self.batch, 1, 64)
        _whole("search.cpu_batch", self.cpu_batch, 1, 64)
        share = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise BadParameter(
                f"search.share={share!r}: give a share of the time, above 0 and at most 1",
                param="search.share",
            )

    def batch_on(self, device: str) -> int:
        """Sets that share a scoring pass on this type of device."""
        return self.cpu_batch if device == "cpu" else self.batch


@dataclass(frozen=True, slots=True)
class SkipTuning:
    """Drafting with a layer set, SWIFT's phase 2 (skip/pacing.py, skip/pricing.py)."""

    # Seconds that the passes of a new set take to capture on CUDA, at the sizes that come up. Inside `auto` a
    # set is used once its share of the time covers them. On an H200 a 1.5B model took about 0.3.
    capture_seconds: float = 0.3
    # Alternatives that are looked at for an unsure token.
    num_alternatives: int = 3
    # Alternatives that are added to one draft: each is a row of the frame.
    max_leaves: int = 8
    # Probability above which, on a CPU, alternatives of a greedy token are not even computed ...
    sure_probability: float = 0.95
    # ... and chance of acceptance from which on they are not considered.
    sure_chance: float = 0.95
    # Chance below which no alternative is added, even in padding rows.
    min_leaf_chance: float = 0.02
    # Acceptance of the first alternative before anything was measured (the second half of it, and so on),
    # and the trials it counts for.
    alternative_prior: float = 0.4
    alternative_prior_trials: float = 2.0
    # Acceptance that a set is paced by, at least, until its own first tokens were measured.
    min_prior_chance: float = 0.5

    # First tokens after which their acceptance is compared with what was promised.
    min_first_tokens: float = 24.0
    # First tokens over which that acceptance fades.
    first_token_memory: float = 64.0
    # First tokens after which a set counts as holding: sets dropped before it are not counted any more.
    num_holding_tokens: float = 48.0
    # Share of the promised acceptance below which a set is dropped.
    broken_share: float = 0.5
    # Sets dropped in a row after which the search pauses.
    max_broken_sets: int = 3
    # Fall of the acceptance that opens the search again, at least ...
    min_drop: float = 0.15
    # ... and in standard deviations of so many trials, so that chance alone does not.
    num_deviations: float = 2.5

    # Weight of a new measurement of the share of a pass that no skipping saves.
    fixed_share_weight: float = 0.3
    # That share before anything was measured, and its upper limit.
    fixed_share: float = 0.1
    max_fixed_share: float = 0.9
    # Candidate numbers of sequences that are tried for another pass: bounds host time per step.
    max_batch_splits: int = 32
    # Entries of the timeline in stats(): the first and the latest.
    max_events: int = 256


@dataclass(frozen=True, slots=True)
class Tuning:
    """All of them. The engine passes it to the proposers it builds."""

    cost_model: CostModelTuning = field(default_factory=CostModelTuning)
    trees: TreeTuning = field(default_factory=TreeTuning)
    model: ModelTuning = field(default_factory=ModelTuning)
    auto: AutoTuning = field(default_factory=AutoTuning)
    search: SearchTuning = field(default_factory=SearchTuning)
    skip: SkipTuning = field(default_factory=SkipTuning)
    # Steps that a complete draft waits for others to share its frame.
    draft_deadline: int = 4


DEFAULTS = Tuning()


__all__ = [
    "DEFAULTS",
    "AutoTuning",
    "CostModelTuning",
    "EstimateTuning",
    "ModelTuning",
    "SearchTuning",
    "SkipTuning",
    "SuffixTuning",
    "TreeTuning",
    "Tuning",
]
