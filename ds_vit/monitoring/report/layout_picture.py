"""The layout of a run as a picture: a box a replica, in it a row a pipeline stage and a cell a tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vit.monitoring.report.html import Html, tag
from ds_vit.parallel.layout import Layout

MOST_REPLICAS, MOST_CELLS = 8, 64


def layout_picture(layout: Layout, zero_stage: int | None, hosts: Sequence[str] = ()) -> Html:
    """Replicas side by side; of many the first few.

    Args:
        layout: the degrees.
        zero_stage: None where it is not known.
        hosts: the host's name of each rank, where they are known.
    """
    shown = max(1, min(layout.dp, MOST_REPLICAS, MOST_CELLS // (layout.pp * layout.tp)))
    colours = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
    replicas = [_replica(layout, number, hosts, colours) for number in range(shown)]
    if shown < layout.dp:
        replicas.append(tag("div", f"… and {layout.dp - shown} replicas more", class_="more"))
    zero = "" if zero_stage is None else f", ZeRO-{zero_stage}"
    return tag(
        "figure",
        tag("figcaption", f"{layout}{zero}: {layout.world_size} rank{'s' if layout.world_size > 1 else ''}"),
        tag("p", _in_words(layout, zero_stage), class_="note"),
        tag("div", *replicas, class_="replicas"),
        class_="card wide",
    )


def _replica(layout: Layout, number: int, hosts: Sequence[str], colours: dict[str, int]) -> Html:
    first = number * layout.pp * layout.tp
    rows = []
    for stage in range(layout.pp):
        ranks = range(first + stage * layout.tp, first + (stage + 1) * layout.tp)
        cells = [
            tag(
                "span",
                f"rank {rank}",
                *([tag("small", hosts[rank])] if rank < len(hosts) else []),
                class_=f"cell c{colours[hosts[rank]] % 8}" if rank < len(hosts) else "cell",
            )
            for rank in ranks
        ]
        name = [tag("span", f"stage {stage}", class_="stage")] if layout.pp > 1 else []
        rows.append(tag("div", *name, *cells, class_="stage-row"))
    return tag("div", tag("b", f"replica {number}"), *rows, class_="replica")


def _in_words(layout: Layout, zero_stage: int | None) -> str:
    parts = []
    if layout.pp > 1:
        parts.append(f"the blocks are dealt to {layout.pp} stages, one after the other")
    if layout.tp > 1:
        parts.append(f"each layer is cut over {layout.tp} ranks")
    if layout.dp > 1:
        parts.append(f"{layout.dp} replicas share each batch")
        kept = {1: "the optimizer's state", 2: "the optimizer's state and the gradients"}
        kept[3] = "the optimizer's state, the gradients and the weights"
        if zero_stage in kept:
            parts.append(f"and {kept[zero_stage]} between them")
    return ("; ".join(parts) or "everything on one rank") + ". The loss curve is the same in every layout."
