"""The engine on vLLM: continuous batching, prefix caching, and weights that are proven to be the trainer's.

Paper: Algorithm 1 lines 2 and 12; section 4.1 (vLLM generates inside ROLL); appendix F for the sampling.

- *Token in, token out.* A request is the conversation's token ids, with one placeholder a picture, which vLLM
  expands again; that it arrives at our ids is checked every time. Prefix caching makes a turn cost its new tokens.
- *The sampling distribution.* The log-prob wanted is that at the sampling temperature, with the ids that are never
  sampled left out, before top-k and top-p. vLLM offers it before the temperature or after everything. So the
  worker's `compute_logits` does what `Policy.logits` does and divides by the temperature, and vLLM samples at 1.
- *Line 12.* On a CPU the weights travel as a file in shared memory; on GPUs by NCCL to GPUs of vLLM's own
  (--rollout_gpus), or by CUDA IPC on a shared GPU, where vLLM sleeps (level 2) while the trainer trains. All caches
  are reset. A sync can fail silently (tied output layers, renamed parameters, loading into sleeping memory): every
  --sync_check_every iterations log-probs of fixed conversations are compared, and a run that is off stops.

Run and tested: the CPU path. Written after vLLM 0.32's documentation and not run for want of a GPU: NCCL, IPC, sleep
(freshper/vllm_processes.py). The weight-transfer API has changed three times, hence the pin.
"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

from envs.base import EVAL_SEEDS
from freshper.backends import BackendError, deadline
from freshper.config import Config
from freshper.episode import Episode, NonFiniteError, collate
from freshper.models import Policy
from freshper.rollout import Conversation, Reply
from freshper.trainer import TorchTrainer
from freshper.vllm_processes import open_transfer, start_vllm

PROBES = 4  # conversations of the proof
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED |= {"up_proj": "gate_up_proj"}  # what vLLM stacks into one parameter
SHARED_MEMORY, WEIGHTS = "/dev/shm", "model.safetensors"


class VLLMEngine:
    """`generate` continues conversations; `sync` hands over the trainer's weights and returns `sync_error` where it
    was proven. Raises ValueError where vLLM cannot run this model, BackendError where it fails or takes too long."""

    def __init__(self, policy: Policy, config: Config, trainer: TorchTrainer):
        self.policy, self.config = policy, config
        self.rng = np.random.default_rng(config.seed)
        size = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in trainer.shapes())
        roomy = shutil.disk_usage(SHARED_MEMORY).free > 1.2 * size  # containers often have 64 MB of it
        self.folder = Path(tempfile.mkdtemp(prefix="freshper-", dir=SHARED_MEMORY if roomy else None))
        self.processes: list[int] = []
        self.llm: Any = None  # vLLM's, once it has started
        self.asleep, self.syncs, self.synced_step = False, 0, trainer.step
        self.tolerance = config.sync_tolerance or (1e-3 if config.dtype == "float32" else 0.5)
        self.shared_gpu = config.device != "cpu" and not config.rollout_gpus
        try:
            with deadline("starting vLLM", config.timeout):
                for part in (policy.model.config, policy.model.generation_config, policy.tokenizer):
                    part.save_pretrained(self.folder)
                if policy.image_processor:
                    policy.image_processor.save_pretrained(self.folder)
                self._write_weights(trainer)
                self.llm, self.processes = start_vllm(policy, config, self.folder)
                if config.device != "cpu":
                    (self.folder / WEIGHTS).unlink()  # later ones take another way
                    self.transfer = open_transfer(self.llm, config, trainer)
            self.probe = self._probe_episodes()
            self.prove(trainer)
        except BaseException:
            self.close()
            raise
        if self.shared_gpu:
            trainer.make_room = self.sleep

    # -- line 2 ----------------------------------------------------------------------------------------------

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """One reply to each conversation, all in one call of vLLM."""
        from vllm import SamplingParams

        if self.asleep:  # what sleep dropped can only come back with a sync
            raise BackendError("vLLM was asked to generate while asleep, before the next sync")
        c = self.config
        seeds = self.rng.integers(2**31, size=len(conversations)).tolist()
        how: dict[str, Any] = {"temperature": 1.0, "top_k": c.top_k, "top_p": c.top_p, "max_tokens": max_new_tokens}
        how |= {"logprobs": 0, "stop_token_ids": [self.policy.eos_id], "detokenize": False}
        outputs = self._run("the rollout", conversations, [SamplingParams(**how, seed=seed) for seed in seeds])
        replies = []
        for conversation, output in zip(conversations, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            logprobs = [at[token].logprob for token, at in zip(tokens, output.outputs[0].logprobs, strict=True)]
            if not np.isfinite(logprobs).all():
                raise NonFiniteError(f"the rollout met a log-prob that is not finite; episode seed {conversation.seed}")
            replies.append(Reply(tokens, logprobs))
        return replies

    def _run(self, phase: str, conversations: list[Conversation], params: list) -> list:
        """vLLM's outputs, with its reading of each prompt checked against ours."""
        with self._waiting(phase):
            outputs = self.llm.generate([self._request(c) for c in conversations], params, use_tqdm=False)
        for conversation, output in zip(conversations, outputs, strict=True):
            if list(output.prompt_token_ids) != conversation.tokens:
                raise BackendError(
                    f"{phase}: vLLM reads the conversation of episode seed {conversation.seed} as "
                    f"{len(output.prompt_token_ids)} tokens, the trainer as {len(conversation.tokens)}"
                )
            if output.outputs[0].finish_reason not in ("stop", "length"):  # "error" and "abort" come as outputs, too
                raise BackendError(
                    f"{phase}: vLLM broke off the reply of episode seed {conversation.seed} with "
                    f"`{output.outputs[0].finish_reason}`"
                )
        return outputs

    @contextlib.contextmanager
    def _waiting(self, phase: str) -> Iterator[None]:
        """Raises BackendError where vLLM fails or takes too long in here."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            with deadline(phase, self.config.timeout, self.processes):
                yield
        except BackendError:
            raise
        except EngineDeadError as error:
            raise BackendError(f"vLLM died in {phase}; its own message stands above") from error
        except Exception as error:  # its workers' errors reach us as `Exception`, whatever they were
            first = str(error).strip().partition("\n")[0]
            raise BackendError(f"vLLM failed in {phase}: {type(error).__name__}: {first}") from error

    def _request(self, conversation: Conversation) -> dict[str, Any]:
        """The token ids with one placeholder a picture, and the pictures."""
        if not conversation.images:
            return {"prompt_token_ids": conversation.tokens}
        tokens = np.array(conversation.tokens)
        placeholders = np.flatnonzero(tokens == self.policy.image_token_id)
        sizes = [int(np.prod(self.policy.grid(image))) for image in conversation.images]
        first = placeholders[np.cumsum([0, *sizes[:-1]])]
        pictures = [Image.fromarray(image) for image in conversation.images]
        kept = np.delete(tokens, np.setdiff1d(placeholders, first))
        return {"prompt_token_ids": kept.tolist(), "multi_modal_data": {"image": pictures}}

    # -- line 12 ---------------------------------------------------------------------------------------------

    def sync(self, trainer: TorchTrainer) -> dict[str, float]:
        """pi_mu <- pi_theta. Does nothing where the trainer has not moved since the last time."""
        if trainer.step == self.synced_step:
            return {}
        with self._waiting("handing the weights to vLLM"):
            if self.asleep:
                torch.cuda.empty_cache()  # what the trainer freed, torch would keep from vLLM
                self.llm.wake_up(tags=["weights"])
            if self.config.device == "cpu":
                self._write_weights(trainer)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            else:
                torch.cuda.synchronize()  # they are read on streams that do not wait for the optimizer's
                self.transfer.send_weights()
            if self.asleep:
                torch.cuda.empty_cache()
                self.llm.wake_up(tags=["kv_cache"])
                self.asleep = False
            # keys, values and pictures that older weights computed
            if not self.llm.reset_prefix_cache():
                raise BackendError("vLLM could not reset its prefix cache: it still has requests")
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        self.synced_step = trainer.step
        self.syncs += 1
        return self.prove(trainer) if (self.syncs - 1) % self.config.sync_check_every == 0 else {}

    def prove(self, trainer: TorchTrainer) -> dict[str, float]:
        """Compare log-probs of the probe with the trainer's. Raises BackendError beyond --sync_tolerance."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        probes = [Conversation(e.tokens.tolist(), e.images, e.seed) for e in self.probe]
        outputs = self._run("the proof of the sync", probes, [params] * len(probes))
        expected = trainer.logprobs(collate(self.probe)).numpy()
        error = 0.0
        for episode, row, output in zip(self.probe, expected, outputs, strict=True):
            for t in np.flatnonzero(episode.action_mask):
                found = output.prompt_logprobs[t][int(episode.tokens[t])].logprob
                error = max(error, abs(found - row[t])) if np.isfinite(found) else np.inf
        if not error <= self.tolerance:
            raise BackendError(
                f"vLLM does not compute with the trainer's weights: log-probs differ by up to {error:.2g}, allowed is "
                f"{self.tolerance:g}; {self._differing(trainer)}"
            )
        return {"sync_error": float(error)}

    def _probe_episodes(self) -> list[Episode]:
        """First prompts of held-out games; every token in them that has a probability counts."""
        env, episodes = self.config.make_env(), []
        silent = [*self.policy.suppressed_ids, self.policy.image_token_id]
        for seed in range(EVAL_SEEDS, EVAL_SEEDS + PROBES):
            observation = env.reset(seed=seed)[0]
            tokens = np.array(self.policy.first_prompt(observation), dtype=np.int32)
            mask = ~np.isin(tokens, silent)
            mask[0] = False
            e = Episode(tokens, mask, np.zeros(len(tokens), np.float32), 0.0, np.zeros(0), list(observation.images))
            e.turn_rewards, e.seed = np.zeros(len(e.turn_ends()), np.float32), seed
            episodes.append(e)
        return episodes

    def _differing(self, trainer: TorchTrainer) -> str:
        """Names of the first parameters whose norm differs, as vLLM calls them (its stacked ones as a whole)."""
        ours: dict[str, float] = {}
        for name, weight in trainer.weights():
            parts = [FUSED.get(part, part) for part in name.split(".") if part not in ("model", "language_model")]
            key = ".".join(parts)
            ours[key] = ours.get(key, 0.0) + weight.detach().double().square().sum().item()
        theirs: dict[str, float] = {}
        for worker in self.llm.collective_rpc("squared_norms", timeout=self.config.timeout):
            for name, value in worker.items():
                key = ".".join(part for part in name.split(".") if part not in ("model", "language_model"))
                theirs[key] = theirs.get(key, 0.0) + value
        tensor_parallel = max(1, self.config.rollout_gpus)  # parameters are cut, or copied, over so many workers
        differing = []
        for key in (k for k in ours if k in theirs):
            ratios = {theirs[key] / ours[key], theirs[key] / ours[key] / tensor_parallel} if ours[key] else {1.0}
            if all(abs(ratio - 1.0) > 1e-7 for ratio in ratios):  # the same numbers, summed in double precision
                differing.append(key)
        lost = [key for key in ours if key not in theirs]
        if differing:
            return f"the first parameters that differ: {', '.join(differing[:5])}"
        if lost:
            return f"vLLM has no parameters of these names: {', '.join(lost[:5])}"
        return f"each of the {len(ours)} parameters has the right norm, so it is not the weights but how they are used"

    def _write_weights(self, trainer: TorchTrainer) -> None:
        """All weights in one file, the output layer written out even if it is tied: vLLM keeps the old one else."""
        # copies, since the file must not hold two views of one tensor
        weights = {name: weight.detach().cpu().clone() for name, weight in trainer.weights()}
        try:
            save_file(weights, self.folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise BackendError(f"the weights for vLLM could not be written to {self.folder}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """What shapes future replies: the generator of their seeds."""
        return {"generator": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["generator"]

    # -- on a shared GPU -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the GPU for the trainer: weights and KV cache are dropped, `sync` brings new ones."""
        if not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End vLLM's processes and remove the weights from shared memory."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        shutil.rmtree(self.folder, ignore_errors=True)
