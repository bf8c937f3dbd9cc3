"""FSDP2: a drafter, and if wanted its target, spread over processes by `torch.distributed.fsdp.fully_shard`.

Weights, gradients and optimiser states of the drafter are sharded between steps. A step gathers the weights once and
reduces the gradients once, whatever its number of micro-batches: the heads are used outside any layer's forward pass,
contexts are encoded before the layers run, and simulated rounds differ in number between processes, so that gathering
layer by layer would wait for calls that never come. The target's layers, if sharded, are gathered one at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from treespark.drafters.base import FROZEN_PREFIXES, Drafter
from treespark.drafters.formats import check_tensors
from treespark.target import Target

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_STRATEGY = "trainer.strategy"


class _Parts(nn.Module):
    """The trainable parts of a drafter, as the module whose calls gather them; a drafter itself keeps its class."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        frozen = tuple(prefix.removesuffix(".") for prefix in FROZEN_PREFIXES)
        self.parts = nn.ModuleDict({name: part for name, part in drafter.named_children() if name not in frozen})

    def forward(self, function: Callable[[], T]) -> T:
        """Calls `function` while the weights are whole."""
        return function()


class ShardedDrafter:
    """Shards a drafter's trainable parameters in place; calling it runs a function with whole weights.

    The embedding and the output head are the target's and stay as they are. Every process starts from the weights of
    the first.

    Args:
        drafter: The drafter; from now on its parameters are sharded outside of calls.
        mesh: The processes, in one dimension.
    """

    def __init__(self, drafter: Drafter, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        parts = _Parts(drafter)
        _copy_from_first(parts, mesh)
        self._root: Any = fully_shard(parts, mesh=mesh, reshard_after_forward=False)
        whole = [name for name, p in drafter.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if whole:
            raise ValueError(
                f"{type(drafter).__name__} holds parameters outside of its submodules ({', '.join(whole)}), which "
                "cannot be sharded; put them into a module of their own."
            )

    def __call__(self, function: Callable[[], T]) -> T:
        """Returns function(), which sees whole weights; a loss that it returns reduces gradients in its backward.

        Every process must call it equally often.
        """
        if torch.is_grad_enabled():
            result: T = self._root(function)
            return result
        # Gathered inside inference mode, the weights could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            result = self._root(function)
            self._root.reshard()
        return result


def shard_target(target: Target, mesh: DeviceMesh) -> None:
    """Shards the target's decoder layers in place; each is gathered for its own forward pass alone.

    Embedding, final norm and output head stay whole in every process: the drafter shares them, and the losses of every
    chunk need the head. Every process must run the target equally often.

    Raises:
        ValueError: When this version of torch cannot leave them out.
    """
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ValueError(f"A sharded target needs a newer torch than {torch.__version__}; set shard_target to false.")
    layers = list(target.layers())
    shared = set(target.parameters()) - {parameter for layer in layers for parameter in layer.parameters()}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(target.decoder, mesh=mesh, ignored_params=shared)


def full_state(drafter: Drafter) -> dict[str, Tensor]:
    """Returns the trainable tensors, gathered on the CPU; every process must take part if they are sharded."""
    return {name: _whole(tensor) for name, tensor in drafter.trainable_state_dict().items()}


def whole_copy(drafter: Drafter) -> Drafter:
    """Returns a sharded drafter as one that can be saved and decoded with; every process must take part.

    A drafter that is not sharded is returned itself.
    """
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
        return drafter
    config = drafter.config()
    with torch.device("meta"):
        copy: Drafter = Drafter.from_config(
            {"class_path": config["class_path"], "init_args": config["init_args"] | {"target": drafter.spec}}
        )
    device = drafter.embed_tokens.weight.device
    state = {name: tensor.to(device) for name, tensor in full_state(drafter).items()}
    copy.load_state_dict(state, strict=False, assign=True)
    copy.embed_tokens.weight, copy.lm_head.weight = drafter.embed_tokens.weight, drafter.lm_head.weight
    copy.recorded_policy, copy.extra = drafter.recorded_policy, drafter.extra
    return copy.eval()


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def _copy_from_first(module: nn.Module, mesh: DeviceMesh) -> None:
    """Copies the first process's weights to all, as Lightning's DDP does."""
    group = mesh.get_group()
    first = torch.distributed.get_global_rank(group, 0)
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    for tensor in [*module.parameters(), *module.buffers()]:
        moved = tensor.detach().to(device, copy=True)
        torch.distributed.broadcast(moved, first, group)
        tensor.copy_(moved)


def check_strategy(trainer: Trainer | None, mesh: DeviceMesh | None, shard_target: bool, runs_evenly: bool) -> None:
    """Refuses what would hang, or would train something else than one process on the joint batch.

    Args:
        trainer: The trainer, if there is one.
        mesh: Its processes in two dimensions, where the strategy has such a mesh.
        shard_target: Whether the target is to be sharded.
        runs_evenly: Whether the feature source has every process run the target equally often.

    Raises:
        ValueError: With what to set instead.
    """
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    strategy = None if trainer is None else trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy | None):
        raise ValueError(
            f"{_STRATEGY} {type(strategy).__name__} is not supported: use `ddp`, or ModelParallelStrategy to shard."
        )
    if mesh is not None and mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"{_STRATEGY} splits single tensors over {mesh['tensor_parallel'].size()} processes, which is not "
            f"supported: set its tensor_parallel_size to 1 and data_parallel_size to {mesh.size()}."
        )
    if shard_target and mesh is None:
        raise ValueError(
            f"shard_target needs ModelParallelStrategy as {_STRATEGY}; without it set shard_target: false."
        )
    if shard_target and not runs_evenly:
        raise ValueError(
            "shard_target has all processes run the target together, but with features that are kept each runs it for "
            "the documents that it has not kept. Set model.features to Online or Offline, or shard_target to false."
        )


def check_resumed_file(path: str | Path | None, drafter: Drafter) -> None:
    """Compares a checkpoint file with the drafter before all processes load it together; folders check themselves.

    Raises:
        ValueError: For a damaged file, tensors that are missing, unexpected or mis-shaped, or a training that was not
            sharded, whose optimiser state cannot be told apart.
    """
    if path is None or not Path(path).is_file():
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        state = {key.removeprefix("drafter."): tuple(value.shape) for key, value in checkpoint["state_dict"].items()}
        groups = [state["param_groups"] for state in checkpoint.get("optimizer_states", [])]
    except Exception as error:  # unpickling raises whatever the bytes lead it to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a checkpoint of `treespark fit` ({reason}).") from error
    check_tensors({key: tuple(value.shape) for key, value in drafter.trainable_state_dict().items()}, state, str(path))
    if any(0 in group["params"] for entry in groups for group in entry):
        raise ValueError(
            f"{path} was written by a training that was not sharded, and its optimiser state cannot be spread over "
            "processes. Resume with the strategy it was written with, or start anew from its drafter with init_from."
        )
