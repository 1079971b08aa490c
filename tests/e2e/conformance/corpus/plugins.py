"""Plug-ins of torchrun's entry point groups; `plugins-1.0.dist-info` makes them known."""

from collections.abc import Callable

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


class Logs(DefaultLogsSpecs):
    """Logs as usual."""


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Nodes meet as with c10d."""
    return _by_c10d


def _by_c10d(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    parameters.backend = "c10d"  # which the two insist on
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)
