"""FreshPER training: Algorithm 1 of the paper, line by line.

    python train.py --env frozenlake_vlm                 an image task, on a laptop, in minutes
    python train.py --env frozenlake --method on_policy  REINFORCE++ without replay

Each line of the algorithm stands with its number. The module behind it says how it works, and where
and why we differ.
"""

import signal

# While the imports take their seconds, Ctrl-C leaves no traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from freshper.config import Config
from freshper.flags import parse_args

# --help and a wrong flag are answered before torch is imported.
if __name__ == "__main__":
    parse_args()

from freshper.backends import Loaded, backends, load
from freshper.buffer import ReplayBuffer
from freshper.checkpoint import Checkpoints
from freshper.episode import collate
from freshper.errors import Ending, protect_output
from freshper.is_weights import importance_weights
from freshper.priority import age_decay, base_priorities
from freshper.reinforce import ReturnNorm
from freshper.report import Report
from freshper.rollout import Engine, rollout, training_seeds
from freshper.trainer import TorchTrainer


def train(
    config: Config, loaded: Loaded, trainer: TorchTrainer, engine: Engine, report: Report
) -> None:
    """Run Algorithm 1, from its start or from a checkpoint.

    Raises NonFiniteError, OSError (a disk, the search server, a first turn over --max_tokens, a
    backend), KeyboardInterrupt (a signal)."""
    decay = age_decay(config)
    buffer = ReplayBuffer(config.capacity, config.alpha, decay, config.eviction, config.seed)
    norm = ReturnNorm(config.baseline, config.kl_reward_coef)
    # From here on everything is as in the checkpoint of --resume, if there is one.
    checkpoints = Checkpoints(report, trainer=trainer, engine=engine, buffer=buffer, norm=norm)

    for iteration in report.iterations(engine):  # Algorithm 1, line 1
        # 2: roll out pi_mu in E to collect episodes {e_j} with rewards {r_j}
        seeds = training_seeds(config, iteration)
        episodes = rollout(
            engine, loaded.policy, loaded.envs, seeds, config.max_tokens, config.max_new_tokens
        )

        # 3: compute behavior log-probs log pi_mu(e_j), before training
        measured = trainer.record_behavior_logprobs(episodes)
        batch = collate(episodes)
        norm.observe(batch)  # mean and std, against which returns are measured (ours)

        # 4: store each e_j into B with base priority p_j^base and log pi_mu
        if config.replay_ratio:  # on-policy training keeps no episodes
            buffer.add(episodes, base_priorities(episodes, norm, config), trainer.step)

        # 6, on a CPU thread beside 5: refresh priorities p_i <- p_i^base * exp(-Delta_i / tau)
        buffer.refresh_async(trainer.step + config.ppo_epochs)  # t at the end of 5

        # 5: train pi_theta on the fresh batch {e_j}
        fresh = [trainer.update(batch, norm.advantages(batch)) for _ in range(config.ppo_epochs)]

        # 7: for k = 1, ..., K
        replays = []
        for _ in range(config.replay_ratio):
            # 8: sample batch S from B with P(i) ~ p_i^alpha, stratified
            drawn = buffer.sample(config.batch_size, trainer.step)

            # 9: compute IS weights w_i (beta = 0: all 1)
            weights = importance_weights(drawn.probabilities, config.beta_at(iteration))

            # 10: train pi_theta on S with the IS-weighted policy gradient
            batch = collate(drawn.episodes)
            update = trainer.update(batch, norm.advantages(batch), weights)
            replays.append((drawn, update))

            # section 3.5, "Priority Update": |r_i| stays, |A_i| depends on the newest returns
            buffer.update_base_priorities(
                drawn.indices, base_priorities(drawn.episodes, norm, config)
            )

        # 12: sync the inference engine, pi_mu <- pi_theta
        measured |= engine.sync(trainer)

        row = report.row(episodes, fresh, replays, trainer, buffer, measured)
        report.write(row, engine)
        checkpoints.save_if_due()


def main(argv: list[str] | None = None) -> int:
    """Return the exit status, one of those of `Ending`."""
    config = parse_args(argv)
    with Ending() as ending:
        loaded = load(config)
        with (
            Report(config, loaded, ending) as report,
            backends(config, loaded) as (trainer, engine),
        ):
            train(config, loaded, trainer, engine, report)
    return ending.status


if __name__ == "__main__":
    protect_output()
    raise SystemExit(main())
