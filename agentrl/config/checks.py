"""What a configuration may not ask for, beyond the types: pure functions of the configuration and plain facts.

Every message names the flags. Raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..registry import has_login, is_url, load_object, names, suggest
from .best_metric import check_best_by
from .check_any_run import check_any_run, refuse_unread
from .check_data import check_data
from .config import Config
from .how import AlgoSection

TRAINING_ENGINES = ("vllm", "scripted")


@dataclass(frozen=True)
class AlgorithmFacts:
    """What the checks need to know of an algorithm: `grouped` = its baseline is made from the other members of a group,
    `critic` = it trains a value function, `filters`, `penalizes` = its preset drops groups without signal, lowers the rewards
    of overlong rollouts; `by_turn` = it takes a reward for each turn; `discounted` = it reads gamma; `teacher` = it learns
    from a teacher, not from rewards; `trust` = how the trust region acts, `--algo.trust` in place.
    """

    name: str
    grouped: bool
    critic: bool
    filters: bool
    penalizes: bool = False
    by_turn: bool = True
    discounted: bool = True
    teacher: bool = False
    trust: str = "clip"


def check_training(config: Config, algorithm: AlgorithmFacts) -> None:
    """Everything that needs no model and no cluster."""
    _check_sampling(config)
    _check_algorithm(config, algorithm)
    _check_rewards(config, algorithm)
    _check_models(config, algorithm)
    _check_off_policy(config)
    _check_batch(config)
    _check_unused(config, algorithm)
    check_any_run(config)
    _check_lora(config)
    check_sources(config)
    check_best_by(config)
    _check_replay(config)
    check_engine(config, TRAINING_ENGINES)


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.temperature <= 0:
        raise ConfigError(
            f"--rollout.temperature {rollout.temperature:g}: training needs a temperature above 0, as log-probabilities are "
            "those of the tempered distribution. Greedy evaluation is --eval.temperature 0."
        )
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}[name]
        if value != neutral:
            flag = f"--rollout.{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {value:g}: it cuts the distribution that is sampled, and the trainer's log-probabilities are over "
                "the whole one, so the ratio would be wrong. Leave it out; for evaluation there is "
                f"--eval.{name.replace('_', '-')}."
            )


def _check_algorithm(config: Config, algorithm: AlgorithmFacts) -> None:
    n = config.rollout.n_samples
    if algorithm.grouped and n < 2:
        raise ConfigError(
            f"--algo {algorithm.name} compares the members of a group: --rollout.n-samples {n} must be at least 2."
        )
    if filters_groups(config.algo, algorithm) and n < 2:
        raise ConfigError(f"the group filter needs --rollout.n-samples of at least 2, not {n}.")
    low, high = config.algo.filter.range or (0.0, 1.0)
    if not (low < high and low < 1 and high > 0):
        raise ConfigError(
            f"--algo.filter.range {low:g} {high:g} would keep no group: it wants low < high, and scores are in 0..1."
        )
    low, high = config.algo.clip or (0.0, 0.0)
    most = 0.999999 if algorithm.trust == "clip" else 1.0
    if not (0 <= low <= most and high >= 0):
        raise ConfigError(f"--algo.clip {low:g} {high:g}: low must be in [0, 1), of cispo in [0, 1]; high at least 0.")
    if config.algo.dual_clip is not None and config.algo.dual_clip <= 1:
        raise ConfigError(f"--algo.dual-clip {config.algo.dual_clip:g} must be above 1.")
    low, high = config.algo.correction_range or (0.0, 0.0)
    if not 0 <= low <= high:
        raise ConfigError(f"--algo.correction-range {low:g} {high:g}: it wants 0 <= low <= high.")
    if low > 0 and config.algo.correction == "decoupled":
        raise ConfigError(f"--algo.correction-range {low:g} {high:g}: decoupled has no lower bound, give 0 for it.")


def _check_rewards(config: Config, algorithm: AlgorithmFacts) -> None:
    algo, rollout = config.algo, config.rollout
    low, high = algo.reward_clip or (0.0, 0.0)
    if low > high:
        raise ConfigError(f"--algo.reward-clip {low:g} {high:g}: it wants low <= high.")
    if algo.credit == "turn" and not algorithm.by_turn:
        raise ConfigError(f"--algo.credit turn: --algo {algorithm.name} compares whole rollouts, by their outcome.")
    turns = rollout.max_turns if config.env.name or config.agent.name else 1
    limit = rollout.max_total_tokens or turns * rollout.max_new_tokens
    if algo.overlong.buffer is not None and algo.overlong.buffer > limit:
        raise ConfigError(
            f"--algo.overlong.buffer {algo.overlong.buffer} is more than the {limit} tokens an episode may sample "
            "(--rollout.max-total-tokens)."
        )


def _check_models(config: Config, algorithm: AlgorithmFacts) -> None:
    """The models beside the policy: reference, teacher, critic."""
    kl, steps, warmup = config.algo.kl, config.train.steps, config.critic.warmup_steps
    right = {"reward": "k1", "loss": "k2"}[kl.where]
    if kl.kind not in (None, right):
        raise ConfigError(
            f"--algo.kl.kind {kl.kind} with --algo.kl.where {kl.where}: in the reward the estimate is k1, which is unbiased; "
            "in the loss k2, the only one whose gradient is that of the reverse KL."
        )
    if algorithm.teacher and config.teacher.path is None:
        raise ConfigError(f"--algo {algorithm.name} learns from a teacher: name its model with --teacher.path.")
    if algorithm.teacher and kl.coef and kl.where == "reward":
        raise ConfigError(f"--algo {algorithm.name} has the teacher's KL in the reward: use --algo.kl.where loss.")
    if config.engine.colocated:
        for present, what in (
            (algorithm.critic, f"--algo {algorithm.name}: its critic stays on the GPU"),
            (kl.coef and not config.ref.offload and not config.lora.enabled, "--algo.kl.coef without --ref.offload"),
            (algorithm.teacher and not config.teacher.offload, "a teacher without --teacher.offload"),
            (config.parallel.offload_params, "--parallel.offload-params: the weights are in CPU memory already"),
        ):
            if present:
                raise ConfigError(f"--engine.colocated does not go with {what}.")
    if algorithm.critic and steps is not None and warmup >= steps:
        raise ConfigError(
            f"--critic.warmup-steps {warmup} of --train.steps {steps}: no batch is left to train the policy."
        )


def filters_groups(algo: AlgoSection, algorithm: AlgorithmFacts) -> bool:
    """Whether groups without signal are dropped."""
    return algorithm.filters if algo.filter.enable is None else algo.filter.enable


def _check_off_policy(config: Config) -> None:
    algo, stale = config.algo, config.train.max_staleness
    if algo.correction == "none" and stale > 0 and not algo.allow_uncorrected and algo.old_logp != "rollout":
        raise ConfigError(
            f"--algo.correction none with --train.max-staleness {stale} trains stale tokens as if they were fresh. Use auto, "
            "or say --algo.allow-uncorrected."
        )
    _check_proximal(config)
    _check_stale(config)
    if config.engine.colocated and stale > 0:
        raise ConfigError(
            f"--engine.colocated needs --train.max-staleness 0, not {stale}: engines and trainer take turns on the GPUs."
        )
    if config.engine.colocated and config.run.replay is not None:
        raise ConfigError("--engine.colocated is not used with --replay: there are no engines.")
    if config.rollout.partial and stale == 0:
        raise ConfigError(
            "--rollout.partial needs --train.max-staleness of at least 1: at 0 nothing runs during an update."
        )


def _check_proximal(config: Config) -> None:
    """The proximal policy leaves the correction, and the trust region, something to do."""
    algo, epochs = config.algo, config.train.epochs
    if algo.correction not in ("auto", "none") and algo.old_logp == "rollout":
        raise ConfigError(
            f"--algo.correction {algo.correction} is not used with --algo.old-logp rollout: the ratio to the behaviour policy "
            "is the correction, and its weights would all be 1."
        )
    if algo.old_logp == "current" and epochs > 1:
        raise ConfigError(
            f"--algo.old-logp current with --train.epochs {epochs} compares every update with itself: the ratio is always 1 "
            "and no clip acts, however far the policy moves on one batch. Use recompute."
        )


def _check_replay(config: Config) -> None:
    """A replay plays nothing, so it cannot evaluate and reads no options of the engines."""
    if config.run.replay is None:
        return
    if config.eval.every:
        raise ConfigError("--eval.every is not used with --replay: there is no engine to evaluate with.")
    if not any(Path(config.run.replay).glob("step_*.jsonl")):
        raise ConfigError(f"--replay {config.run.replay}: there are no step_*.jsonl files in it.")


def _check_stale(config: Config) -> None:
    """What lets groups get too old needs a rule for those that do."""
    given = {
        "--rollout.order first_done": config.rollout.order == "first_done",
        f"--rollout.oversample {config.rollout.oversample:g}": config.rollout.oversample > 1,
    }
    for flag, is_given in given.items():
        if is_given and config.train.stale != "drop":
            raise ConfigError(f"{flag} needs --train.stale drop: under wait no group ever gets too old.")


def _check_batch(config: Config) -> None:
    rollouts = config.train.batch_groups * config.rollout.n_samples
    cuts = config.train.updates_per_batch
    if rollouts % cuts:
        raise ConfigError(
            f"--train.batch-groups {config.train.batch_groups} x --rollout.n-samples {config.rollout.n_samples} = {rollouts} "
            f"rollouts do not divide into --train.updates-per-batch {cuts}."
        )
    if config.parallel.ranks > rollouts // cuts:
        raise ConfigError(
            f"--parallel.ranks {config.parallel.ranks} is more than the {rollouts // cuts} rollouts of one update."
        )

    if config.train.micro_batch_tokens < config.rollout.max_len:
        raise ConfigError(
            f"--train.micro-batch-tokens {config.train.micro_batch_tokens} does not hold one sequence of --rollout.max-len "
            f"{config.rollout.max_len} tokens: raise the one or lower the other."
        )


def _check_unused(config: Config, algorithm: AlgorithmFacts) -> None:
    """Options that would change nothing."""
    algo = config.algo
    synchronous = config.train.max_staleness == 0 or algo.old_logp == "rollout"
    corrected = not synchronous if algo.correction == "auto" else algo.correction != "none"
    penalized = algorithm.penalizes if algo.overlong.penalty is None else algo.overlong.penalty
    unread = {
        ("algo", ("dual_clip",), f"with {algorithm.trust}"): algorithm.trust != "clip",
        ("algo", ("correction_level", "correction_range"), "without an off-policy correction"): not corrected,
        ("algo", ("allow_uncorrected",), "where no stale token is left uncorrected"): corrected or synchronous,
        ("algo", ("lam", "bootstrap_truncated"), "without a critic"): not algorithm.critic,
        ("algo", ("gamma",), f"by --algo {algorithm.name}"): not algorithm.discounted,
        ("algo", ("reward_clip", "stop_properly", "credit"), "where a teacher judges"): algorithm.teacher,
        ("algo.overlong", ("penalty",), "where a teacher judges"): algorithm.teacher,
        ("algo.overlong", ("buffer", "factor"), "without --algo.overlong.penalty True"): not penalized,
        ("algo.filter", ("range", "max_rounds"), "without --algo.filter.enable True"): not filters_groups(
            algo, algorithm
        ),
        ("algo.kl", ("where", "kind", "target", "horizon"), "without --algo.kl.coef"): not algo.kl.coef,
        ("algo.kl", ("horizon",), "without --algo.kl.target"): algo.kl.target is None,
        (
            "eval",
            tuple(name for name in config.eval.changed() if name != "enable"),
            "with --eval.no-enable",
        ): not config.eval.enable,
        ("critic", tuple(type(config.critic).model_fields), f"by --algo {algorithm.name}"): not algorithm.critic,
        ("ref", ("path", "offload"), "without --algo.kl.coef"): not algo.kl.coef,
        ("teacher", ("path", "offload"), f"by --algo {algorithm.name}"): not algorithm.teacher,
        ("critic", ("min_lr_ratio",), "with a constant learning rate"): (
            config.critic.schedule or config.optim.schedule
        )
        == "constant",
        ("critic", ("lr_warmup",), "with --critic.lr-warmup-ratio"): config.critic.lr_warmup_ratio > 0,
        ("train", ("passes",), "with --train.steps, which says how many batches are trained"): config.train.steps
        is not None,
        ("ckpt", ("best_by",), "with --eval.no-enable"): not config.eval.enable,
        ("rollout", ("mask_stale_tokens",), "with --train.max-staleness 0"): config.train.max_staleness == 0,
    }
    refuse_unread(config, unread)


def _check_lora(config: Config) -> None:
    if config.lora.dropout and config.algo.old_logp == "current":
        raise ConfigError(
            f"--algo.old-logp current does not go with --lora.dropout {config.lora.dropout:g}: the update's own "
            "log-probabilities are disturbed by it, and would be compared with those of the engines. Use auto or recompute."
        )
    if config.lora.rank and config.ref.path is None and config.ref.offload:
        raise ConfigError("--ref.offload is not used with --lora.rank: the reference is the policy with adapters off.")


def check_sources(config: Config) -> None:
    """The options say what is played, and by whom it is judged."""
    _check_addresses(config)
    if config.reward.weights and len(config.reward.weights) != len(config.reward.name):
        raise ConfigError(
            f"--reward.weights gives {len(config.reward.weights)} weights for {len(config.reward.name)} reward functions."
        )
    if not config.reward.normalize and not config.reward.name:
        raise ConfigError("--reward.no-normalize is not used without --reward.")
    if config.env.name and config.reward.name and not config.agent.name:
        raise ConfigError("--env brings its own reward: leave out --reward, or use --data.path with --reward alone.")
    _check_agent(config)
    _check_envs(config)
    if not config.env.name and not config.data.path:
        raise ConfigError("Say what to play: --env NAME, or --data.path FILE with --reward path.py:function.")
    _check_servers(config)
    check_data(config)


def _check_addresses(config: Config) -> None:
    """Addresses hold no name or password, as they are shown and saved."""
    rewards = [url for name in config.reward.name for url in name.split(",")]
    given = {
        "--env": (config.env.name, "--env.token-file"),
        "--agent": (config.agent.name, "--agent.token-file"),
        "--agent.advertise-url": ([config.agent.advertise_url or ""], "--agent.token-file"),
        "--reward": (rewards, "--env.token-file"),
        "--engine": ([config.engine.name.removeprefix("openai:")], "--engine.token-file"),
    }
    for flag, (addresses, instead) in given.items():
        if any(is_url(url.strip()) and has_login(url) for url in addresses):
            raise ConfigError(f"{flag}: no name or password in an address; a token goes into {instead}.")


def _check_envs(config: Config) -> None:
    """Options for environments, and the mixture of several."""
    env = config.env
    if env.opt and not env.name:
        raise ConfigError("--env.opt needs --env.")
    if strays := env.strays():
        owner = strays[0].partition("=")[0].rpartition(":")[0]
        known = list(env.labels.values())
        raise ConfigError(f"--env.opt {strays[0]}: {owner} is no --env of this run.{suggest(owner, known)}")
    if twice := [name for name in env.name if env.name.count(name) > 1]:
        raise ConfigError(f"--env {twice[0]} is given twice; --env.weights says how often each is drawn.")
    if env.weights and len(env.name) < 2:
        raise ConfigError("--env.weights is not used without several --env.")
    if env.weights and len(env.weights) != len(env.name):
        raise ConfigError(f"--env.weights gives {len(env.weights)} weights for {len(env.name)} environments.")
    if any(weight <= 0 for weight in env.weights):
        raise ConfigError(
            "--env.weights: every weight must be above 0; leave out an environment that is not to be drawn."
        )
    if len(env.name) > 1 and config.data.path:
        raise ConfigError("--data.path brings the tasks of one environment: give one --env with it.")


def _check_servers(config: Config) -> None:
    """What belongs to servers, or cannot reach them."""
    served = [name for name in config.env.name if is_url(name)]
    for name in served:
        if config.env.opt_of(name):
            raise ConfigError(f"--env.opt is not used with --env {name}: give it to agentrl serve env.")
    if config.env.token_file is not None and not (served or any(map(is_url, config.reward.name))):
        raise ConfigError("--env.token-file is not used without an env or reward server, http://…")


def _check_agent(config: Config) -> None:
    """Several agents are agent servers, and every worker's policy server can be told apart."""
    agent, workers = config.agent, config.rollout.workers
    unread = [name for name in agent.changed() if name != "name"]
    if not agent.name and unread:
        raise ConfigError(f"--agent.{unread[0].replace('_', '-')} is not used without --agent.")
    if len(agent.name) > 1 and not all(is_url(name) for name in agent.name):
        raise ConfigError("--agent: several agents must all be URLs of agent servers, which share the load.")
    if workers > 1 and agent.advertise_url is not None and "{port}" not in agent.advertise_url:
        raise ConfigError(
            f"--agent.advertise-url {agent.advertise_url} names one policy server, and --rollout.workers {workers} have one "
            "each: put {port} in it."
        )


def _check_transport(config: Config) -> None:
    """A transport of weights has somewhere to go, and fits how engines and trainer share the GPUs."""
    engine = config.engine
    flag = f"--engine.transport {engine.transport}"
    if "transport" not in engine.changed():
        return
    if engine.name in ("scripted", "random") or engine.name.startswith("openai:"):
        raise ConfigError(f"{flag} is not used with --engine {engine.name}, which loads no weights.")
    if config.run.replay is not None:
        raise ConfigError(f"{flag} is not used with --replay: there are no engines.")
    if engine.transport == "ipc" and not engine.colocated:
        raise ConfigError(
            f"{flag} hands weights over within one GPU: it needs --engine.colocated. Between GPUs there is nccl."
        )
    if engine.transport == "nccl" and engine.colocated:
        raise ConfigError(f"{flag} is for GPUs apart; with --engine.colocated there are ipc and shm.")


def check_engine(config: Config, known: Sequence[str]) -> None:
    """The engine is one of those a command knows or of an installed package; a script comes with the scripted one."""
    engine = config.engine
    known = [*known, *(name for name in names("engine") if name not in known)]
    if "openai" in known and engine.name.startswith("openai:"):
        if not is_url(engine.name.removeprefix("openai:")):
            raise ConfigError(f"--engine {engine.name}: say where it is, as in openai:http://127.0.0.1:8000/v1.")
    elif engine.name not in known or engine.name == "openai":
        raise ConfigError(
            f"There is no engine {engine.name!r} here.{suggest(engine.name, known)} Known: {', '.join(known)}."
        )
    if engine.args and engine.name != "vllm":
        raise ConfigError(f"--engine.args is not used with --engine {engine.name}.")
    for name in ("model", "token_file"):
        if name in engine.changed() and not engine.name.startswith("openai:"):
            raise ConfigError(f"--engine.{name.replace('_', '-')} is not used with --engine {engine.name}.")
    _check_transport(config)
    if engine.name == "scripted" and engine.script is None:
        raise ConfigError("--engine scripted needs --engine.script path.py:function.")
    if engine.script is None:
        return
    if engine.name != "scripted":
        raise ConfigError(f"--engine.script is not used with --engine {engine.name}.")
    load_object(engine.script)
