"""FreshPER training: Algorithm 1 of the paper, line by line.

    python train.py --env frozenlake_vlm                 a picture task, on a laptop, in minutes
    python train.py --env frozenlake --method on_policy  the baseline without replay

Each line of the algorithm is one call; open the module behind it to see how it works. Where we differ from
the paper or from the authors' code, and why, stands at the head of that module and in the README's table.
"""

import sys

import torch
from transformers import set_seed

from envs.base import EVAL_SEEDS
from freshper.backends import BackendError, TrainingEngine, backends, check, join, serve
from freshper.buffer import ReplayBuffer
from freshper.config import Config, parse_args
from freshper.episode import NonFiniteError
from freshper.is_weights import annealed_beta, importance_weights
from freshper.load import load
from freshper.models import Policy
from freshper.reinforce import ReplayBaseline
from freshper.report import Report
from freshper.resume import Interrupted, RunState, StopSignals
from freshper.rollout import rollout, training_seeds
from freshper.trainer import TorchTrainer, keep_freed_memory


def train(
    config: Config, policy: Policy, report: Report, signals: StopSignals, trainer: TorchTrainer, engine: TrainingEngine
) -> None:
    """Run Algorithm 1, from its start or a checkpoint on. Raises NonFiniteError where log-probs, loss or gradient
    stop being numbers, OSError where the disk fails or an environment hangs, BackendError where vLLM or DeepSpeed does,
    Interrupted after a signal."""
    envs = [config.make_env() for _ in range(max(config.rollout_batch_size, config.eval_episodes))]
    decay = config.decay_function()
    buffer = ReplayBuffer(config.capacity, config.alpha, decay, config.eviction, config.seed, config.decay_by())
    baseline = ReplayBaseline(config.replay_advantage, config.baseline_window)

    def collect(seeds: list[int]) -> list:
        players, limits = envs[: len(seeds)], (config.max_tokens, config.max_new_tokens)
        return rollout(engine, policy, players, seeds, *limits, trainer.step, config.env, config.env_timeout)

    def age_clock(updates_ahead: int = 0) -> int:
        return trainer.step + updates_ahead if config.age_unit == "step" else iteration

    run = RunState(config, policy, report, signals, engine=engine, trainer=trainer, buffer=buffer, baseline=baseline)
    if config.decay == "auto":
        run.parts["tau"] = decay
    run.restore()
    for iteration in report.progress():  # Algorithm 1, line 1
        # 2: roll out pi_mu in E to collect episodes {e_j} with rewards {r_j}
        n = config.rollout_batch_size // config.group_size
        seeds = [s for s in training_seeds(config.seed, iteration * n, n) for _ in range(config.group_size)]
        episodes = collect(seeds)
        # 3: compute behaviour log-probs log pi_mu(e_j), before training
        report.add(trainer.record_behavior_logprobs(episodes))
        baseline.observe(episodes)
        # 4: store each e_j into B with base priority p_j^base and log pi_mu
        buffer.add(episodes, trainer.base_priorities(episodes), step=age_clock())
        # 6: refresh priorities p_i <- p_i^base * exp(-Delta_i / tau), on a CPU thread while line 5 trains
        refresh = buffer.refresh_async(age_clock(updates_ahead=config.ppo_epochs))
        # 5: train pi_theta on the fresh batch {e_j}
        for _ in range(config.ppo_epochs):
            report.add(trainer.update(episodes)[0])
        refresh.result()
        # 7: for k = 1, ..., K
        for _ in range(config.replay_ratio):
            # 8: sample batch S from B with P(i) ~ p_i^alpha, stratified
            replay = buffer.sample(config.batch_size, age_clock())
            # 9: compute IS weights w_i (beta = 0 gives 1 everywhere)
            progress = iteration / max(1, config.iterations - 1)
            beta = annealed_beta(config.beta, progress) if config.is_correction else 0.0
            weights = importance_weights(replay.probabilities, len(buffer), beta)
            # 10: train pi_theta on S with the IS-weighted policy gradient
            stats, drift = trainer.update(replay.episodes, weights, baseline.moments(replay.episodes))
            report.add_replay(replay, stats, drift)
            # section 3.5, "Priority Update": a base priority that depends on the policy is computed again
            buffer.update_base_priorities(replay.indices, trainer.base_priorities(replay.episodes))
            if config.decay == "auto":
                decay.observe(replay.ages, drift["kl"] / [len(e.turn_rewards) for e in replay.episodes])
                report.add({"tau": decay.tau})
        # 12: sync the inference engine, pi_mu <- pi_theta
        report.add(engine.sync(trainer))

        if report.evaluation_due():
            report.evaluated(collect([EVAL_SEEDS + k for k in range(config.eval_episodes)]))
            engine.sync(trainer)
        report.end_iteration(trainer, episodes, buffer)
        run.save_if_due()


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 something went wrong on the way, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""
    config = parse_args(argv)
    keep_freed_memory()
    set_seed(config.seed)  # Python's, numpy's and torch's generators
    torch.set_num_threads(config.threads)
    with StopSignals() as signals:
        try:
            try:
                rank = join(config)
                policy = load(config)
                check(policy, config)
                if rank:  # rank 0 runs the algorithm; the others do their share of its updates
                    return serve(policy, config)
                report = Report(config, policy)
            except ValueError as error:
                print(f"train.py: error: {error}", file=sys.stderr)
                return 2
            with report, backends(policy, config) as (trainer, engine):
                train(config, policy, report, signals, trainer, engine)
        except Interrupted as stop:
            return stop.status
        except (NonFiniteError, OSError, BackendError):  # the report has said what it was
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
