"""FreshPER training: Algorithm 1 of the paper, line by line.

    python train.py --env frozenlake_vlm                 an image task, on a laptop, in minutes
    python train.py --env frozenlake --method on_policy  REINFORCE++ without replay

Each line of the algorithm is one call. The module behind it says how it works, and where and why we
differ.
"""

import sys
from collections.abc import Callable

from envs.base import TextEnv
from freshper.config import Config
from freshper.flags import CommandLine, parse_args

if __name__ == "__main__":
    parse_args()  # before torch is imported: --help and a wrong flag answer at once

import torch
from transformers import logging

from freshper.backends import backends, choose_backend, join_ranks, load, serve
from freshper.buffer import ReplayBuffer
from freshper.checkpoint import RunState, Saved, StopSignals
from freshper.errors import BackendError, Interrupted, NonFiniteError
from freshper.is_weights import importance_weights
from freshper.models import Policy
from freshper.priority import base_priorities
from freshper.reinforce import Baseline
from freshper.report import Report
from freshper.rollout import Engine, rollout, training_seeds
from freshper.tiny import keep_freed_memory
from freshper.trainer import TorchTrainer


def train(
    config: Config,
    policy: Policy,
    make_env: Callable[[], TextEnv],
    trainer: TorchTrainer,
    engine: Engine,
    report: Report,
    signals: StopSignals,
    saved: Saved | None,
) -> None:
    """Run Algorithm 1, from its start or from a checkpoint.

    Raises NonFiniteError, OSError (a disk, the search server, a first turn over --max_tokens),
    BackendError (an engine), Interrupted (a signal)."""
    envs = [make_env() for _ in range(max(config.rollout_batch_size, config.eval_episodes))]
    decay = config.decay_function()
    buffer = ReplayBuffer(config.capacity, config.alpha, decay, config.eviction, config.seed)
    baseline = Baseline(config.baseline, config.kl_reward_coef)
    epsilon = config.epsilon
    parts = dict(trainer=trainer, engine=engine, buffer=buffer, decay=decay, baseline=baseline)
    checkpoint = RunState(config, policy, report, signals, saved, parts | {"report": report})
    checkpoint.restore()
    report.evaluate_if_due(engine, envs)
    for iteration in report.iterations():  # Algorithm 1, line 1
        # 2: roll out pi_mu in E to collect episodes {e_j} with rewards {r_j}
        seeds = training_seeds(config.seed, iteration, config.rollout_batch_size, config.group_size)
        episodes = rollout(engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens)

        # 3: compute behavior log-probs log pi_mu(e_j), before training
        mismatch = trainer.record_behavior_logprobs(episodes)
        baseline.observe(episodes)
        if config.replay_ratio:  # on-policy training keeps no episodes
            # 4: store each e_j into B with base priority p_j^base and log pi_mu
            priorities = base_priorities(episodes, baseline, config.base_priority, epsilon)
            buffer.add(episodes, priorities, trainer.step)
            # 6: refresh priorities p_i <- p_i^base * exp(-Delta_i / tau), on a CPU thread beside 5
            buffer.refresh_async(trainer.step + config.ppo_epochs)  # t at the end of 5

        # 5: train pi_theta on the fresh batch {e_j}
        advantages = baseline.advantages(episodes)
        fresh = [trainer.update(episodes, advantages) for _ in range(config.ppo_epochs)]

        # 7: for k = 1, ..., K
        replays = []
        for _ in range(config.replay_ratio):
            # 8: sample batch S from B with P(i) ~ p_i^alpha, stratified
            drawn = buffer.sample(config.batch_size, trainer.step)
            # 9: compute IS weights w_i (beta = 0: all 1)
            beta = config.beta_at(iteration)
            weights = importance_weights(drawn.probabilities, len(buffer), beta)
            # 10: train pi_theta on S with the IS-weighted policy gradient
            advantages = baseline.advantages(drawn.episodes)
            replayed = trainer.update(drawn.episodes, advantages, weights)
            replays.append((drawn, replayed))
            # section 3.5, "Priority Update": |A_i| depends on the newest baseline
            priorities = base_priorities(drawn.episodes, baseline, config.base_priority, epsilon)
            buffer.update_base_priorities(drawn.indices, priorities)
        # `--tau auto` learns last: tau must not change between two draws.
        for drawn, replayed in replays:
            decay.observe(drawn.ages, replayed.drift["kl"] / drawn.turns())

        # 12: sync the inference engine, pi_mu <- pi_theta
        sync = engine.sync(trainer)
        report.log(episodes, mismatch, fresh, replays, sync, trainer=trainer, buffer=buffer)
        report.evaluate_if_due(engine, envs)
        checkpoint.save_if_due()


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 something failed on the way, 2 bad input, 130 Ctrl-C, 143
    SIGTERM."""
    command_line = parse_args(argv)
    keep_freed_memory()
    # transformers lists every weight that does not fit; `load_policy` raises one sentence instead.
    logging.set_verbosity_error()
    if command_line.config.tiny:
        # A tiny model gains little from more threads.
        torch.set_num_threads(min(2, torch.get_num_threads()))
    torch.manual_seed(command_line.config.seed)

    try:
        with StopSignals() as signals:
            return run(command_line, signals)
    except Interrupted as stop:
        return stop.status


def run(command_line: CommandLine, signals: StopSignals) -> int:
    """Load the policy, start the backends and train. Returns the exit status, or raises
    Interrupted."""
    config, flags_given, notes = command_line
    try:
        config, backend_notes = choose_backend(config, flags_given)
        rank = join_ranks(config)
        policy, make_env, saved = load(config, flags_given)
        if rank == 0:
            report = Report(config, policy, make_env(), notes + backend_notes)
    except (ValueError, BackendError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2

    # Rank 0 runs the algorithm. The others compute their share of its updates.
    if rank > 0:
        return serve(policy, config)
    try:
        with report, backends(policy, config, make_env()) as (trainer, engine):
            train(config, policy, make_env, trainer, engine, report, signals, saved)
    except (NonFiniteError, OSError, BackendError, torch.OutOfMemoryError):
        # The report has printed the error.
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
