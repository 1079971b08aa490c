"""Which samples a step trains on: an order that no world size changes, a sampler that follows it, and the
leaves that any number of ranks shares a batch out by."""

from elastic.data.leaves import Leaf, Leaves
from elastic.data.order import Order, places
from elastic.data.sampler import ElasticSampler
from elastic.data.skips import Skips

__all__ = ["ElasticSampler", "Leaf", "Leaves", "Order", "Skips", "places"]
