"""Generate with vLLM, with the trainer's weights.

Paper: Algorithm 1 lines 2 and 12; section 4.1 (the authors generate with vLLM inside ROLL);
appendix F (sampling).

- Token in, token out. A request is token ids, with one placeholder per image, which vLLM expands
  again. Every call checks that vLLM arrives at our ids. Prefix caching makes a turn cost its new
  tokens only.
- Log-probs are those of the softmax at the sampling temperature, before top-k and top-p. vLLM
  offers none of these, so `WorkerExtension.follow_policy` divides the logits, and vLLM samples at
  a temperature of 1.
- Line 12. The weights go through a file in shared memory and vLLM's own `reload_weights`. That can
  fail silently (tied output layers, renamed parameters). Line 3 of the next iteration sees it: it
  computes the same log-probs with the trainer's weights, and ends the run if they differ by more
  than rounding (MAX_MISMATCH in freshper/backends.py).

Tested on a CPU (0.32), run on a GPU (0.26). vLLM's interfaces change often, hence the pin.
"""

import hashlib
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from envs.base import TextEnv, UserError
from freshper.config import Config
from freshper.engine_hf import Sampling
from freshper.errors import SIGNALS, BackendError, phase
from freshper.models import Policy
from freshper.rollout import Conversation, Reply
from freshper.trainer import TorchTrainer

SHARE = 0.5  # of a GPU's memory, if vLLM and the trainer are on the same one
SHARED_MEMORY = "/dev/shm"
# torchrun's variables, which vLLM's processes would take for their own.
LAUNCHER = tuple("RANK LOCAL_ WORLD_SIZE MASTER_ TORCHELASTIC_ GROUP_ ROLE_".split())


def gpus_of_vllm(device: str) -> list[str]:
    """Return the GPUs after those of the ranks, or [] if vLLM shares the only one, or runs on a
    CPU. Raises UserError if several ranks leave none."""
    if device == "cpu":
        return []
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    installed = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or installed
    gpus = visible.split(",")[ranks:]
    if ranks > 1 and not gpus:
        raise UserError(
            f"the {ranks} ranks of this machine must leave a GPU for vLLM, but {visible} are all"
        )
    return gpus


def folder_of_weights(size: int, model_config: Any) -> str:
    """Make the folder for weights of `size` bytes, in shared memory if there is room. A model's is
    the same in each run, because vLLM's compile cache knows the model by its path."""
    # Containers often have 64 MB of shared memory.
    roomy = shutil.disk_usage(SHARED_MEMORY).free > 1.2 * size
    root = SHARED_MEMORY if roomy else tempfile.gettempdir()
    model = hashlib.sha256(model_config.to_json_string().encode()).hexdigest()
    folder = f"{root}/freshper-{model}"
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        # Another run of this model has it.
        folder = tempfile.mkdtemp(prefix="freshper-", dir=root)
    return folder


def variables_of_vllm(device: str, gpus: list[str]) -> dict[str, str]:
    """Return the environment variables of vLLM's processes: ours, without torchrun's."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        # FlashInfer compiles both at their first use, which needs nvcc. Requests with a seed, as
        # ours, never use its sampler.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "TRITON_F32_DEFAULT": "ieee",  # not TF32, in the attention of float32 models
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}

    ours = {name: x for name, x in os.environ.items() if not name.startswith(LAUNCHER)}
    variables = defaults | ours
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def options_of_vllm(config: Config, env: TextEnv, gpus: list[str]) -> dict[str, Any]:
    """Return the options of vLLM besides the model."""
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "max_model_len": config.max_tokens,
        "max_num_seqs": min(512, max(config.rollout_batch_size, config.eval_episodes)),
        # No repetition penalty or the like from the model's own configuration.
        "generation_config": "vllm",
        "worker_extension_cls": f"{__name__}.WorkerExtension",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
    }

    images = len(env.reset(seed=0)[0].images)
    if images:
        options["limit_mm_per_prompt"] = {"image": images * (env.max_turns + 1), "video": 0}

    if config.device == "cpu":
        options |= {
            "enforce_eager": True,
            # Seeded replies to prompts cut into chunks kill vLLM on a CPU.
            "enable_chunked_prefill": False,
            # Only full blocks are cached, hence small ones.
            "block_size": 32,
        }
    elif gpus:
        options["tensor_parallel_size"] = len(gpus)
    else:
        options["gpu_memory_utilization"] = SHARE
    return options


def end_waits(core: Any) -> None:
    """Wait until vLLM's core has ended, then end all waits for its answers.

    If it is killed in a rollout, as by a system without memory, vLLM itself waits for ever."""
    multiprocessing.connection.wait(core.resources.engine_manager.sentinels())
    died = RuntimeError("vLLM's process died")
    core.outputs_queue.put(died)
    for future in list(core.utility_results.values()):
        future.set_exception(died)


class VLLMEngine:
    """Generate replies with vLLM. Raises BackendError if vLLM fails or dies."""

    def __init__(self, policy: Policy, config: Config, trainer: TorchTrainer, env: TextEnv):
        self.policy = policy
        self.config = config
        self.rng = np.random.default_rng(config.seed)
        self.llm: Any = None  # vllm.LLM, as soon as it runs

        size = sum(parameter.nbytes for _, parameter in trainer.parameters())
        self.folder = folder_of_weights(size, policy.model.config)
        # vLLM measures what is free, so another process on the GPU spoils its start.
        room = "alone on its GPU, with a KV cache (SHARE in engine_vllm.py, VLLM_CPU_KVCACHE_SPACE)"
        start = f"the start of vLLM {room} for --max_tokens {config.max_tokens}"
        try:
            trainer.save(self.folder)
            # vLLM starts only if its share of the GPU is free.
            torch.cuda.empty_cache()
            with phase(start, Exception):
                self._start(env)
        except BaseException:
            self.close()
            raise

    def _start(self, env: TextEnv) -> None:
        """Start vLLM's processes on the model in the folder."""
        config = self.config
        gpus = gpus_of_vllm(config.device)
        options = options_of_vllm(config, env, gpus)
        with patch.dict(os.environ, variables_of_vllm(config.device, gpus), clear=True):
            from vllm import LLM

            # A terminal or a scheduler signals all processes of a group, and vLLM's would abort at
            # once. They inherit that such signals are blocked. Python's resource tracker would
            # unblock them at its start.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self.llm = LLM(model=self.folder, **options)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

        core = self.llm.llm_engine.engine_core
        threading.Thread(target=end_waits, args=(core,), daemon=True).start()
        self.llm.collective_rpc("end_with", args=(os.getpid(), self.folder))
        self.llm.collective_rpc(
            "follow_policy", args=(self.policy.suppressed_ids, config.temperature)
        )

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Line 2: sample one reply to each conversation, all in one call of vLLM."""
        from vllm import SamplingParams

        sampling = dict(
            temperature=1.0,
            top_k=Sampling.top_k,
            top_p=Sampling.top_p,
            max_tokens=max_new_tokens,
            stop_token_ids=[self.policy.eos_id],
            logprobs=0,
            detokenize=False,
        )
        seeds = self.rng.integers(2**31, size=len(conversations)).tolist()
        params = [SamplingParams(**sampling, seed=seed) for seed in seeds]
        requests = [self._request(conversation) for conversation in conversations]
        with phase("the rollout with vLLM", Exception):
            outputs = self.llm.generate(requests, params, use_tqdm=False)

        replies = []
        for conversation, output in zip(conversations, outputs, strict=True):
            completion = output.outputs[0]
            reason = completion.finish_reason  # also "error", "abort"
            misread = output.prompt_token_ids != conversation.tokens
            if misread or reason not in ("stop", "length"):
                raise BackendError(
                    f"vLLM misread the prompt of episode seed {conversation.seed}, or ended with "
                    f"`{reason}`"
                )
            reply = Reply(completion.token_ids, [])
            for token, logprobs in zip(reply.tokens, completion.logprobs, strict=True):
                reply.logprobs.append(logprobs[token].logprob)
            replies.append(reply)
        return replies

    def _request(self, conversation: Conversation) -> dict[str, Any]:
        """Return a conversation as vLLM wants it: with the first of our placeholders of each
        image. vLLM adds the others."""
        ids = np.array(conversation.tokens)
        is_image = ids == self.policy.image_token_id
        repeated = is_image & np.roll(is_image, 1)
        images = [Image.fromarray(np.asarray(image)) for image in conversation.images]
        return {
            "prompt_token_ids": ids[~repeated].tolist(),
            "multi_modal_data": {"image": images} if images else {},
        }

    def sync(self, trainer: TorchTrainer) -> dict[str, float]:
        """Line 12, pi_mu <- pi_theta: hand over the parameters. Returns the seconds."""
        began = time.perf_counter()
        # A tied output layer is among them, because vLLM would keep the old one. They are copies,
        # because a file must not hold two views of one tensor.
        parameters = {name: x.detach().to("cpu", copy=True) for name, x in trainer.parameters()}

        with phase("handing the weights to vLLM", Exception):
            save_file(parameters, f"{self.folder}/model.safetensors")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": self.folder})
            # Keys, values and image features that older weights computed.
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM could not reset its prefix cache: it still has requests")
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        return {"sync_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["generator"]

    def close(self) -> None:
        """End vLLM's processes and remove the folder."""
        if self.llm is not None:
            # SIGTERM is blocked there, so it need not wait before it kills.
            self.llm.llm_engine.engine_core.shutdown(timeout=0)
        shutil.rmtree(self.folder, ignore_errors=True)


class WorkerExtension:
    """Methods that vLLM adds to its workers, where `collective_rpc` calls them by name."""

    def follow_policy(self: Any, suppressed_ids: list[int], temperature: float) -> None:
        """Make logits those of Policy.logits at the temperature: -inf for ids that are never
        sampled."""
        model = self.model_runner.get_model()
        suppressed = torch.tensor(suppressed_ids).long().to(self.device)
        original = model.compute_logits

        def compute_logits(hidden: torch.Tensor) -> torch.Tensor | None:
            logits = original(hidden)
            if logits is not None:  # None on tensor-parallel ranks that do not sample
                # In place, because they are large.
                logits = logits.float().div_(temperature).index_fill_(1, suppressed, -torch.inf)
            return logits

        model.compute_logits = compute_logits

    def end_with(self, trainer: int, folder: str) -> None:
        """End this process, and with it all of vLLM, once the process of the trainer has ended."""

        def watch() -> None:
            while os.path.exists(f"/proc/{trainer}"):
                time.sleep(1.0)
            shutil.rmtree(folder, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
