"""A started run on this rank: for each step → metrics, evaluation; in the end the weights and the summary."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit import config as flags
from ds_vit.build import build_engine
from ds_vit.checkpoint import save_weights
from ds_vit.data import (
    AugmentConfig,
    MicroBatch,
    MixConfig,
    eval_loader,
    finish_images,
    finish_keys,
    finish_targets,
    finish_valid,
    train_loader,
)
from ds_vit.engine import Inputs, StepResult, device_of
from ds_vit.evaluate import Accuracy, evaluate
from ds_vit.metrics import Reporter, Throughput, make_console, peak_tflops, print_table
from ds_vit.models import forward_flops, timm_state_dict
from ds_vit.prepare import Plan, resolved_flags
from ds_vit.summary import end_rows, start_rows, summarise


class Session:
    """One run, on the rank that calls; all ranks do the same things in the same order.

    Args:
        plan: what to do.
        folder: the output folder, shared by all ranks; rank 0 writes to it.
        started: `time.perf_counter()` when the program began.
    """

    def __init__(self, plan: Plan, folder: Path, started: float) -> None:
        self.plan = plan
        self.folder = folder
        self.started = started
        self.device = device_of(plan.process.local_rank)
        self.flops = forward_flops(plan.model)
        self.peak = peak_tflops(self.device, plan.precision.name)
        self.throughput = Throughput()
        self.accuracies: list[Accuracy] = []
        self.skipped_images = 0
        self.reporter: Reporter | None = None

    def run(self) -> dict[str, Any]:
        """Build, train, evaluate, save.

        Returns:
            What summary.json holds, on every rank.
        """
        plan = self.plan
        console = make_console() if dist.get_rank() == 0 else None
        if console is not None:
            self._write_config()
            for note in plan.notes:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            print_table(console, "ds_vit", start_rows(plan, self.flops, self.device, self.folder))
        self.engine = build_engine(plan, self.device)
        if console is not None:
            events = self.engine.write_events
            self.reporter = Reporter(self.folder, total_steps=plan.total_steps, events=events, console=console)
        try:
            if plan.config.eval_only:
                self._evaluate(step=0)
            else:
                self._train()
                self._save()
        finally:
            if self.reporter:
                self.reporter.close()
        skipped = int(self.engine.sum(torch.tensor(self.skipped_images, device=self.device)))
        summary = summarise(plan, self.accuracies, self.throughput, skipped, time.perf_counter() - self.started)
        if console is not None:
            temporary = self.folder / ".summary.json.partial"
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            temporary.replace(self.folder / "summary.json")
            print_table(console, "done", end_rows(plan, summary, self.folder))
        self.engine.close()
        return summary

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
            if plan.val_source is not None:
                epochs, rest = divmod(done, per_epoch)
                due = config.eval_interval > 0 and rest == 0 and epochs % config.eval_interval == 0
                if due or done == plan.total_steps:
                    self._evaluate(done)

    def _inputs(self) -> Iterator[Inputs]:
        """This rank's micro-batches, finished on the device, for the whole run; the time it waits is counted."""
        plan, config = self.plan, self.plan.config
        loader = train_loader(
            plan.train_source,
            order=plan.order,
            share=plan.share,
            image=plan.image,
            augment=plan.augment,
            mix=plan.mix,
            stop_step=plan.total_steps,
            load_images=plan.has_images,
            load_targets=plan.has_targets,
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
            if plan.has_images:
                self.skipped_images += batch.num_skipped
            yield self._finish(batch, plan.augment, plan.mix)

    def _finish(self, batch: MicroBatch, augment: AugmentConfig | None = None, mix: MixConfig | None = None) -> Inputs:
        """The model's inputs; no pixels behind the first pipeline stage, no targets before the last."""
        plan = self.plan
        images = targets = None
        if plan.has_images:
            images = finish_images(batch, plan.image, augment, device=self.device, dtype=self.engine.dtype)
        if plan.has_targets:
            targets = finish_targets(batch, plan.config.num_classes, mix, device=self.device)
        return images, finish_keys(batch, device=self.device), targets

    def _log(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        """A row of metrics.jsonl; a collective, and the place where the device is waited for."""
        plan = self.plan
        loss = float(self.engine.mean(result.loss))
        norm = float(result.grad_norm) if result.applied and result.grad_norm is not None else None
        rate, waiting = self.throughput.window(count=step > 1)
        if self.reporter is None:
            return
        tflops = 3 * self.flops * rate / plan.layout.world_size / 1e12
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
                "mfu": tflops / self.peak if self.peak else None,
                "data_wait_fraction": waiting,
                "images_seen": step * plan.batch.global_batch,
            }
        )

    def _evaluate(self, step: int) -> None:
        """Exact accuracy on the validation split (a collective)."""
        plan, config = self.plan, self.plan.config
        self.throughput.pause()
        batch_size = config.validation_batch_size or plan.batch.micro_batch
        loader = eval_loader(
            plan.val_source,
            image=plan.image,
            batch=batch_size,
            dp_rank=plan.share.dp_rank,
            dp_size=plan.layout.dp,
            load_images=plan.has_images,
            load_targets=plan.has_targets,
            on_bad_image=config.on_bad_image,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",
        )
        batches = ((*self._finish(batch), finish_valid(batch, device=self.device)) for batch in loader)
        accuracy = evaluate(self.engine, batches, len(loader), bce=config.bce_loss)
        self.accuracies.append(accuracy)
        if self.reporter:
            figures = {"top1": accuracy.top1, "top5": accuracy.top5, "loss": accuracy.loss, "images": accuracy.images}
            self.reporter.eval({"step": step, **figures})
        self.throughput.resume()

    def _save(self) -> None:
        """The final weights as model.safetensors, timm's names, fp32 (a collective)."""
        state = self.engine.full_state(timm_state_dict(self.engine.module, keep_vars=True))
        if state is not None:
            save_weights(self.folder, state)

    def _write_config(self) -> None:
        """config.yaml (enough to run again) and deepspeed.json, before anything is trained."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(flags.to_yaml(resolved_flags(self.plan)))
        (self.folder / "deepspeed.json").write_text(json.dumps(self.plan.deepspeed, indent=2) + "\n")
