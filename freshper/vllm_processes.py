"""The processes of vLLM: how they are started, and how weights reach them on GPUs. See freshper/engine_vllm.py.

Paper: Algorithm 1 line 12; section 4.1. `WorkerExtension` runs inside vLLM's workers, the rest in rank 0.

Run and tested: starting on a CPU, and the extension. Written after vLLM 0.32's documentation and not run, for want
of a GPU: GPUs of vLLM's own with NCCL, a shared GPU with CUDA IPC.
"""

import base64
import contextlib
import math
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from freshper.backends import BackendError, free_port
from freshper.config import Config
from freshper.models import Policy
from freshper.trainer import TorchTrainer

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "CROSS_")


class WorkerExtension:
    """Methods that vLLM adds to its workers; they run there, called by name (`collective_rpc`)."""

    model_runner: Any  # the worker's own
    device: Any

    def follow_policy(self, suppressed_ids: list[int], temperature: float) -> None:
        """Logits as Policy.logits makes them, at the sampling temperature: -inf for ids that are never sampled."""
        model = self.model_runner.get_model()
        original, silent = model.compute_logits, torch.tensor(suppressed_ids, dtype=torch.long, device=self.device)

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = original(*arguments, **options)
            if logits is None:  # on tensor-parallel ranks that do not sample
                return None
            return (logits.float() / temperature).index_fill_(1, silent, -torch.inf)

        model.compute_logits = compute_logits

    def end_with(self, trainer: int, folder: str) -> tuple[int, int]:
        """Watch the trainer's process: vLLM's own, and the weights in shared memory, would outlive it if killed.
        Returns those to be watched in turn, of this worker and of vLLM's core."""
        core = os.getppid()  # vLLM's core, or the trainer itself where core and worker are one process

        def watch() -> None:
            while Path(f"/proc/{trainer}").exists():
                time.sleep(1.0)
            shutil.rmtree(folder, ignore_errors=True)
            if core != trainer:
                os.kill(core, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        return os.getpid(), core

    def squared_norms(self) -> dict[str, float]:
        """|w|^2 of every parameter as the worker computes with it."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        norms = {}
        for prefix, module in self.model_runner.get_model().named_modules():
            for name, weight in module.named_parameters(prefix, recurse=False):
                w = weight.detach()
                if hasattr(module, "cpu_linear") and (not w.numel() or isinstance(module, ParallelLMHead)):
                    # a CPU kernel computes with a copy of its own and has freed the original, but not that of an
                    # embedding, which a tied output layer shares: W = (I W^T)^T
                    size = getattr(module, "input_size_per_partition", None) or module.embedding_dim
                    w = module.cpu_linear(torch.eye(size, dtype=w.dtype), w, None)
                if w.numel():
                    norms[name] = w.double().square().sum().item()
        return norms


def start_vllm(policy: Policy, config: Config, folder: Path) -> tuple[Any, list[int]]:
    """Start vLLM's processes on the model in `folder`, with the launcher's variables out of their sight. An `LLM`, and
    the numbers of its processes."""
    c = config
    env = c.make_env()
    pictures = len(env.reset(seed=0)[0].images) * (env.max_turns + 1)
    options: dict[str, Any] = {}
    variables = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if c.device == "cpu":
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
        # a prompt cut into chunks kills vLLM here: it would rewind the generator of a seeded reply, and those of a CPU
        # cannot be; small blocks, since only whole ones are cached
        options = {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
    elif c.rollout_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus(c))
        # the other way of sampling with tensor parallelism does not call `compute_logits` (`follow_policy`)
        options = {"tensor_parallel_size": c.rollout_gpus, "enable_batch_sharded_sampling": False}
    else:
        # IPC handles are Python objects, which vLLM's workers unpickle only when told to
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        options = {"enable_sleep_mode": True}
    with launched_alone(variables):
        from vllm import LLM

        if c.device != "cpu":
            from vllm.config import WeightTransferConfig

            backend = "nccl" if c.rollout_gpus else "ipc"
            options |= {"weight_transfer_config": WeightTransferConfig(backend=backend)}
            options |= {"gpu_memory_utilization": c.engine_memory}
        if pictures:
            options["limit_mm_per_prompt"] = {"image": pictures, "video": 0}
        try:
            llm = LLM(
                model=str(folder),
                dtype=c.dtype,
                seed=c.seed % 2**32,
                max_model_len=c.max_tokens + 1,  # the proof samples one token that no one reads
                max_num_seqs=min(512, max(c.rollout_batch_size, c.eval_episodes)),
                enable_prefix_caching=True,
                generation_config="vllm",  # no repetition penalty or the like from the model's own
                disable_log_stats=True,
                worker_extension_cls="freshper.vllm_processes.WorkerExtension",
                **options,
            )
        except (RuntimeError, ValueError) as error:
            room = "VLLM_CPU_KVCACHE_SPACE (GiB)" if c.device == "cpu" else f"--engine_memory {c.engine_memory:g}"
            raise BackendError(
                f"vLLM could not start, and has said why above; if its KV cache has no room for a conversation of "
                f"--max_tokens {c.max_tokens}, lower that or raise {room} ({error})"
            ) from error
    found = {pid for pair in llm.collective_rpc("end_with", args=(os.getpid(), str(folder))) for pid in pair}
    llm.collective_rpc("follow_policy", args=(policy.suppressed_ids, c.temperature))
    return llm, sorted(found - {os.getpid()})


def open_transfer(llm: Any, config: Config, trainer: TorchTrainer) -> Any:
    """Open the path that weights take on GPUs; its `send_weights()` is a whole sync. Raises BackendError where this
    vLLM has another one than 0.32."""
    import vllm

    try:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise BackendError(
            f"vLLM is {vllm.__version__}, whose way to hand over weights is another than that of 0.32 ({error}); "
            "requirements-gpu.txt has the version"
        ) from error

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, dtype, shape) for name, dtype, shape in trainer.shapes()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return trainer.weights()

    if config.rollout_gpus:
        info = NCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + config.rollout_gpus, rank=0)
    else:
        # a tensor travels whole: the embedding of the 7B model is more than the usual buffer of 1 GiB
        largest = max(dtype.itemsize * math.prod(shape) for _, dtype, shape in trainer.shapes())
        info = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=max(2**28, largest), rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=Client(llm), source=Source())


class Client:
    """What the sender of weights asks of vLLM, for an LLM in this process (vLLM's VLLMWeightSyncClient)."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.start_weight_update, self.finish_weight_update = llm.start_weight_update, llm.finish_weight_update

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict) -> None:
        if handles := update_info.pop("ipc_handles", None):  # a message holds no Python objects, hence as text
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self.llm.update_weights({"update_info": update_info})


def own_gpus(config: Config) -> list[str]:
    """vLLM's GPUs on the machine of rank 0: those after its ranks', or what FRESHPER_ROLLOUT_DEVICES names (DeepSpeed's
    launcher hides from a rank all GPUs but the trainer's). Raises ValueError where there are too few."""
    if named := os.environ.get("FRESHPER_ROLLOUT_DEVICES"):
        own = named.split(",")
        if len(own) != config.rollout_gpus:
            raise ValueError(f"--rollout_gpus is {config.rollout_gpus}, but FRESHPER_ROLLOUT_DEVICES is {named}")
        return own
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
    if len(gpus) < ranks + config.rollout_gpus:
        raise ValueError(
            f"--rollout_gpus is {config.rollout_gpus}, but there are {len(gpus)} GPUs, {ranks} of them the trainer's"
        )
    return gpus[ranks : ranks + config.rollout_gpus]


def check_vllm(policy: Policy, config: Config) -> None:
    """Before anything is written: raises ValueError where vLLM cannot run this model here."""
    if config.rollout_gpus:
        own_gpus(config)
    c = policy.model.config.get_text_config()
    if config.max_tokens >= c.max_position_embeddings:
        raise ValueError(
            f"--max_tokens is {config.max_tokens}, but must be below the {c.max_position_embeddings} positions of the "
            "model, where --engine is vllm"
        )
    if config.device != "cpu":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        known = ", ".join(map(str, sizes))
        raise ValueError(
            f"--engine is vllm, which on a CPU needs attention heads of size {known}; the model's are {size}"
        )


@contextlib.contextmanager
def launched_alone(variables: dict[str, str]) -> Iterator[None]:
    """For processes started inside the block: torchrun's variables are gone, `variables` are set unless they were."""
    before = dict(os.environ)
    for name in before:
        if name in LAUNCHER or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ.update({k: v for k, v in variables.items() if k == "CUDA_VISIBLE_DEVICES" or k not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
