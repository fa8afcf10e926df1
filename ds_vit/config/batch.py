"""The batch arithmetic: global batch = micro-batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_vit.config.deepspeed_json import BATCH_KEYS
from ds_vit.fault_tolerance.errors import UserError

if TYPE_CHECKING:
    from ds_vit.config.deepspeed_keys import DeepSpeedJson
    from ds_vit.config.schema import RunConfig

DEFAULT_MICRO_BATCH = 128  # timm's


@dataclass(frozen=True)
class BatchSizes:
    """The batch arithmetic: `global_batch = micro_batch * accumulation * dp`."""

    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int

    def __str__(self) -> str:
        ranks = f"{self.dp} rank{'s' * (self.dp > 1)}"
        images = f"{self.micro_batch} image{'s' * (self.micro_batch > 1)}"
        times = f"{self.accumulation} micro-batch{'es' * (self.accumulation > 1)}"
        return f"{self.global_batch} = {ranks} × {images} × {times}"

    def as_json(self) -> dict[str, int]:
        """The three numbers under the names of DeepSpeed's JSON."""
        return dict(zip(BATCH_KEYS, (self.global_batch, self.micro_batch, self.accumulation), strict=True))


def ways_to_share(total: int, dp: int) -> list[BatchSizes]:
    """All ways to split a global batch over `dp` ranks, by increasing micro-batch; [] if there is none."""
    if total % dp:
        return []
    share = total // dp
    return [BatchSizes(total, micro, share // micro, dp) for micro in range(1, share + 1) if share % micro == 0]


def nearest_dp(total: int, dp: int) -> int:
    """The number of data-parallel ranks nearest to `dp` that can share a global batch."""
    return min((d for d in range(1, 2 * dp + 1) if total % d == 0), key=lambda d: abs(d - dp))


def batch_sizes(json: DeepSpeedJson, path: str, config: RunConfig, *, dp: int, kept: int | None = None) -> BatchSizes:
    """Resolve `train_batch_size = micro-batch x accumulation x dp`, before anything is divided.

    Args:
        json: each of its three keys may be a number, "auto" or absent.
        path: named in messages.
        config: has `-b/--batch-size` for a micro-batch of "auto" (`DEFAULT_MICRO_BATCH` where nothing says it), and
            `--grad-accum-steps` for an accumulation of "auto".
        dp: data-parallel degree.
        kept: the global batch of the run that is resumed. The micro-batch becomes the largest one that divides a rank's
            share of it and does not exceed the requested one, or that of the requested accumulation.

    Raises:
        UserError: the numbers do not fit; it names them and two remedies.
    """
    batch_size, grad_accum_steps = config.batch_size, config.grad_accum_steps
    total, micro = json.train_batch_size, json.train_micro_batch_size_per_gpu
    accumulation = json.gradient_accumulation_steps
    for key, flag, value, given in (
        (BATCH_KEYS[1], "--batch-size", micro, batch_size),
        (BATCH_KEYS[2], "--grad-accum-steps", accumulation, grad_accum_steps),
    ):
        if value is not None and given is not None and value != given and not (kept and total):
            raise UserError(f'{path} fixes {key} to {value} and {flag} says {given}; drop the flag or write "auto"')
    if kept is not None and total is not None:
        share = max(1, total // dp)
        wanted = batch_size or (grad_accum_steps and share // grad_accum_steps)
        micro = wanted or micro or share // (accumulation or 1)
    micro, accumulation = micro or batch_size, accumulation or grad_accum_steps
    if kept is not None:
        most = micro or min(DEFAULT_MICRO_BATCH, kept // dp // (accumulation or 1))
        if ways := ways_to_share(kept, dp):
            return [way for way in ways if way.micro_batch <= max(1, most)][-1]
        raise UserError(
            f"{path}: the run's global batch is {kept}, which {dp} data-parallel ranks cannot share; start "
            f"{nearest_dp(kept, dp)} data-parallel ranks, or give another batch by --set train_batch_size="
            f"{round(kept / dp) * dp or dp} (in a resumed run with --allow-batch-change)"
        )
    if total is None:
        micro, accumulation = micro or DEFAULT_MICRO_BATCH, accumulation or 1
        return BatchSizes(micro * accumulation * dp, micro, accumulation, dp)
    accumulation = accumulation or (max(1, total // (micro * dp)) if micro else 1)
    micro = micro or max(1, total // (accumulation * dp))
    product = micro * accumulation * dp
    if product != total:
        raise UserError(
            f"{path}: train_batch_size {total} is not micro-batch {micro} x accumulation {accumulation} x "
            f"data-parallel {dp} = {product}; set train_batch_size to {product}, or " + _other_way(total, dp)
        )
    return BatchSizes(total, micro, accumulation, dp)


def _other_way(total: int, dp: int) -> str:
    if ways := ways_to_share(total, dp):
        options = [f"{way.micro_batch} x {way.accumulation}" for way in reversed(ways)]
        return f"choose micro-batch x accumulation as one of {', '.join(options[:4])}"
    return f"start a number of ranks that divides {total}, such as {nearest_dp(total, dp)}"
