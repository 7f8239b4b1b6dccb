"""FreshPER training: Algorithm 1 of the paper, line by line.

    python train.py --env frozenlake_vlm                 an image task, on a laptop, in minutes
    python train.py --env frozenlake --method on_policy  REINFORCE++ without replay

Each line of the algorithm stands with its number. The module behind it says how it works, and where
and why we differ.
"""

from time import perf_counter

from freshper.flags import parse_args

# --help and a wrong flag are answered before torch is imported.
if __name__ == "__main__":
    parse_args()

from freshper.backends import backends, join_ranks, make_envs, serve
from freshper.buffer import ReplayBuffer
from freshper.episode import collate
from freshper.errors import Ending, protect_output
from freshper.is_weights import importance_weights
from freshper.priority import age_decay, base_priorities
from freshper.reinforce import ReturnNormalizer, advantages
from freshper.report import columns_of, evaluation, narrated, watched
from freshper.rollout import Engine, rollout, training_seeds
from freshper.run import Run
from freshper.trainer import TorchTrainer


def train(run: Run, ending: Ending, trainer: TorchTrainer, engine: Engine) -> None:
    """Run Algorithm 1, from its start or from a checkpoint.

    Raises UserError (numbers that are not finite, a failing disk, search server or backend, a first
    turn over --max_tokens), KeyboardInterrupt (a signal)."""
    config = run.config
    buffer = ReplayBuffer(
        config.capacity, config.alpha, age_decay(config), config.eviction, config.seed
    )
    norm = ReturnNormalizer(config.baseline == "turn", config.kl_reward_coef)
    parts = {"trainer": trainer, "engine": engine, "buffer": buffer, "norm": norm}

    # Go on from the newest checkpoint of --resume, whose weights are loaded. The loop then begins
    # with the iteration after it. Without a checkpoint, begin with row 0.
    if not run.restore(parts):
        run.log(0, evaluation(run, engine))

    for iteration in watched(run, ending):  # Algorithm 1, line 1
        # 2: roll out pi_mu in E to collect episodes {e_j} with rewards {r_j}
        began = perf_counter()
        seeds = training_seeds(config, iteration)
        episodes = rollout(engine, run.envs, seeds, config.max_tokens, config.max_new_tokens)
        row = {"rollout_s": perf_counter() - began}

        # 3: compute behavior log-probs log pi_mu(e_j), before training
        row |= trainer.record_behavior_logprobs(episodes)
        batch = collate(episodes)
        norm.observe(batch)  # mean and std, against which returns are measured (ours)

        # 4: store each e_j into B with base priority p_j^base and log pi_mu
        if config.replay_ratio:  # on-policy training keeps no episodes
            buffer.add(episodes, base_priorities(episodes, norm, config), trainer.step)

        # 6, on a CPU thread beside 5: refresh priorities p_i <- p_i^base * exp(-Delta_i / tau)
        buffer.refresh_async(trainer.step + config.ppo_epochs)  # t at the end of 5

        # 5: train pi_theta on the fresh batch {e_j}
        fresh = [
            trainer.update(batch, advantages(batch, norm, config)) for _ in range(config.ppo_epochs)
        ]

        # 7: for k = 1, ..., K
        replays = []
        for _ in range(config.replay_ratio):
            # 8: sample batch S from B with P(i) ~ p_i^alpha, stratified
            drawn = buffer.sample(config.batch_size, trainer.step)

            # 9: compute IS weights w_i (beta = 0: all 1)
            weights = importance_weights(drawn.probabilities, config.beta_at(iteration))

            # 10: train pi_theta on S with the IS-weighted policy gradient
            batch = collate(drawn.episodes)
            update = trainer.update(batch, advantages(batch, norm, config), weights)
            replays.append((drawn, update))

            # section 3.5, "Priority Update": |r_i| stays, |A_i| depends on the newest returns
            buffer.update_base_priorities(
                drawn.indices, base_priorities(drawn.episodes, norm, config)
            )

        # 12: sync the inference engine, pi_mu <- pi_theta
        row |= engine.sync(trainer)

        # Write the row of metrics.csv. An evaluation and a checkpoint are due every so many
        # iterations and after the last one, a checkpoint also after a signal (Ctrl-C, SIGTERM),
        # after which no iteration begins. An error saves nothing.
        row |= columns_of(episodes, fresh, replays, trainer, buffer)
        if config.is_due(config.eval_every, iteration):
            row |= evaluation(run, engine)
        run.log(iteration, row, replays)
        if ending.must_stop() or config.is_due(config.save_every, iteration):
            run.save(parts)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status, one of those of `Ending`."""
    config = parse_args(argv)
    # Handles signals, and turns an error into a sentence and a status.
    with Ending() as ending:
        if join_ranks(config):
            return serve(config)  # compute what rank 0 asks for until it ends, and ignore signals

        # Run holds the folder's lock, and removes a new folder without rows. backends loads the
        # newest checkpoint's weights. narrated prints how the run ends, and draws its figures.
        with (
            Run(config, make_envs(config), argv) as run,
            backends(config, run.saved, run.envs[0]) as (trainer, engine),
            narrated(run, engine.policy),
        ):
            train(run, ending, trainer, engine)
    return ending.status


if __name__ == "__main__":
    protect_output()
    raise SystemExit(main())
