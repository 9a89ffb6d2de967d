"""Builds an engine around a model: the device, the group, the runner and the executor of this rank."""

from collections.abc import Callable, Iterable, Sequence

import torch

from text_generation_common.cpus import usable_cpus
from text_generation_common.log import log
from text_generation_proto.values import EAGLE, MTP
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines.torch.batch.kv_cache import CacheShape, Fp8Cache, LayerShape
from text_generation_shard.engines.torch.build.prepare import Description, Prepared
from text_generation_shard.engines.torch.device.memory import DeviceMemory, keep_freed_memory
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.host_cache import HostCopies
from text_generation_shard.engines.torch.engine.images import ImageSteps
from text_generation_shard.engines.torch.engine.prompt_images import ImageEncoder
from text_generation_shard.engines.torch.engine.runner import Model, Runner
from text_generation_shard.engines.torch.engine.trace import StepTrace
from text_generation_shard.engines.torch.engine.worker import TPWorker
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterStore
from text_generation_shard.engines.torch.layers.device_ops import DeviceOps
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.layers.precision import MAX_NARROW_HIDDEN_SIZE
from text_generation_shard.engines.torch.parallel.follower import FollowerEngine
from text_generation_shard.engines.torch.parallel.group import ParallelGroup, join_group
from text_generation_shard.engines.torch.runner.cpu_runner import CpuRunner
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner
from text_generation_shard.step.drafts.drafter import Drafter

ScoreScales = Sequence[tuple[float, float | None]]
"""Scale and softcap of the scores of each layer."""


class EngineBuilder:
    """The parts of an engine that do not depend on the kind of its model. Joins the group of this rank when it is created."""

    def __init__(self, config: ShardConfig, prepared: Prepared[Description]) -> None:
        self._config = config
        self._grammars = prepared.grammars
        self.info = prepared.info
        self.adapters: AdapterStore | None = None
        """The LoRA adapters of the model, if it may have any."""
        self.device, self.dtype = prepared.target.device, prepared.dtype
        # torch counts the cores of its affinity only, not the quota of a container.
        torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), usable_cpus()))
        if self.device.type == "cuda":
            _prepare_gpu(self.device, self.dtype)
        else:
            keep_freed_memory()
        self.group = join_group(config, self.device)
        fraction = config.cuda_memory_fraction if self.device.type == "cuda" else config.cpu_memory_fraction
        self._memory = DeviceMemory(self.device, fraction)

    def runner(  # noqa: PLR0913 – all that differs between the kinds
        self,
        model_with: Callable[[Ops], Model],
        layers: Iterable[LayerShape],
        scales: ScoreScales,
        hidden_size: int,
        group: ParallelGroup | None = None,
        fp8: Fp8Cache | None = None,
        state_bytes: int = 0,
        *,
        has_axes: bool = False,
        image_levels: int = 0,
        compiles: bool = True,
    ) -> Runner:
        """Return the runner of a model, for the steps of `group` if given.

        `has_axes`: images have rotary positions in several axes; `image_levels`: see `PiecewiseGraphs`; `compiles`: see
        `DeviceKernels`.
        """
        longest = self.info.max_sequence_length
        shape = CacheShape(tuple(layers), self.device, self.dtype, longest, fp8, state_bytes)
        group = group or self.group
        sizes = self.info.max_slots, longest
        shifts = self.info.max_images > 0 and has_axes
        if self.device.type == "cpu":
            return CpuRunner(model_with(Ops(self.group)), group, shape, *sizes, shifts_positions=shifts)
        # Imports Triton, which torch for CPUs comes without.
        from text_generation_shard.engines.torch.kernels.device_kernels import DeviceKernels

        narrow, sizes_of_logits = hidden_size <= MAX_NARROW_HIDDEN_SIZE, (self.info.vocab_size, self.info.max_slots)
        kernels = DeviceKernels(shape, scales, *sizes_of_logits, narrow=narrow, compiles=compiles)
        model = model_with(DeviceOps(kernels, self.group, self.dtype))
        has_adapters = bool(self.info.max_loras)
        levels = image_levels if self.info.max_images else 0
        return DeviceRunner(
            model,
            kernels,
            group,
            shape,
            *sizes,
            has_adapters=has_adapters,
            shifts_positions=shifts,
            image_levels=levels,
        )

    def executor(self, runner: Runner, group: ParallelGroup, host: HostCopies | None = None) -> Executor:
        """Return the executor of rank 0 of a group."""
        worker = TPWorker(runner, self._memory, self.adapters, host)
        return Executor(worker, group, self.info.max_loras, runs_ahead=self.device.type == "cuda")

    def _encoder(self) -> ImageEncoder | None:
        if not self.info.max_images:
            return None
        from text_generation_shard.engines import check_transformers

        # Imported only where a model takes images: that takes seconds.
        check_transformers(self._config)
        from text_generation_shard.engines.torch.models.huggingface.images import load_images

        return load_images(self._config, self.dtype, self.device)

    def engine(self, runner: Runner) -> Engine:
        """Return the engine of rank 0, or of a follower."""
        config, host = self._config, None
        if config.host_cache_bytes:
            host = HostCopies(config.host_cache_fd, config.host_cache_start, config.host_cache_bytes, self.device)
        if config.rank > 0:
            execute = TPWorker(runner, self._memory, self.adapters, host).execute
            return FollowerEngine(self.info, self._config.rank, self.group.follower, execute)
        trace = StepTrace(self._config.trace_steps) if self._config.trace_steps else None
        predicted = EAGLE if config.speculator else MTP
        drafter = Drafter.of(self.info, runs_ahead=self.device.type == "cuda", predicted=predicted)
        if drafter is not None and (accepted := self._config.synthetic_acceptance):
            log.warning(
                "drafts are taken as right at random: texts are not those of the model", tokens_per_step=accepted
            )
            drafter.accept_synthetically(accepted, self.info.vocab_size)
        executor = self.executor(runner, self.group, host)
        if (encoder := self._encoder()) is not None:
            budget, bidirectional = config.max_batch_image_tokens, runner.bidirectional_images
            executor.images = ImageSteps(
                encoder, budget, self.device, executor.is_device_broken, bidirectional=bidirectional
            )
        return TorchEngine(self.info, executor, self._grammars, trace, drafter)


def _prepare_gpu(device: torch.device, dtype: torch.dtype) -> None:
    """Make `device` the one of this thread. Raises EngineError if it cannot compute in `dtype`."""
    if dtype == torch.float32:
        raise EngineError("dtype float32 is not served on CUDA: --dtype bfloat16 or float16")
    torch.cuda.set_device(device)
    # Split-K products add their parts in float32: in bfloat16 the logits of a small model are 10 % less accurate.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Graphs cannot be captured on the default stream; one thread does all steps of the engine, on this stream. It has priority
    # over those of images and of copies of the host cache.
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
