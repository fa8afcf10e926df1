"""A started run on this rank: for each step → metrics, evaluation; in the end the weights and the summary."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit import config as flags
from ds_vit.build import build_engine
from ds_vit.checkpoint import save_weights
from ds_vit.engine import StepResult, device_of
from ds_vit.evaluate import Accuracy, evaluate
from ds_vit.exit_codes import Diverged
from ds_vit.feed import Feed
from ds_vit.metrics import Reporter, Throughput, make_console, peak_tflops, print_table
from ds_vit.models import forward_flops, timm_state_dict
from ds_vit.optim.ema import Ema
from ds_vit.optim.health import GradientHealth
from ds_vit.prepare import Plan, resolved_flags
from ds_vit.replicas import check_replicas
from ds_vit.summary import end_rows, start_rows, summarise
from ds_vit.watchdog import Watchdog


class Session:
    """One run, on the rank that calls; all ranks do the same things in the same order.

    Args:
        plan: what to do.
        folder: the output folder, shared by all ranks; rank 0 writes to it.
        started: `time.perf_counter()` when the program began.
        watchdog: is told of every bit of progress.
    """

    def __init__(self, plan: Plan, folder: Path, started: float, watchdog: Watchdog) -> None:
        self.plan = plan
        self.folder = folder
        self.started = started
        self.watchdog = watchdog
        self.device = device_of(plan.process.local_rank)
        self.flops = forward_flops(plan.model)
        self.peak = peak_tflops(self.device, plan.precision.name)
        self.throughput = Throughput()
        self.accuracies: list[Accuracy] = []
        self.ema_accuracies: list[Accuracy] = []
        self.skipped_steps = self.skips_in_a_row = 0
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
        if plan.config.tf32:
            torch.set_float32_matmul_precision("high")
        self.watchdog.beat(0, "building the model", patience=4)
        self.engine = build_engine(plan, self.device)
        self.ema: Ema | None = None
        if not plan.config.eval_only:
            if plan.config.model_ema:
                self.ema = Ema(self.engine.fragments, plan.config.model_ema_decay, plan.config.model_ema_warmup)
            if plan.config.spike_factor is not None:
                self.engine.guard.watch_spikes(plan.config.spike_factor)
            self.health = GradientHealth(self.engine.fragments, self.engine.clipped_by)
        self.feed = Feed(plan, self.engine, self.throughput)
        if console is not None:
            events = self.engine.write_events
            self.reporter = Reporter(self.folder, total_steps=plan.total_steps, events=events, console=console)
        try:
            if plan.config.eval_only:
                self._evaluate(step=0)
            else:
                self._train()
                self.watchdog.beat(plan.total_steps, "saving the weights", patience=4)
                self._save()
        finally:
            if self.reporter:
                self.reporter.close()
        skipped = int(self.engine.sum(torch.tensor(self.feed.skipped_images, device=self.device)))
        summary = summarise(
            plan, self.accuracies, self.ema_accuracies, self.throughput, skipped, time.perf_counter() - self.started
        )
        if console is not None:
            temporary = self.folder / ".summary.json.partial"
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            temporary.replace(self.folder / "summary.json")
            print_table(console, "done", end_rows(plan, summary, self.folder))
        self.engine.close()
        return summary

    def _train(self) -> None:
        plan, config = self.plan, self.plan.config
        inputs = self.watchdog.micro_batches(self.feed.training())
        per_epoch = plan.order.steps_per_epoch
        self.throughput.restart()
        for step in range(plan.total_steps):
            if plan.schedule is not None:
                self.engine.set_lr(plan.schedule.lr(step))
            lr, scale = self.engine.lr(), self.engine.loss_scale()
            looks = config.grad_stats_interval > 0 and step % config.grad_stats_interval == 0
            if looks:
                self.health.arm()
            self.watchdog.beat(step + 1, "forward, backward and update")
            result = self.engine.train_step(inputs)
            self._account(step + 1, scale, result)
            if self.ema is not None and result.applied:
                self.ema.update()
            if looks:
                self._log_gradients(step + 1, scale, result)
            self.throughput.step(plan.batch.global_batch)
            done = step + 1
            if config.check_replicas and done % config.check_replicas == 0:
                check_replicas(self.engine, done)
            if done == 1 or done % config.log_interval == 0 or done == plan.total_steps:
                self._log(done, lr, scale, result)
            elif self.reporter:
                self.reporter.advance(done)
            if plan.val_source is not None:
                epochs, rest = divmod(done, per_epoch)
                due = config.eval_interval > 0 and rest == 0 and epochs % config.eval_interval == 0
                if due or done == plan.total_steps:
                    self._evaluate(done)

    # Steps in a row without an update after which going on is pointless; a loss scale of 2^16 is found in fewer.
    _MAX_SKIPS = 50

    def _account(self, step: int, scale: float, result: StepResult) -> None:
        """Count a step that was not applied, say why, and stop where that is asked for (the same on every rank).

        Raises:
            Diverged: the run shall not go on.
        """
        if result.applied:
            self.skips_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skips_in_a_row += 1
        plan, rejection = self.plan, result.rejection
        loss = float(self.engine.mean(result.loss))
        overflow = "fp16" in plan.precision.name and (rejection is None or rejection.reason == "nonfinite")
        reason = "overflow" if overflow else rejection.reason
        if self.reporter:
            norm, layer, there = (None, None, None)
            if rejection is not None:
                norm, (layer, there) = rejection.grad_norm, rejection.layer
            row = {"step": step, "reason": reason, "loss": loss, "grad_norm": norm, "layer": layer}
            row |= {"layer_norm": there, "loss_scale": scale, "skipped_steps": self.skipped_steps}
            self.reporter.skip(row, str(rejection) if rejection and not overflow else None)
        saved = "what was saved before is intact; lower the learning rate, warm up for longer or clip harder"
        if not overflow and plan.config.on_nonfinite == "stop":
            raise Diverged(
                f"step {step}: {rejection}; the update was not applied; {saved}, or go on past such steps "
                "with --on-nonfinite skip"
            )
        if self.skips_in_a_row >= self._MAX_SKIPS:
            raise Diverged(f"step {step}: {self.skips_in_a_row} steps in a row were skipped ({reason}); {saved}")

    def _log_gradients(self, step: int, scale: float, result: StepResult) -> None:
        """A row of kind "gradients" (a collective)."""
        row = self.health.finish()
        if self.reporter and result.applied:
            self.reporter.gradients({"step": step, **row, "loss_scale": scale, "skipped_steps": self.skipped_steps})

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
        self.throughput.pause()
        self._evaluate_weights(step, self.accuracies, "eval")
        if self.ema is not None:
            with self.ema.swapped():
                self._evaluate_weights(step, self.ema_accuracies, "eval_ema")
        self.throughput.resume()

    def _evaluate_weights(self, step: int, accuracies: list[Accuracy], kind: str) -> None:
        """Exact accuracy of the weights that the model has now (a collective)."""
        self.watchdog.beat(step, "evaluation")
        batches, num_batches = self.feed.evaluation()
        batches = self.watchdog.micro_batches(batches)
        accuracy = evaluate(self.engine, batches, num_batches, bce=self.plan.config.bce_loss)
        accuracies.append(accuracy)
        if self.reporter:
            figures = {"top1": accuracy.top1, "top5": accuracy.top5, "loss": accuracy.loss, "images": accuracy.images}
            self.reporter.eval({"step": step, **figures}, kind)

    def _save(self) -> None:
        """The final weights as model.safetensors, their average as ema.safetensors (a collective)."""
        self._save_weights("model")
        if self.ema is not None:
            with self.ema.swapped():
                self._save_weights("ema")

    def _save_weights(self, name: str) -> None:
        state = self.engine.full_state(timm_state_dict(self.engine.module, keep_vars=True))
        if state is not None:
            save_weights(self.folder, state, name=name)

    def _write_config(self) -> None:
        """config.yaml (enough to run again) and deepspeed.json, before anything is trained."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(flags.to_yaml(resolved_flags(self.plan)))
        (self.folder / "deepspeed.json").write_text(json.dumps(self.plan.deepspeed, indent=2) + "\n")
