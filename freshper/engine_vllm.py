"""Generate with vLLM, with weights that are proven to be the trainer's.

Paper: Algorithm 1 lines 2 and 12; section 4.1 (the authors generate with vLLM inside ROLL); appendix F (sampling).

- Token in, token out. A request is token ids, with one placeholder per image, which vLLM expands again; that it arrives
  at our ids is checked in every call. Prefix caching makes a turn cost its new tokens only.
- Log-probs are those of the softmax at the sampling temperature, before top-k and top-p. vLLM offers none of these, so
  `WorkerExtension.follow_policy` divides the logits, and vLLM samples at 1.
- Line 12. The weights go through a file in shared memory and vLLM's own `reload_weights`. That can fail silently (tied
  output layers, renamed parameters), so log-probs of fixed prompts are then compared with the trainer's.

Tested on a CPU, never run on a GPU. vLLM's interfaces change often, hence the pin (0.32).
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from envs.base import EVAL_SEEDS, TextEnv
from freshper.config import Config
from freshper.episode import Batch
from freshper.errors import BackendError, alive, watched
from freshper.models import TOLERANCE, Policy
from freshper.rollout import Conversation, Reply
from freshper.trainer import TorchTrainer

PROBES = 4  # prompts whose log-probs are compared after each sync
SHARED_MEMORY = "/dev/shm"
LAUNCHER = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
)  # torchrun's variables


class VLLMEngine:
    """Generate replies with vLLM. Raises BackendError if vLLM fails, dies or takes too long."""

    def __init__(self, policy: Policy, config: Config, trainer: TorchTrainer, env: TextEnv):
        self.policy, self.config, self.env = policy, config, env
        self.rng = np.random.default_rng(config.seed)
        self.llm: Any = None
        self.processes: dict[int, str] = {}  # vLLM's, to notice their death
        size = sum(
            p.element_size() * getattr(p, "ds_numel", p.numel()) for p in policy.model.parameters()
        )
        roomy = (
            shutil.disk_usage(SHARED_MEMORY).free > 1.2 * size
        )  # containers often have 64 MB of it
        self.folder = Path(
            tempfile.mkdtemp(prefix="freshper-", dir=SHARED_MEMORY if roomy else None)
        )
        kv_cache = f"a KV cache (--engine_memory, VLLM_CPU_KVCACHE_SPACE) for --max_tokens {config.max_tokens}"
        try:
            trainer.save(str(self.folder))
            with watched(f"the start of vLLM with {kv_cache}", errors=Exception):
                self._start()
            self.prove(trainer)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start vLLM's processes on the model in the folder."""
        config = self.config
        # without torchrun's variables, which vLLM's processes would take for their own
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)
        }
        options: dict[str, Any] = {
            "model": str(self.folder),
            "dtype": config.dtype,
            "seed": config.seed,
        }
        options |= {
            "max_model_len": config.max_tokens + 1
        }  # the proof samples one token, which is not used
        options |= {"max_num_seqs": min(512, max(config.rollout_batch_size, config.eval_episodes))}
        # "vllm": no repetition penalty or the like from the model's own configuration
        options |= {
            "generation_config": "vllm",
            "worker_extension_cls": f"{__name__}.WorkerExtension",
        }
        options |= {
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if images := len(self.env.reset(seed=0)[0].images):
            options["limit_mm_per_prompt"] = {
                "image": images * (self.env.max_turns + 1),
                "video": 0,
            }
        if config.device == "cpu":
            variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"} | variables
            # seeded replies to prompts cut into chunks kill vLLM here; only full blocks are cached, hence small ones
            options |= {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
        else:  # vLLM gets the GPUs after those of the ranks, or shares the only one
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
                map(str, range(torch.cuda.device_count()))
            )
            gpus = visible.split(",")[ranks:]
            if ranks > 1 and not gpus:
                raise ValueError(
                    f"the {ranks} ranks of this machine must leave a GPU for vLLM, but {visible} are all"
                )
            if gpus:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            options |= (
                {"tensor_parallel_size": len(gpus)}
                if gpus
                else {"gpu_memory_utilization": config.engine_memory}
            )
        with patch.dict(os.environ, {"VLLM_LOGGING_LEVEL": "ERROR"} | variables, clear=True):
            from vllm import LLM

            self.llm = LLM(**options)
        pairs = self.llm.collective_rpc("end_with", args=(os.getpid(), str(self.folder)))
        self.processes = {pid: "vLLM" for pair in pairs for pid in pair if pid != os.getpid()}
        self.llm.collective_rpc(
            "follow_policy", args=(self.policy.suppressed_ids, config.temperature)
        )

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Line 2: sample one reply to each conversation, all in one call of vLLM."""
        from vllm import SamplingParams

        how: dict[str, Any] = {
            "temperature": 1.0,
            "top_k": self.config.top_k,
            "top_p": self.config.top_p,
        }
        how |= {"logprobs": 0, "max_tokens": max_new_tokens, "stop_token_ids": [self.policy.eos_id]}
        seeds = self.rng.integers(2**31, size=len(conversations)).tolist()
        params = [SamplingParams(**how, detokenize=False, seed=seed) for seed in seeds]
        outputs = [
            output.outputs[0]
            for output in self._run("the rollout with vLLM", conversations, params)
        ]
        each = [(list(o.token_ids), zip(o.token_ids, o.logprobs, strict=True)) for o in outputs]
        return [
            Reply(tokens, [logprobs[token].logprob for token, logprobs in pairs])
            for tokens, pairs in each
        ]

    def sync(self, trainer: TorchTrainer) -> dict[str, float]:
        """Line 12, pi_mu <- pi_theta: hand over the weights and prove it. Returns the largest log-prob difference."""
        began = time.perf_counter()
        # a tied output layer is among them: vLLM would keep the old one; a file must not hold two views of one tensor
        weights = {
            name: weight.detach().to("cpu", copy=True) for name, weight in trainer.parameters()
        }
        with watched("handing the weights to vLLM", self.processes, Exception):
            save_file(weights, self.folder / "model.safetensors")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
            # keys, values and images that older weights computed
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM could not reset its prefix cache: it still has requests")
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        return {"sync_error": self.prove(trainer), "sync_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["generator"]

    def close(self) -> None:
        """End vLLM's processes and remove the folder."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, phase: str, conversations: list[Conversation], params: list) -> list:
        """Return vLLM's outputs, after checking its reading of each prompt against ours."""
        requests = []
        for c in conversations:
            tokens = np.array(c.tokens)
            image = tokens == self.policy.image_token_id
            repeated = image & np.append(
                False, image[:-1]
            )  # all placeholders of an image but the first
            shown = (
                {
                    "multi_modal_data": {
                        "image": [Image.fromarray(np.asarray(image)) for image in c.images]
                    }
                }
                if c.images
                else {}
            )
            requests.append({"prompt_token_ids": tokens[~repeated].tolist(), **shown})
        with watched(
            phase, self.processes, Exception
        ):  # what its workers raise arrives as `Exception`
            outputs = self.llm.generate(requests, params, use_tqdm=False)
            if any(output.outputs[0].finish_reason == "abort" for output in outputs):
                time.sleep(10)  # vLLM is ending; `watched` says so as soon as its process is gone
        for c, output in zip(conversations, outputs, strict=True):
            reason = output.outputs[0].finish_reason
            if list(output.prompt_token_ids) != c.tokens or reason not in (
                "stop",
                "length",
            ):  # also "error", "abort"
                raise BackendError(
                    f"{phase}: it misread the prompt of episode seed {c.seed}, or ended with `{reason}`"
                )
        return outputs

    def prove(self, trainer: TorchTrainer) -> float:
        """Return the largest log-prob difference to the trainer on held-out prompts, if at most TOLERANCE allows it."""
        from vllm import SamplingParams

        observations = [
            (seed, self.env.reset(seed=seed)[0]) for seed in range(EVAL_SEEDS, EVAL_SEEDS + PROBES)
        ]
        prompts = [
            Conversation(self.policy.user_turn(o), list(o.images), seed) for seed, o in observations
        ]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        never_sampled, differences = (
            torch.tensor([*self.policy.suppressed_ids, self.policy.image_token_id]),
            [],
        )
        for c, output in zip(
            prompts, self._run("the proof of the sync", prompts, [params] * PROBES), strict=True
        ):
            tokens, zeros = torch.tensor([c.tokens]), torch.zeros(1, len(c.tokens))
            mask = ~torch.isin(tokens, never_sampled)
            mask[0, 0] = False
            expected = trainer.logprobs(
                Batch(tokens, mask, zeros, zeros, [c.images], [len(c.tokens)])
            )[0]
            for t in mask[0].nonzero().flatten().tolist():
                differences.append(
                    abs(output.prompt_logprobs[t][c.tokens[t]].logprob - expected[t].item())
                )
        error, allowed = float(np.max(differences)), TOLERANCE[self.config.dtype]
        if not error <= allowed:  # also if it is not a number
            found = (
                f"log-probs of the same tokens differ by up to {error:.2g}, allowed is {allowed:g}"
            )
            raise BackendError(f"vLLM does not compute with the trainer's weights: {found}")
        return error


class WorkerExtension:
    """Methods that vLLM adds to its workers, where `collective_rpc` calls them by name."""

    def follow_policy(self: Any, suppressed_ids: list[int], temperature: float) -> None:
        """Make logits those of Policy.logits at the temperature: -inf for ids that are never sampled."""
        model, silent = (
            self.model_runner.get_model(),
            torch.tensor(suppressed_ids).long().to(self.device),
        )
        original = model.compute_logits

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = original(*arguments, **options)
            sampled = logits is not None  # not so on tensor-parallel ranks that do not sample
            return (
                (logits.float() / temperature).index_fill_(1, silent, -torch.inf)
                if sampled
                else None
            )

        model.compute_logits = compute_logits

    def end_with(self, trainer: int, folder: str) -> tuple[int, int]:
        """End, and with this process all of vLLM, if the trainer's is killed. Returns its id and that of the core."""

        def watch() -> None:
            while alive(trainer):
                time.sleep(1.0)
            shutil.rmtree(folder, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        return os.getpid(), os.getppid()
