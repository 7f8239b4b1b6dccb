"""train.py with options for vLLM that it has no flags for: a KV cache of a few blocks. For test_train_for_real.py.

    python tests/engines/other_options.py '{"num_gpu_blocks_override": 7}' [flags of train.py]

At the end of the run it prints how often vLLM took a conversation's part of the cache away: `preempted: 12`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from freshper.engine_vllm import VLLMEngine


def main(options: str, *flags: str) -> int:
    start, close = vllm.LLM, VLLMEngine.close

    def started(**ours: Any) -> vllm.LLM:
        return start(**ours | json.loads(options) | {"disable_log_stats": False})

    def closed(engine: VLLMEngine) -> None:
        if engine.llm is not None:
            counts = {metric.name: metric for metric in engine.llm.get_metrics()}
            print(f"preempted: {counts['vllm:num_preemptions'].value}")
        close(engine)

    vllm.LLM, VLLMEngine.close = started, closed
    return train.main(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
