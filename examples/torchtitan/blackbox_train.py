"""torchtitan's own trainer with its llama3 debug model under torchrun, on CPUs with gloo.

torchtitan 0.3.0 takes a machine without an accelerator for one with CUDA, and its trainer ends in
``torch.cuda.set_device``; here it is told that the device is the CPU. Where there is a GPU, it runs
on it as ever.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

from trainchaos.chaos.integrations.torchtitan import install


class Cpu:
    """What torchtitan asks of the module of a device."""

    set_device = staticmethod(torch.cpu.set_device)
    device_count = staticmethod(torch.cpu.device_count)
    synchronize = staticmethod(torch.cpu.synchronize)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device=None: "CPU")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device=None: {})
    reset_peak_memory_stats = staticmethod(lambda: None)
    empty_cache = staticmethod(lambda: None)


if not torch.accelerator.is_available():
    utils.device_type, utils.device_module = "cpu", Cpu  # before the trainer is imported
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13; torchtitan 0.3.0 wants a newer one
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from datasets import Dataset  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

STEPS = int(os.environ.get("CHAOS_STEPS", "30"))
FOLDER = Path(os.environ.get("CHAOS_SCRATCH", "."))


class Bytes(BaseTokenizer):
    """A token is a byte: the wheel of torchtitan brings no tokenizer, and no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config=None, *, tokenizer_path=""):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, **_):
        """See BaseTokenizer."""
        return [*text.encode(), self.eos_id]

    def decode(self, tokens, **_):
        """See BaseTokenizer."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self):
        """See BaseTokenizer."""
        return 256


def text(_path):
    """Lines that can be learned."""
    rows = [{"text": " ".join(str(n + k) for k in range(60))} for n in range(500)]
    return Dataset.from_list(rows)


DATASETS["counting"] = DatasetConfig(path="", loader=text, sample_processor=lambda row: row["text"])


def config():
    """torchtitan's own configuration of the debug model, smaller, and with the attention that a CPU
    can train.
    """
    made = llama3_debugmodel_ce_loss()
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.parallelism.spmd_backend = "partial_dtensor"  # its default needs a torch after 2.13
    made.tokenizer = Bytes.Config()
    made.dataloader.dataset = "counting"
    made.validator.enable = False
    made.dump_folder = str(FOLDER)
    made.checkpoint = replace(made.checkpoint, enable=True, interval=10)
    made.training = replace(
        made.training,
        local_batch_size=4,
        seq_len=64,
        steps=STEPS,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    return made


def main():
    """As torchtitan.train does."""
    torch.set_num_threads(1)
    init_logger()
    install()
    trainer = config().build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
