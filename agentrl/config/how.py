"""How a run samples and learns: rollouts, engines, algorithm, optimizer, loop, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro
from pydantic import AfterValidator, Field, field_validator

from .section import Section


def _not_negative(gpus: float | str) -> float | str:
    if isinstance(gpus, float) and gpus < 0:
        raise ValueError("it should be at least 0, or auto")
    return gpus


Gpus = Annotated[float | Literal["auto"], AfterValidator(_not_negative)]


class RolloutSection(Section):
    """How episodes are played."""

    n_samples: Annotated[int, tyro.conf.arg(aliases=["-n"])] = Field(8, ge=1)
    """Episodes of one task draw: the members of a group."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probabilities use the same."""
    top_p: float = 1.0
    """Known here so that training can refuse it: it changes the distribution that is trained."""
    top_k: int = 0
    """As top_p."""
    min_p: float = 0.0
    """As top_p."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens sampled in one turn."""
    max_len: int = Field(4096, ge=2)
    """Longest context of an episode, in tokens with image placeholders."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Most tokens sampled in one episode, over all turns and branches; max_turns * max_new_tokens when absent."""
    max_turns: int = Field(16, ge=1)
    """Most turns of an episode; the environment's own limit applies if it is smaller."""
    workers: int = Field(1, ge=1)
    """Rollout worker processes."""
    max_episodes: int | None = Field(None, ge=1)
    """Most episodes played at once; all that have a place when absent."""
    partial: bool | None = None
    """Episodes go on across weight updates; absent: yes when train.max_staleness > 0."""
    kv: Literal["keep", "recompute"] = "keep"
    """KV cache of sequences that an update hits: kept (fast) or computed again with the new weights (exact)."""
    order: Literal["in_order", "first_done"] = "in_order"
    """in_order: a batch is the oldest task draws, of those that are finished with train.stale drop; first_done: the groups that
    finished first (needs train.stale drop)."""
    oversample: float = Field(1.0, ge=1.0)
    """This many times the groups that are needed are in flight (above 1 needs train.stale drop)."""
    mask_stale_tokens: bool = False
    """Leave tokens older than train.max_staleness out of the loss, and hold no batch back for their sake."""
    retries: int = Field(3, ge=0)
    """Attempts after the first for an episode that infrastructure failed."""
    max_error_rate: float = Field(0.5, ge=0.0, le=1.0)
    """Stop when more than this share of the episodes ended since the last batch or being played have failed or have no verdict
    (a reward of None or NaN); at 1, when none came out well of ten times as many as may be in flight."""
    max_abandoned: int = Field(16, ge=1)
    """Environment threads that may hang before their worker process is replaced."""
    silence_timeout_s: float = Field(300.0, gt=0)
    """A rollout worker that answers nothing for so long hangs and is replaced; its episodes are played again. Seconds."""
    call_timeout_s: float = Field(60.0, gt=0)
    """Longest constructor, reset, step or close of an environment, in seconds."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Longest episode, in seconds."""
    sampler: Literal["in_order", "shuffled", "by_pass_rate"] = "shuffled"
    """Order of the tasks within a pass over the data; by_pass_rate: those solved about half the time most often."""
    retire_after: int = Field(0, ge=0)
    """Leave a task out once this many groups of it in a row were solved by every member; 0 = never."""


class EngineSection(Section):
    """The inference engines."""

    name: Annotated[str, tyro.conf.arg(aliases=["--engine"])] = "vllm"
    """vllm; scripted with engine.script; random: tokens without a model; openai:URL: a model that someone else serves. (The
    last two for rollout and eval.)"""
    count: int = Field(1, ge=1)
    """Engines, each on devices of its own."""
    gpus: Gpus = "auto"
    """GPUs of each engine; auto: as many as it is spread over (engine.args tensor_parallel_size=…), 0 without a GPU."""
    colocated: bool = False
    """Engines and trainer share the GPUs, in turn: engines sleep while it trains, it moves to CPU memory while they sample
    (needs train.max_staleness 0)."""
    script: str | None = None
    """path/to/file.py:function, called with a GenerationRequest, gives a Reply (engine scripted)."""
    model: str | None = None
    """Name of the model at openai:URL; absent: the first it lists."""
    token_file: str | None = None
    """File with the API key of openai:URL."""
    max_seqs: int = Field(256, ge=1)
    """Most sequences an engine runs at once."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """Memory for the KV cache on a CPU, in GB."""
    transport: Literal["auto", "shm", "nccl", "ipc"] = "auto"
    """How weights get from the trainer to the engines: shm, shared memory of one machine; nccl, from GPU to GPU; ipc, within the
    GPU that both share. auto: ipc with engine.colocated, nccl where engines and trainer have GPUs, else shm."""
    update_timeout_s: float = Field(300.0, gt=0)
    """Longest weight update, in seconds."""
    silence_timeout_s: float = Field(300.0, gt=0)
    """An engine that brings no token for so long while answers are awaited, or whose process does not answer for so long, hangs
    and is replaced; longer than the longest prefill, in seconds."""
    max_restarts: int = Field(8, ge=0)
    """How often an engine that died or does not answer is replaced before the run stops."""
    args: Annotated[list[str], tyro.conf.UseAppendAction] = []
    """KEY=VALUE handed to vLLM's engine as it is, as in tensor_parallel_size=2; repeatable."""


class FilterSection(Section):
    """Dropping groups that carry no signal."""

    enable: bool | None = None
    """Drop groups whose scores are all equal; absent: as the algorithm's preset has it."""
    range: tuple[float, float] | None = None
    """Keep a group only if its mean score lies strictly inside (low, high)."""
    max_rounds: int = Field(10, ge=1)
    """Stop when this many times batch_groups groups did not fill one batch."""


class KLSection(Section):
    """Keeping the policy near a reference."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference; 0 loads no reference model."""
    where: Literal["reward", "loss"] = "reward"
    """In the reward of each token, summed to go; or a term of the loss."""
    kind: Literal["k1", "k2", "k3"] | None = None
    """The estimate: k1 in the reward, k2 (whose gradient is that of the reverse KL) in the loss; others are refused."""
    target: float | None = Field(None, gt=0)
    """Steer the coefficient so that the KL of a token stays near this; absent: it is fixed."""
    horizon: float = Field(10_000.0, gt=0)
    """Rollouts over which a coefficient with a target follows."""


class OverlongSection(Section):
    """Rollouts that come near the longest an episode may be, rollout.max_total_tokens, or are cut short."""

    penalty: bool | None = None
    """Take up to `factor` off the reward within `buffer` tokens of the limit; absent: as the algorithm's preset has it."""
    buffer: int | None = Field(None, ge=1)
    """Tokens below the limit where the penalty begins; absent: a fifth of the limit."""
    factor: float = Field(1.0, ge=0)
    """The penalty at the limit."""
    mask: bool = False
    """Leave truncated rollouts out of the loss; they stay in the baseline."""


class AlgoSection(Section):
    """The algorithm: a preset, and any axis of it set to something else. Absent axes come from the preset."""

    name: Annotated[str, tyro.conf.arg(aliases=["--algo"])] = "reinforce_pp"
    """A preset: reinforce_pp, reinforce_pp_baseline, ppo, grpo, rloo, dr_grpo, dapo, gspo, cispo; distill; or
    path/to/file.py:name."""
    advantage: str | None = None
    """Advantage estimator: a name, or path/to/file.py:function."""
    level: Literal["token", "sequence"] | None = None
    """Level of the probability ratio."""
    clip: tuple[float, float] | None = None
    """The ratio's trust region: 1 - low to 1 + high."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages, > 1."""
    trust: str | None = None
    """How the trust region acts: clip, cispo, or path/to/file.py:function."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How per-token losses become one number."""
    correction: Literal["auto", "none", "tis", "icepop", "seq_mask_tis", "decoupled"] = "auto"
    """Off-policy correction; auto: none at max_staleness 0, else tis."""
    correction_level: Literal["token", "sequence"] = "token"
    """Level of the correction's weights."""
    correction_range: tuple[float, float] | None = None
    """Bounds of the correction's weights; absent: the correction's own."""
    allow_uncorrected: bool = False
    """Permit correction none with max_staleness > 0."""
    old_logp: Literal["auto", "current", "recompute", "rollout"] = "auto"
    """The proximal policy; auto: current with one update a batch, recompute with several, and with lora.dropout."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per trained token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    bootstrap_truncated: bool = False
    """A truncated rollout is worth what the critic expects after it, not 0."""
    credit: Literal["outcome", "turn"] = "outcome"
    """outcome: the sum of the turns' rewards on the last trained token; turn: each on its own turn's last token."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of a rollout's reward."""
    stop_properly: float | None = None
    """Reward of truncated rollouts: multiplied with this when it is at least 0, replaced by it when it is negative."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KLSection = KLSection()
    overlong: OverlongSection = OverlongSection()
    filter: FilterSection = FilterSection()


class CriticSection(Section):
    """The value function of algorithms that have one. Its optimizer is of the kind of the policy's."""

    lr: float | None = Field(None, gt=0)
    """Learning rate; absent: 5 times the policy's."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate over the planned updates; absent: as optim.schedule."""
    lr_warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""
    lr_warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """In place of lr_warmup: the share of the planned updates over which it rises."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_norm: float = Field(1.0, ge=0)
    """Gradient norm clip; 0 = off."""
    value_clip: float = Field(0.5, ge=0)
    """How far a value may move within a batch before the loss sees it clipped; 0 = off."""
    warmup_steps: int = Field(0, ge=0)
    """Batches at the start that train the critic alone."""
    path: str | None = None
    """Folder or hub id of the model whose trunk it starts from; absent: the policy's. The value head starts at 0."""


class RefSection(Section):
    """The reference of algo.kl."""

    path: str | None = None
    """Folder or hub id; absent: the policy as it was before the first update."""
    offload: bool = False
    """Keep it in CPU memory between batches."""


class TeacherSection(Section):
    """The teacher of --algo distill."""

    path: str | None = None
    """Folder or hub id of a model with the policy's vocabulary."""
    offload: bool = False
    """Keep it in CPU memory between batches."""


class OptimSection(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer. muon: for the matrices between embedding and head, with AdamW for the rest; whole weights only."""
    lr: float | None = Field(None, gt=0)
    """Learning rate; absent: 2e-4 for models of a few million parameters, such as agentrl's tiny policies, else 1e-6; ten
    times that for LoRA adapters."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_norm: float = Field(1.0, ge=0)
    """Gradient norm clip; 0 = off."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate over the planned updates."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """In place of warmup: the share of the planned updates over which it rises."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of a moving average of the weights, saved beside them and exported in their place; 0 = off."""


class UpdateSection(Section):
    """What every kind of training says of its updates."""

    micro_batch_tokens: int = Field(16384, ge=1)
    """Most tokens in one forward and backward pass; a longer single sequence is an error."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    max_bad_steps: int = Field(3, ge=0)
    """Steps in which an update is skipped for a number that is not finite before the run stops; the rows are in bad_rows/."""


class TrainSection(UpdateSection):
    """The loop."""

    steps: int | None = Field(None, ge=1)
    """Batches to train; absent: those of the passes. Required where tasks have no end."""
    passes: int = Field(1, ge=1)
    """Passes over the tasks."""
    batch_groups: int = Field(16, ge=1)
    """Groups in a batch."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer updates each batch is cut into, between rollouts."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    max_staleness: int = Field(1, ge=0)
    """How many versions behind the trained weights a token may be; 0 = synchronous."""
    stale: Literal["wait", "drop"] = "wait"
    """wait: every group is trained in time, nothing is wasted; drop: no batch waits for a slow group, and finished groups over
    the bound are played again."""


class ParallelSection(Section):
    """The trainer's ranks."""

    ranks: int = Field(1, ge=1)
    """Trainer processes."""
    gpus: Gpus = "auto"
    """GPUs of each rank; auto: 1 where the machine has any, else 0."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    offload_optimizer: bool = False
    """Keep optimizer state and float32 master weights in CPU memory (ZeRO stage 1 and above)."""
    offload_params: bool = False
    """Keep weights in CPU memory while they are not used (ZeRO stage 3)."""


class LoraSection(Section):
    """Low-rank adapters (Hu 2021): the model is frozen, and two thin matrices beside each adapted layer are trained."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 = none, every weight is trained."""
    alpha: int | None = Field(None, ge=1)
    """An adapter's output is scaled by alpha / rank; absent: twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs dropped in updates; not when log-probabilities are only compared, so in RL the policy scores
    each batch once more before it (algo.old_logp recompute)."""
    targets: tyro.conf.UseAppendAction[list[str]] = []
    """Names of the layers to adapt, as in q_proj; repeatable. Absent or all-linear: all linear layers but the output head."""
    path: str | None = None
    """Adapter folder in peft's format to start from; its rank, alpha and targets are used."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained in place of the model."""
        return self.rank > 0 or self.path is not None


class EvalSection(Section):
    """Evaluation on held-out tasks: before the first update, every `every` steps, and after the last."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = only before the first and after the last update."""
    enable: bool = True
    """Evaluate at all."""
    split: str = "test"
    """Split of the environment's tasks."""
    tasks: int = Field(128, ge=1)
    """How many tasks are evaluated."""
    n: int = Field(1, ge=1)
    """Episodes of each task."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 = greedy."""
    greedy: bool = True
    """Evaluate greedily as well; keys start with eval/greedy/."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling; 0 = off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Min-p sampling."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest evaluation, in seconds; episodes left then are excluded and counted."""


class CkptSection(Section):
    """Checkpoints."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 = only by ckpt.minutes, at the end and when interrupted."""
    minutes: float = Field(30.0, ge=0)
    """A checkpoint also after the first step that ends so long after the last one; 0 = never for that reason."""
    keep: int = Field(2, ge=1)
    """How many are kept; the one with the best evaluation and those with a file `pinned` in their folder stay besides."""
    best_by: str | None = None
    """Metric of an evaluation whose highest value is the best, as in eval/pass@4; absent: eval/score/mean; none: keep no best."""


class WatchdogSection(Section):
    """Nothing is awaited for ever."""

    warn_after: float = Field(60.0, gt=0)
    """Seconds after which whatever is awaited is named in the log; half of fail_after where that is less."""
    fail_after: float = Field(600.0, gt=0)
    """Seconds after which it fails or is issued again."""
    reserve_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for CPUs and GPUs that other jobs of the cluster hold, in seconds."""
