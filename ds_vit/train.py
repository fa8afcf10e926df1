"""Train: config → layout → data → model → engine → for each step → metrics and weights.

deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --model vit_base_patch16_224 --data-dir DIR
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from ds_vit import config as flags
from ds_vit import layout
from ds_vit.engine import Inputs, PlainEngine, device_of, init_distributed, quiet_deepspeed, share_cores

# ds_vit.data, ds_vit.models and everything that needs DeepSpeed are imported in `run`, after DeepSpeed has been quieted
# and after a mistake on the command line has been answered.


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch/train.py` with these arguments.

    Returns:
        0, or 2 for input that cannot be: one line on stderr says what is wrong and what to do.
    """
    rank, speaks = 0, True
    try:
        process = layout.discover()
        rank, speaks = process.rank, process.local_rank == 0
        config, explicit = flags.parse(argv)
        run(config, explicit, process)
    except ValueError as error:
        # A ValueError that was not raised here is a bug, and shows where.
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = raised_in.is_relative_to(Path(__file__).parent)
        if not ours:
            traceback.print_exc()
        elif speaks or dist.is_initialized():
            where = f" (rank {rank})" if dist.is_initialized() and dist.get_world_size() > 1 else ""
            print(f"train.py: error{where}: {error}", file=sys.stderr, flush=True)
        return 2 if ours else 1
    return 0


def run(config: flags.RunConfig, explicit: frozenset[str], process: layout.Process) -> None:
    """Carry out one run: prepare, start the ranks, train, evaluate, save.

    Raises:
        ValueError: input that cannot be; before the process group exists wherever that can be known.
    """
    quiet_deepspeed(config.verbose)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.output import check_folder, check_shared, default_folder
    from ds_vit.prepare import prepare

    started = time.perf_counter()
    on_cpu = get_accelerator().device_name() == "cpu"
    plan = prepare(config, explicit, process, on_cpu=on_cpu)
    if config.output:
        if process.rank == 0:
            check_folder(config.output)
        check_shared(config.output, process)

    if on_cpu:
        share_cores(process.local_world_size)
    made_group = init_distributed(layout.rendezvous(process))
    try:
        # One name on every rank: the clocks of two hosts differ.
        name = [config.output or default_folder(config.model)]
        dist.broadcast_object_list(name, src=0)
        folder = Path(name[0])
        session = Session(plan, folder, device_of(process.local_rank), started)
        session.run()
    finally:
        # After an error another rank may be inside a collective, where a goodbye would wait for it.
        if made_group and sys.exc_info()[0] is None:
            dist.destroy_process_group()


@dataclass
class Session:
    """The started run on this rank.

    Attributes:
        plan: what to do (prepare.Plan).
        folder: the output folder, shared by all ranks.
        device: where this rank computes.
        started: `perf_counter` at the very beginning.
    """

    plan: Any
    folder: Path
    device: torch.device
    started: float
    accuracies: list[tuple[int, Any]] = field(default_factory=list)
    skipped_images: int = 0

    def run(self) -> None:
        """Build, train, evaluate, save."""
        from ds_vit.metrics import Reporter, Throughput, make_console, print_table

        plan = self.plan
        self.rank = dist.get_rank()
        self.throughput = Throughput()
        self.reporter: Reporter | None = None
        console = make_console() if self.rank == 0 else None
        if console is not None:
            self._write_config()
            for note in plan.notes:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            print_table(console, "ds_vit", self._start_rows())
        self.engine = self._build_engine()
        if console is not None:
            self.reporter = Reporter(
                self.folder, total_steps=plan.total_steps, events=self.engine.write_events, console=console
            )
        try:
            if plan.config.eval_only:
                self._evaluate(step=0)
            else:
                self._train()
            self._save()
        finally:
            if self.reporter:
                self.reporter.close()
        summary = self._summary()
        if console is not None:
            temporary = self.folder / ".summary.json.partial"
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            temporary.replace(self.folder / "summary.json")
            print_table(console, "done", self._end_rows(summary))
        self.engine.close()

    # ---- model and engine -------------------------------------------------------------------------------------------

    def _build_engine(self) -> PlainEngine:
        from ds_vit.losses import build_loss
        from ds_vit.models import (
            SequentialViT,
            freeze,
            initialise,
            no_weight_decay_names,
            take_apart,
            timm_names,
        )
        from ds_vit.optim.build import build_optimizer, parameter_groups

        plan = self.plan
        layers = take_apart(plan.model)
        on_layer = None
        if plan.stage == 3:
            import deepspeed

            def on_layer(layer: torch.nn.Module) -> None:
                deepspeed.zero.Init(module=layer, config_dict_or_path=dict(plan.deepspeed))

        initialise(
            plan.model,
            layers,
            seed=plan.config.seed,
            device=self.device,
            checkpoint=plan.initial_checkpoint,
            on_layer=on_layer,
        )
        model = SequentialViT(
            layers,
            checkpoint_interval=plan.checkpointing.interval,
            checkpoint_function=_checkpoint_on_cpu if plan.checkpointing.cpu else None,
        )
        freeze(model, plan.frozen)
        names = timm_names(model)
        parameters = [(names[local], p) for local, p in model.named_parameters()]
        cls, arguments = plan.optimizer
        groups = parameter_groups(parameters, plan.weight_decay, no_weight_decay_names(plan.model))
        # With the optimizer offloaded, its step runs on the CPU.
        offloaded = (plan.deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device") == "cpu"
        optimizer = build_optimizer(cls, groups, arguments, torch.device("cpu") if offloaded else self.device)
        loss = build_loss(
            soft_targets=plan.mix.active,
            smoothing=plan.config.smoothing,
            bce=plan.config.bce_loss,
            bce_sum=plan.config.bce_sum,
            bce_target_thresh=plan.config.bce_target_thresh,
            multi_label=plan.train_source.multi_label,
        )
        return PlainEngine(model, optimizer, loss, plan.deepspeed)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        plan, config = self.plan, self.plan.config
        inputs = self._inputs()
        per_epoch = plan.order.steps_per_epoch
        self.throughput.restart()
        for step in range(plan.total_steps):
            if plan.schedule is not None:
                self.engine.set_lr(plan.schedule.lr(step))
            lr, scale = self.engine.lr(), self.engine.loss_scale()
            result = self.engine.train_step(inputs)
            self.throughput.step(plan.batch.global_batch)
            done = step + 1
            if done == 1 or done % config.log_interval == 0 or done == plan.total_steps:
                self._log(done, lr, scale, result)
            elif self.reporter:
                self.reporter.advance(done)
            ends_epoch = done % per_epoch == 0
            wanted = config.eval_interval > 0 and ends_epoch and (done // per_epoch) % config.eval_interval == 0
            if plan.val_source is not None and (wanted or done == plan.total_steps):
                self._evaluate(done)

    def _inputs(self) -> Iterator[Inputs]:
        """This rank's micro-batches, finished on the device, for the whole run; the time it waits is counted."""
        from ds_vit.data import finish_images, finish_keys, finish_targets, train_loader

        plan, config = self.plan, self.plan.config
        loader = train_loader(
            plan.train_source,
            order=plan.order,
            share=plan.share,
            image=plan.image,
            augment=plan.augment,
            mix=plan.mix,
            stop_step=plan.total_steps,
            on_bad_image=config.on_bad_image,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",
        )
        batches = iter(loader)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.throughput.waited(time.perf_counter() - before)
            if batch is None:
                return
            self.skipped_images += batch.num_skipped
            yield (
                finish_images(batch, plan.image, plan.augment, device=self.device, dtype=self.engine.dtype),
                finish_keys(batch, device=self.device),
                finish_targets(batch, config.num_classes, plan.mix, device=self.device),
            )

    def _log(self, step: int, lr: float, scale: float, result: Any) -> None:
        """A row of metrics.jsonl; a collective, and the place where the device is waited for."""
        plan = self.plan
        loss = float(self.engine.mean(result.loss))
        norm = None if result.grad_norm is None or not result.applied else float(result.grad_norm)
        rate, waiting = self.throughput.window(count=step > 1)
        if self.reporter is None:
            return
        tflops = 3 * self._flops * rate / plan.layout.world_size / 1e12
        self.reporter.train(
            {
                "step": step,
                "epoch": (step - 1) // plan.order.steps_per_epoch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "loss_scale": scale,
                "images_per_second": rate,
                "tflops_per_accelerator": tflops,
                "mfu": tflops / self._peak if self._peak else None,
                "data_wait_fraction": waiting,
                "images_seen": step * plan.batch.global_batch,
            }
        )

    def _evaluate(self, step: int) -> None:
        from ds_vit.data import eval_loader, finish_images, finish_keys, finish_targets, finish_valid
        from ds_vit.evaluate import evaluate

        plan, config = self.plan, self.plan.config
        loader = eval_loader(
            plan.val_source,
            image=plan.image,
            batch=config.validation_batch_size or plan.batch.micro_batch,
            dp_rank=plan.layout.dp_rank(self.rank),
            dp_size=plan.layout.dp,
            on_bad_image=config.on_bad_image,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",
        )
        finished = (
            (
                finish_images(batch, plan.image, device=self.device, dtype=self.engine.dtype),
                finish_keys(batch, device=self.device),
                finish_targets(batch, config.num_classes, device=self.device),
                finish_valid(batch, device=self.device),
            )
            for batch in loader
        )
        accuracy = evaluate(self.engine, finished, bce=config.bce_loss)
        self.accuracies.append((step, accuracy))
        if self.reporter:
            self.reporter.eval(
                {
                    "step": step,
                    "top1": accuracy.top1,
                    "top5": accuracy.top5,
                    "loss": accuracy.loss,
                    "images": accuracy.images,
                }
            )
        self.throughput.restart()

    # ---- what is left behind ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        """The final weights as model.safetensors, timm's names, fp32 (a collective)."""
        from ds_vit.checkpoint import save_weights
        from ds_vit.models import timm_state_dict

        if self.plan.config.eval_only:
            return
        state = self.engine.full_state(timm_state_dict(self.engine.module, keep_vars=True))
        if state is not None:
            save_weights(self.folder, state)

    def _write_config(self) -> None:
        """config.yaml (enough to run again) and deepspeed.json, before anything is trained."""
        from ds_vit.prepare import resolved_flags

        self.folder.mkdir(parents=True, exist_ok=True)
        values = {**resolved_flags(self.plan), "output": str(self.folder)}
        (self.folder / "config.yaml").write_text(flags.to_yaml(values))
        (self.folder / "deepspeed.json").write_text(json.dumps(self.plan.deepspeed, indent=2) + "\n")

    @property
    def _flops(self) -> int:
        from ds_vit.models import forward_flops

        if not hasattr(self, "_flops_cache"):
            self._flops_cache = forward_flops(self.plan.model)
        return self._flops_cache

    @property
    def _peak(self) -> float | None:
        from ds_vit.metrics import peak_tflops

        return peak_tflops(self.device, self.plan.precision.name)

    def _start_rows(self) -> list[tuple[str, str]]:
        from ds_vit.models import num_parameters

        plan = self.plan
        checkpointing = f", activations recomputed every {plan.checkpointing.interval} block(s)"
        schedule = "the JSON's scheduler" if plan.schedule is None else plan.schedule.name
        warmup = f", {plan.schedule.warmup_steps} of warm-up" if plan.schedule else ""
        val = f", {len(plan.val_source)} for evaluation" if plan.val_source is not None else ""
        frozen = f", {len(plan.frozen)} tensors frozen" if plan.frozen else ""
        clip = plan.deepspeed["gradient_clipping"]
        per_epoch = plan.order.steps_per_epoch
        return [
            ("model", plan.config.model),
            ("parameters", f"{num_parameters(plan.model):,}{frozen}"),
            ("FLOPs an image", f"{self._flops / 1e9:.3f} G forward, {3 * self._flops / 1e9:.3f} G in training"),
            ("layout", f"{plan.layout}, ZeRO-{plan.stage}{checkpointing if plan.checkpointing.interval else ''}"),
            ("precision", f"{plan.precision.name} on {self.device.type}"),
            ("data", f"{len(plan.train_source):,} images in {plan.train_source.num_classes} classes{val}"),
            ("global batch", str(plan.batch)),
            ("steps", f"{plan.total_steps:,} ({per_epoch:,} an epoch, schedule over {plan.horizon:,}{warmup})"),
            (
                "optimizer",
                f"{plan.optimizer[0].__name__}, lr {plan.lr:g} ({schedule}), weight decay {plan.weight_decay:g}, "
                + (f"clipped at {clip:g}" if clip else "no clipping"),
            ),
            ("output", str(self.folder)),
        ]

    def _summary(self) -> dict[str, Any]:
        """The contents of summary.json (a collective: skipped images are counted over all ranks)."""
        from ds_vit.models import num_parameters

        plan = self.plan
        skipped = int(self.engine.sum(torch.tensor(self.skipped_images, device=self.device)))
        figures = [accuracy for _, accuracy in self.accuracies]
        total_seconds = self.throughput.total_seconds
        return {
            "model": plan.config.model,
            "num_parameters": num_parameters(plan.model),
            "layout": {"pp": plan.layout.pp, "dp": plan.layout.dp, "tp": plan.layout.tp, "zero_stage": plan.stage},
            "precision": plan.precision.name,
            "steps": plan.total_steps,
            "best_top1": max((a.top1 for a in figures), default=None),
            "last_top1": figures[-1].top1 if figures else None,
            "best_top5": max((a.top5 for a in figures), default=None),
            "last_top5": figures[-1].top5 if figures else None,
            "eval_images": figures[-1].images if figures else 0,
            "images_per_second": self.throughput.total_images / total_seconds if total_seconds else None,
            "wall_seconds": time.perf_counter() - self.started,
            "skipped_images": skipped,
            "exit": "completed",
        }

    def _end_rows(self, summary: dict[str, Any]) -> list[tuple[str, str]]:
        rate = summary["images_per_second"]
        rows = [("model", summary["model"]), ("layout", f"{self.plan.layout}, ZeRO-{self.plan.stage}")]
        if summary["last_top1"] is not None:
            best, images = summary["best_top1"], summary["eval_images"]
            rows.append(("top-1", f"{summary['last_top1']:.2f} % (best {best:.2f} %) over {images} images"))
        if rate:
            rows.append(("images/s", f"{rate:.1f}"))
        if summary["skipped_images"]:
            rows.append(("skipped images", f"{summary['skipped_images']} could not be decoded and were replaced"))
        rows += [
            ("wall time", f"{summary['wall_seconds']:.0f} s"),
            ("files", f"{self.folder}/ (model.safetensors, metrics.jsonl, summary.json, tensorboard/)"),
        ]
        return rows


def _checkpoint_on_cpu(function: Any, *tensors: torch.Tensor) -> Any:
    """Activation checkpointing whose saved inputs wait in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
