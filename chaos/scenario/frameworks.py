"""The table of training frameworks: how each is recognised, what its lines look like, how its steps
count, and what makes it say more. ``chaos init``, the presets of ``workload.progress`` and
``chaos try-progress`` read it; a new framework is one row.

Each form was written from the public source that it names; the lines are theirs, the expressions
ours. Rules that hold for all of them are in ``harness.script.listen.rules``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NUMBER = r"\d[\d,_]*(?:\.\d+)?(?:e\+?\d+)?"
"""A count as it is printed: ``1,200``, ``4.000``, ``2e+3``."""
_LOSS_KEY = r"(?<![\w/.])(?![\w/]*(?:val|eval|test)\w*[_/])(?:[\w/]+[_/])?loss(?:_step)?"
"""The name of a training loss, not ``val_loss`` or ``eval/loss``, nor ``loss_epoch``."""
_IN_BAR = rf"(?:[^\]]*?{_LOSS_KEY}=(?P<loss>[^,\]\s]+))?"
_OF = r"/(?P<of>\d[\d,_]*|\?)"
_DONE = rf"(?P<step>\d[\d,_]*)(?:{_OF}|(?:it|steps?|batch(?:es)?)) \["
"""What a bar of tqdm states: ``5/20 [``, ``5/? [`` without a total, or ``5it [``."""
BARS = "https://github.com/tqdm/tqdm/blob/master/tqdm/std.py"


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of the lines of a step. ``step``: an expression as ``workload.progress.regex``, in
    which an empty group ``epoch`` stands for the epoch of the line before, and ``of`` may be a
    question mark; ``source``: where these lines are printed.
    """

    step: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework. ``imports``: modules whose import shows it in a script; ``text``, ``words``:
    further expressions for the script's text and for its command; ``preset``: the name of its
    ``forms``; ``loss``: an expression for losses in lines of their own; ``epochs_from``,
    ``steps_from``: as in ``workload.progress``, None if each script counts as it likes; ``bars``:
    they are drawn before the first step as well; ``every``: what makes it print each step;
    ``hook``: the line that has it report to the beacon; ``group``: variable that names a replica
    group; ``hidden``: the environment of its ranks does not say their ranks; ``env``: variables
    that its output needs to be read; ``unset``: variables of a launcher with which its ranks do not
    start; ``note``: for people.
    """

    name: str
    imports: tuple[str, ...] = ()
    text: str = ""
    words: str = ""
    preset: str = ""
    forms: tuple[Form, ...] = ()
    loss: str | None = None
    epochs_from: int | None = 0
    steps_from: int | None = 1
    bars: bool = False
    every: str = ""
    hook: str = ""
    group: str = ""
    hidden: bool = False
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unset: frozenset[str] = frozenset()
    note: str = ""

    def shown_by(self, text: str, words: str) -> bool:
        """Whether the text of a script or the words of its command show it."""
        names = "|".join(map(re.escape, self.imports))
        signs = [rf"(?m)^\s*(?:import|from)\s+(?:{names})\b"] if names else []
        signs += [self.text] if self.text else []
        return any(re.search(one, text) for one in signs) or bool(
            self.words and re.search(self.words, words)
        )


_LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/"
_HOOK = "from trainchaos.chaos.integrations.{} import {}"
_CALLBACK = "callbacks=[ChaosCallback()]"
_BAR = Form(step=f"{_DONE}{_IN_BAR}", source=BARS)
_EPOCH_BAR = Form(
    step=rf"Epoch (?P<epoch>\d+)(?:/\d+)?:.*?{_DONE}{_IN_BAR}",
    source=f"{_LIGHTNING}callbacks/progress/tqdm_progress.py",
)
FRAMEWORKS = (
    Framework(
        name="torchft",
        imports=("torchft",),
        words=r"\btorchft\b",
        preset="torchft",
        forms=(
            Form(
                step=r"\[(?P<step>\d+)\] loss = (?P<loss>\S+)",
                source="https://github.com/pytorch/torchft/blob/main/train_ddp.py",
            ),
        ),
        group="REPLICA_GROUP_ID",
        # its Manager connects to the store of torchrun, and opens none:
        # https://github.com/pytorch/torchft/blob/main/torchft/manager.py
        unset=frozenset({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}),
    ),
    Framework(
        name="torchtitan",
        imports=("torchtitan",),
        words=r"\btorchtitan\b|--job\.config[_-]file\b",
        preset="torchtitan",
        forms=(
            Form(
                step=r"(?:\[rank(?P<rank>\d+)\]:.*?)?\bstep:\s*(?P<step>\d[\d,]*)\s+loss:\s*"
                r"(?P<loss>\S+)",
                source="https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/"
                "metrics.py",
            ),
        ),
        every="--metrics.log_freq 1",
        hook=f"{_HOOK.format('torchtitan', 'install')}; install()",
    ),
    Framework(
        name="NeMo",
        imports=("nemo", "nemo_run"),
        preset="nemo",
        forms=(
            Form(
                step=r"\bTraining epoch \d+, iteration \d+/\d+ "
                rf".*?\bglobal_step: (?P<step>{NUMBER})"
                r"(?:.*?\breduced_train_loss: (?P<loss>\S+))?",
                source="https://github.com/NVIDIA/NeMo/blob/main/nemo/lightning/pytorch/callbacks/"
                "progress_printer.py",
            ),
            Form(
                step=r"\bTraining epoch \d+, iteration (?P<step>\d+)/\d+"
                r"(?:.*?\breduced_train_loss: (?P<loss>\S+))?",
                source="the same, where the step is not logged",
            ),
            _EPOCH_BAR,
        ),
        epochs_from=None,
        bars=True,
        hook=f"{_HOOK.format('lightning', 'ChaosCallback')}; {_CALLBACK}",
    ),
    Framework(
        name="Megatron-LM",
        imports=("megatron",),
        words=r"\bpretrain_\w+\.py\b|--tensor-model-parallel-size\b|--micro-batch-size\b",
        preset="megatron",
        forms=(
            Form(
                step=r"\biteration\s+(?P<step>\d+)/\s*\d+ \|(?:.*?\blm loss:\s*(?P<loss>\S+))?",
                source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/"
                "training.py",
            ),
        ),
        every="--log-interval 1",
    ),
    Framework(
        name="Lightning",
        imports=("lightning", "pytorch_lightning"),
        preset="lightning",
        forms=(
            _EPOCH_BAR,
            Form(
                step=rf"\bTraining:(?P<epoch>).*?{_DONE}{_IN_BAR}",
                source="the same: the bar of an epoch that a resumed job is in the middle of",
            ),
            Form(
                step=r"Epoch (?P<epoch>\d+)/-?\d+ .*?\s(?P<step>\d+)/(?P<of>\d+|--) +\d+:\d\d:\d\d"
                # without a newline, what is printed next follows at once
                rf"(?:.*?{_LOSS_KEY}: *(?P<loss>[^\s`\[]+))?",
                source=f"{_LIGHTNING}callbacks/progress/rich_progress.py",
            ),
        ),
        epochs_from=None,
        bars=True,
        every="callbacks=[TQDMProgressBar(refresh_rate=1)]",
        # https://rich.readthedocs.io/en/stable/console.html#interactive-mode
        env=MappingProxyType({"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}),
        hook=f"{_HOOK.format('lightning', 'ChaosCallback')}; {_CALLBACK}",
    ),
    Framework(
        name="Ray Train",
        imports=("ray.train",),
        text=r"(?m)^\s*from\s+ray\s+import\s+[^\n]*\btrain\b",
        hidden=True,
        # https://docs.ray.io/en/latest/ray-observability/user-guides/configure-logging.html
        env=MappingProxyType({"RAY_DEDUP_LOGS": "0"}),
        note="workers of a cluster that runs already do not descend from the command: their ranks"
        " are not found",
    ),
    Framework(
        name="Hugging Face Trainer",
        imports=("transformers", "trl"),
        preset="hf",
        forms=(
            Form(
                step=r"(?P<step>\d+)/(?P<of>\d+) \[",
                source="https://github.com/huggingface/transformers/blob/main/src/transformers/"
                "trainer_callback.py",
            ),
        ),
        loss=r"\{(?:[^{}]*, )?['\"]loss['\"]: ['\"]?(?P<loss>[^'\",}]+)",
        bars=True,
        every="TrainingArguments(logging_steps=1)",
        hook=f"{_HOOK.format('hf', 'ChaosCallback')}; {_CALLBACK}",
    ),
    Framework(
        name="DeepSpeed",
        imports=("deepspeed",),
        preset="deepspeed",
        forms=(
            Form(
                step=r"\bsteps?[=:]\s*(?P<step>\d+)\b(?:,| loss:\s*(?P<loss>\S+))",
                source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/"
                "engine.py and pipe/engine.py",
            ),
            Form(
                step=r"\bepoch=\d+/micro_step=\d+/global_step=(?P<step>\d+),",
                source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/timer.py",
            ),
        ),
        every='"steps_per_print": 1 and "log_level": "info" in its configuration',
        hook=f"{_HOOK.format('deepspeed', 'watch')}; watch(engine)",
    ),
    Framework(
        name="Accelerate",
        imports=("accelerate",),
        hook=f"{_HOOK.format('accelerate', 'watch')}; watch(accelerator, model, optimizer)",
    ),
    Framework(
        name="nanotron",
        imports=("nanotron",),
        preset="nanotron",
        forms=(
            Form(
                step=r"\biteration: (?P<step>\d+) / (?P<of>\d+) \|"
                r"(?:.*?\blm_loss: (?P<loss>[^\s|]+))?",
                source="https://github.com/huggingface/nanotron/blob/main/src/nanotron/trainer.py",
            ),
        ),
        every="logging: {iteration_step_info_interval: 1} in its configuration",
    ),
    Framework(
        name="litgpt",
        imports=("litgpt",),
        words=r"\blitgpt (?:pretrain|finetune)",
        preset="litgpt",
        forms=(
            Form(
                # the count of steps that are done: 0 is none
                step=r"\biter \d+ step (?P<step>[1-9]\d*) \| loss train: (?P<loss>[^\s,]+)",
                source="https://github.com/Lightning-AI/litgpt/blob/main/litgpt/pretrain.py",
            ),
            Form(
                step=r"\biter \d+:? step (?P<step>[1-9]\d*): loss (?P<loss>[^\s,]+)",
                source="the same, before 0.3",
            ),
        ),
        every="--train.log_interval 1",
    ),
    Framework(
        name="OLMo",
        imports=("olmo", "olmo_core"),
        preset="olmo",
        forms=(
            Form(
                step=r"\[step=(?P<step>\d+)/(?P<of>\d+)[,\]]",
                source="https://github.com/allenai/OLMo/blob/main/olmo/train.py",
            ),
        ),
        loss=r"(?:^|\s)train/[\w ]*[Ll]oss=(?P<loss>\S+)",
        every="--console_log_interval=1",
    ),
    Framework(
        name="MMEngine",
        imports=("mmengine", "mmcv", "mmdet", "mmseg", "mmpretrain", "mmpose"),
        preset="mmengine",
        forms=(
            Form(
                step=r"\bEpoch\(train\) *\[(?P<epoch>\d+)\]\[ *(?P<step>\d+)/(?P<of>\d+)\]"
                r"(?:.*? loss: (?P<loss>\S+))?",
                source="https://github.com/open-mmlab/mmengine/blob/main/mmengine/runner/"
                "log_processor.py",
            ),
            Form(
                step=r"\bIter\(train\) *\[ *(?P<step>\d+)/(?P<of>\d+)\]"
                r"(?:.*? loss: (?P<loss>\S+))?",
                source="the same, by_epoch=False",
            ),
            Form(
                step=r"\bEpoch \[(?P<epoch>\d+)\]\[(?P<step>\d+)/(?P<of>\d+)\]"
                r"(?:.*? loss: (?P<loss>[^\s,]+))?",
                source="https://github.com/open-mmlab/mmcv/blob/1.x/mmcv/runner/hooks/logger/text.py",
            ),
            Form(
                step=r"\bIter \[(?P<step>\d+)/(?P<of>\d+)\](?:.*? loss: (?P<loss>[^\s,]+))?",
                source="the same, by_epoch=False",
            ),
        ),
        epochs_from=1,
        every="default_hooks.logger.interval=1",
    ),
    Framework(
        name="Ultralytics",
        imports=("ultralytics",),
        words=r"(?:^|[ /])yolo \w+ train\b|(?:^|[ /])yolo train\b",
        preset="ultralytics",
        forms=(
            Form(
                # epoch, memory, the losses (the first is that of the boxes), instances, size, bar
                step=r"(?:^|\s)(?P<epoch>\d+)/\d+\s+[\d.]+[GMK]?B?\s+(?P<loss>[\d.e+-]+|nan|inf)\s"
                r"[^:]*:.*?\s(?P<step>\d+)/(?P<of>\d+) ",
                source="https://github.com/ultralytics/ultralytics/blob/main/ultralytics/engine/"
                "trainer.py",
            ),
        ),
        epochs_from=1,
        bars=True,
    ),
    Framework(
        name="RETURNN",
        imports=("returnn",),
        words=r"\b(?:returnn|rnn)\.py\b",
        preset="returnn",
        forms=(
            Form(
                step=r"\bep (?P<epoch>\d+) train, step (?P<step>\d+), [\w:./-]+ (?P<loss>[^\s,]+)",
                source="https://github.com/rwth-i6/returnn/blob/master/returnn/torch/engine.py",
            ),
            Form(
                step=r"\b(?:pre)?train epoch (?P<epoch>\d+), step (?P<step>\d+), [\w:./-]+ "
                r"(?P<loss>[^\s,]+)",
                source="https://github.com/rwth-i6/returnn/blob/master/returnn/tf/engine.py",
            ),
        ),
        epochs_from=1,
        steps_from=0,
        every="log_verbosity = 5 in its configuration",
    ),
    Framework(
        name="fairseq",
        imports=("fairseq", "fairseq_cli"),
        words=r"\bfairseq-(?:hydra-)?train\b",
        preset="fairseq",
        forms=(
            Form(
                step=r"\bepoch \d+[ :|].*?\bloss=(?P<loss>[^\s,]+).*?\bnum_updates=(?P<step>\d+)",
                source="https://github.com/facebookresearch/fairseq/blob/main/fairseq/logging/"
                "progress_bar.py",
            ),
            Form(
                step=r"\btrain_inner \| \{.*?\"loss\": \"?(?P<loss>[^\",}]+).*?\"num_updates\": "
                r"\"?(?P<step>\d+)",
                source="the same, --log-format json",
            ),
        ),
        every="--log-interval 1 --log-format simple",
    ),
    Framework(
        name="nanoGPT",
        preset="nanogpt",
        forms=(
            Form(
                step=r"\biter (?P<step>\d+): loss (?P<loss>\S+)",
                source="https://github.com/karpathy/nanoGPT/blob/master/train.py",
            ),
        ),
        every="--log_interval=1",
    ),
    Framework(
        name="ImageNet example",
        preset="imagenet",
        forms=(
            Form(
                step=r"\bEpoch: *\[(?P<epoch>\d+)\]\s*\[ *(?P<step>\d+)/(?P<of>\d+)\]"
                r"(?:.*?\b[Ll]oss:? (?P<loss>\S+))?",
                source="https://github.com/pytorch/examples/blob/main/imagenet/main.py and"
                " https://github.com/pytorch/vision/blob/main/references/classification/utils.py",
            ),
            Form(
                step=r"\bTrain: (?P<epoch>\d+) \[ *(?P<step>\d+)/(?P<of>\d+) "
                r"(?:.*?\bLoss: +(?P<loss>\S+))?",
                source="https://github.com/huggingface/pytorch-image-models/blob/main/train.py",
            ),
        ),
        epochs_from=None,
        steps_from=None,
        every="--print-freq 1",
    ),
    Framework(name="tqdm", preset="tqdm", forms=(_BAR,), bars=True, every="tqdm(mininterval=0)"),
    Framework(
        name="multiprocessing",
        text=r"\b(?:mp|multiprocessing)\.(?:spawn|Process|start_processes)\(",
        hidden=True,
        note="a rank that is set after its process started is not in its environment",
    ),
)
"""In the order in which their presets are tried."""
