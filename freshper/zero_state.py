"""The optimizer's state under ZeRO, whole and in torch's own form, so that any stage on any number of ranks, or plain
torch, can go on from a checkpoint of any other.

Nothing here is in the paper. ZeRO cuts AdamW's two moments (and, in bfloat16, float32 master weights) into as many
parts as there are ranks. A checkpoint holds them put together again, a tensor a parameter; reading goes the other
way, a parameter at a time, since the whole is four times as large as the model. DeepSpeed's own checkpoints need a
conversion between stages and ranks, and pickle.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

if TYPE_CHECKING:
    from freshper.trainer_deepspeed import DeepSpeedTrainer

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def whole_state(trainer: "DeepSpeedTrainer") -> dict[str, Any]:
    """All ranks together; what rank 0 gets is whole. `masters` are the float32 weights behind bfloat16 ones."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    masters: dict[int, torch.Tensor] = {}
    trainable = _trainable(trainer)
    step = next(iter(trainer.optimizer.state.values()))["step"]
    for k, p in enumerate(trainable):
        moments = {name: safe_get_full_optimizer_state(p, name) for name in MOMENTS}
        master = safe_get_full_fp32_param(p) if trainer.config.dtype == "bfloat16" else None
        if trainer.rank == 0:
            state[k] = {"step": step.clone(), **{name: moment.cpu() for name, moment in moments.items()}}
            masters |= {} if master is None else {k: master.cpu()}
    (group,) = trainer.optimizer.param_groups
    group = {**group, "params": list(range(len(trainable)))}
    return {"state": state, "param_groups": [group], "masters": masters}


def put_state(trainer: "DeepSpeedTrainer", state: dict[str, Any]) -> None:
    """All ranks together, each into its parts; `state` is empty but on rank 0. One that plain torch wrote in bfloat16
    has no master weights: those made from the weights stay."""
    first, mastered = None, None
    if trainer.rank == 0:
        first, mastered = state["state"][0]["step"], torch.tensor(float(bool(state.get("masters"))))
    step, mastered = trainer.shared(first, ()), trainer.shared(mastered, ())
    for part in _parts(trainer):
        trainer.optimizer.state[part] = {"step": step.cpu().clone()}
        trainer.optimizer.state[part] |= {name: torch.zeros_like(part) for name in MOMENTS}
    if not trainer.plain and trainer.config.zero_stage < 3:
        # ties views for single parameters to the flat arrays, which DeepSpeed does after its first step
        trainer.model_engine.optimizer._lazy_init_hp_params_optimizer_state()
    for k, p in enumerate(_trainable(trainer)):
        shape = getattr(p, "ds_shape", p.shape)
        for name in MOMENTS:
            moment = trainer.shared(state["state"][k][name] if trainer.rank == 0 else None, shape)
            if trainer.plain:
                trainer.optimizer.state[p][name].copy_(moment)
            else:
                safe_set_full_optimizer_state(p, moment, name)
        if mastered and trainer.config.dtype == "bfloat16":
            safe_set_full_fp32_param(p, trainer.shared(state["masters"][k] if trainer.rank == 0 else None, shape))


def _trainable(trainer: "DeepSpeedTrainer") -> list[torch.nn.Parameter]:
    return [p for p in trainer.policy.model.parameters() if p.requires_grad]


def _parts(trainer: "DeepSpeedTrainer") -> Sequence[torch.Tensor]:
    """What torch's AdamW steps on: the parameters, or this rank's flat pieces of them."""
    if trainer.plain:
        return _trainable(trainer)
    if trainer.config.zero_stage == 3:
        return trainer.model_engine.optimizer.fp32_partitioned_groups_flat
    return [part for group in trainer.optimizer.param_groups for part in group["params"]]
