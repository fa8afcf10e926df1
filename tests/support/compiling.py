"""Runs with --compile by a backend that makes no code, and how many graphs were made in them."""

import contextlib
from unittest import mock

from curves import train_main


@contextlib.contextmanager
def counting_graphs(graphs, backend="aot_eager", before=lambda: None):
    """Compile by one of torch's backends that make no code; `before` is called for each graph, which joins the list."""
    from torch._dynamo.backends.registry import lookup_backend

    from ds_vit.models import compiled

    make = lookup_backend(backend)

    def counted(graph, inputs, **options):
        before()
        graphs.append(graph)
        return make(graph, inputs, **options)

    with mock.patch.object(compiled, "BACKEND", counted):
        yield


def train_counting(argv, backend="aot_eager", before=lambda: None):
    """On a rank: train; how many graphs there were after each step and each evaluation."""
    from ds_vit.training.evaluation import Evaluations
    from ds_vit.training.trainer import Trainer

    graphs, counts = [], []

    def counted(owner, name):
        own = getattr(owner, name)

        def call(self, *args):
            out = own(self, *args)
            counts.append((name, len(graphs)))
            return out

        return mock.patch.object(owner, name, call)

    with (
        counting_graphs(graphs, backend, before),
        counted(Trainer, "train_step"),
        counted(Evaluations, "evaluate"),
    ):
        train_main(argv)
    return counts
