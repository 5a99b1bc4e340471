"""What a script attaches: a model, and an optimizer and a scheduler or functions that make them.

A model that several ranks hold together has other parameters than the model as built, and a process
learns which part it holds only when it gets a rank. It is cut up, and its optimizer made, then, by
the script's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from trainchaos.recovery.collectives.elastic import ElasticReducer
from trainchaos.recovery.collectives.lasting.job_mesh import JobGroups
from trainchaos.recovery.collectives.lasting.wrapper import let_job_reduce, wrappers_in
from trainchaos.recovery.collectives.lost import require_no_group
from trainchaos.recovery.collectives.reduce import GradientReducer
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.rank.step import StepInProgress
from trainchaos.recovery.state.called import CalledHook, hook_parts
from trainchaos.recovery.state.cell import Cell, dims_of, spread_over
from trainchaos.recovery.state.misuse import serve_backward
from trainchaos.recovery.state.naming import named_parameters
from trainchaos.recovery.state.registered import MakeScheduler, Scheduler, is_scheduler
from trainchaos.recovery.state.state import TrainState

if TYPE_CHECKING:
    from trainchaos.recovery.collectives.sharded import ShardedReducer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


@dataclass
class ModelRecipe:
    """``optimizer``, ``scheduler``: objects, or functions of the model's parameters and of the
    optimizer; ``units``: the parts of a sharded model that are gathered at once; ``parallelize``:
    returns the model, or this rank's stage of it, for the mesh of the job.
    """

    model: nn.Module
    optimizer: Optimizer | MakeOptimizer
    scheduler: Scheduler | MakeScheduler | None
    units: Sequence[nn.Module] | None
    parallelize: Parallelize | None = None
    _shard: int | None = field(default=None, init=False)

    def check(self, *, shards: int, mesh: Mesh | None = None) -> None:
        """Raise TypeError where the script has made what only the job can make, or has not said how
        its model is cut up.
        """
        if mesh is not None and not mesh.plain and self.parallelize is None:
            raise TypeError(
                f"a replica is {mesh.described()}, and only the script knows how its model is cut"
                " up: give job.attach a function of the model and the mesh that returns it, as in"
                " parallelize=lambda model, mesh: parallelize_module(model, mesh['tensor'], plan)"
            )
        if shards == 1:
            return
        if wrappers_in(self.model):
            raise TypeError(
                f"a model that is spread over {shards} ranks is not wrapped in"
                " DistributedDataParallel: attach the model itself"
            )
        from trainchaos.recovery.collectives.buckets import check_types
        from trainchaos.recovery.collectives.sharding import FSDPModule

        check_types(dict(self.model.named_parameters()))
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise TypeError(
                "attach the model before fully_shard: the job shards it once its rank is known"
            )
        if isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"the model is spread over {shards} ranks, which replaces its parameters: attach a"
                " function that makes the optimizer, as in optimizer=lambda parameters:"
                " AdamW(parameters)"
            )
        if is_scheduler(self.scheduler):
            raise TypeError(
                "the optimizer is made by the job: attach a function that makes its scheduler, as"
                " in scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 100)"
            )

    def make(self) -> tuple[Optimizer, Scheduler | MakeScheduler | None]:
        """Make the optimizer of the model as it is now; its scheduler, or a function that makes it.
        Raises TypeError for what is no optimizer of torch's.
        """
        optimizer: Any = self.optimizer
        if not isinstance(optimizer, Optimizer) and callable(optimizer):
            optimizer = optimizer(list(self.model.parameters()))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer, whose state and parameter"
                " groups the job saves and copies: derive it from that, or give a function that"
                " makes one from the list of parameters"
            )
        return optimizer, self.scheduler

    def take_part(
        self,
        rank: int,
        layout: Layout,
        *,
        state: TrainState,
        reducer: ShardedReducer,
        groups: JobGroups,
        mesh: Mesh,
    ) -> bool:
        """Cut the model up as this rank needs it; False if that was done before.

        Raises RuntimeError when the process already holds another part, which it keeps for life, or
        is given a part without parameters.
        """
        shard = layout.shard_of(rank)
        if self._shard is not None:
            if shard != self._shard:
                raise RuntimeError(
                    f"this process holds shard {self._shard}, and is to be shard {shard}"
                )
            return False
        names = list(named_parameters(self.model))
        if self.parallelize is not None:
            self.model = self.parallelize(self.model, groups.mesh)
            if next(self.model.parameters(), None) is None:
                raise RuntimeError(
                    f"what parallelize returned for {mesh.described()}, cell {shard}, has no"
                    " parameters: give each stage some of the model"
                )
            self._keep_whole_along_context()
        if mesh.shard > 1:
            self._shard_model(reducer, groups)
        self._shard = shard
        cell = None if mesh.plain else Cell(mesh=mesh, number=shard)
        state.adopt(*self.make(), model=self.model, cell=cell)
        reducer.adopt(self.model, cell, names)
        return True

    def _keep_whole_along_context(self) -> None:
        """Raise RuntimeError for a parameter that is a DTensor along ``context``: torch would sum
        its gradients over it, and so would the job.
        """
        for name, parameter in named_parameters(self.model).items():
            if "context" in dims_of(parameter):
                raise RuntimeError(
                    f"parallelize put parameter {name} on a mesh with job.mesh['context'], whose"
                    " ranks hold the same parameters, as replicas do: the job sums the gradients"
                    " over it. Use a mesh of the other dimensions"
                )

    def _shard_model(self, reducer: ShardedReducer, groups: JobGroups) -> None:
        """Unless ``parallelize`` has done so."""
        from trainchaos.recovery.collectives import sharding

        if not sharding.is_sharded(self.model):
            units = sharding.default_units(self.model) if self.units is None else self.units
            sharding.shard_model(self.model, units, mesh=groups.mesh["shard"], exchange=reducer)
            return
        for name, parameter in named_parameters(self.model).items():
            if "shard" not in spread_over(parameter):
                raise RuntimeError(
                    f"parallelize called fully_shard on a part of the model, but {name} is not"
                    " spread over the ranks of job.mesh['shard']: shard all of the model along it,"
                    " or nothing"
                )
        sharding.connect(self.model, reducer)


class Attached:
    """What training changes on this rank: ``state`` (the model with its optimizer and scheduler),
    ``reducer``, which sums its gradients over the ranks, and ``groups``, what torch calls through:
    None before this process is ready, of a sharded model before the first generation, and where the
    script has a process group of its own. ``wrapped``: the model came in DistributedDataParallel.

    ``entering``: called with a running number before each collective; ``progress``: hears when the
    model, and a part of it, is called, and when ranks of a replica wait for each other. Raises
    TypeError as ``Job.attach``.
    """

    def __init__(
        self,
        recipe: ModelRecipe,
        config: JobConfig,
        *,
        entering: Callable[[int], None],
        progress: StepInProgress,
    ) -> None:
        recipe.check(shards=config.shards, mesh=config.mesh)
        self.wrapped = bool(wrappers_in(recipe.model))
        if self.wrapped:
            recipe.model = let_job_reduce(recipe.model)
            serve_backward()
        self.groups: JobGroups | None = None
        self._recipe = recipe
        self._config = config
        self._sharded: ShardedReducer | None = None
        made = (None, None) if config.shards > 1 else recipe.make()
        self.state = TrainState(recipe.model, *made, seed=config.seed)
        self.reducer = self._make_reducer(entering)
        self.reducer.waiting = progress.exchange
        self._forward = CalledHook(progress.forward)
        self._hook = recipe.model.register_forward_pre_hook(self._forward)
        if config.shards == 1:  # else its collectives notice
            hook_parts(recipe.model, progress.passing)

    def _make_reducer(
        self, entering: Callable[[int], None]
    ) -> ShardedReducer | GradientReducer | ElasticReducer:
        model, config = self._recipe.model, self._config
        if config.shards == 1:
            chosen = ElasticReducer if config.determinism == "elastic" else GradientReducer
            return chosen(model, max_world=config.world, entering=entering)
        from trainchaos.recovery.collectives.sharded import ShardedReducer

        self._sharded = ShardedReducer(model, entering=entering)
        return self._sharded

    def rehearse(self) -> None:
        """Do what is slow the first time, before other ranks wait for it."""
        shard = self._config.arranged.shard
        if shard > 1:
            from trainchaos.recovery.collectives import sharding

            sharding.rehearse(shard, self._config.device)
        elif self._sharded is not None:
            require_no_group()
        else:
            self._make_groups(Layout(world=self._config.world), rank=0)  # rank and world follow
        self.reducer.rehearse()
        if self._config.backend == "gloo" and self._config.device != "cpu":
            self.reducer.pin()

    def take_part(self, rank: int, layout: Layout) -> bool:
        """Make the groups that torch calls through, and cut the model up, where it has to be and is
        not yet. Returns whether it was cut up. Raises RuntimeError when this process cannot hold
        the part that the rank needs.
        """
        config, mesh = self._config, self._config.arranged
        if layout.shards != config.shards:
            raise RuntimeError(
                f"a job of {config.shards} shards is told that there are {layout.shards}"
            )
        self._make_groups(layout, rank)
        if self._sharded is None or self.groups is None:
            return False
        cut = self._recipe.take_part(
            rank, layout, state=self.state, reducer=self._sharded, groups=self.groups, mesh=mesh
        )
        if cut:
            self._hook.remove()  # the sharded model's own hook comes before this one
            self._hook = self.state.model.register_forward_pre_hook(self._forward, prepend=True)
        return cut

    def _make_groups(self, layout: Layout, rank: int) -> None:
        """Once, unless the script has a process group of its own. Raises RuntimeError where it has
        and must not.
        """
        if self.groups is None and (layout.shards > 1 or not dist.is_initialized()):
            self.groups = JobGroups(
                self._config.arranged,
                layout.shard_of(rank),
                rank=rank,
                world=layout.world,
                reducer=self.reducer,
                device=self._config.device,
            )
