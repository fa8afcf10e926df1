"""Runs with --compile, by a backend that makes no code, and how often a graph was made in them."""

import contextlib
import json
from unittest import mock

from curves import train_main
from project import ROOT

MODEL = ("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", "embed_dim=48", "num_heads=6")


@contextlib.contextmanager
def counting_graphs(graphs, backend="aot_eager"):
    """Compile by `backend`; each graph that is made is appended to the list."""
    from torch._dynamo.backends.registry import lookup_backend

    from ds_vit.models import compiled

    make = lookup_backend(backend)

    def counted(graph, inputs, **options):
        graphs.append(len(list(graph.graph.nodes)))
        return make(graph, inputs, **options)

    with mock.patch.object(compiled, "BACKEND", counted):
        yield


def train_counting(argv, backend="aot_eager"):
    """On a rank: train; how many graphs there were after each step and each evaluation, by name."""
    from ds_vit.training.trainer import Trainer

    graphs, seen = [], []

    def after(name):
        own = getattr(Trainer, name)

        def wrapped(self, *args):
            out = own(self, *args)
            seen.append((name.strip("_").split("_")[0], len(graphs)))
            return out

        return mock.patch.object(Trainer, name, wrapped)

    with counting_graphs(graphs, backend), after("_take_step"), after("_evaluate_weights"):
        train_main(argv)
    return seen
