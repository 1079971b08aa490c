"""Which samples a step trains on: an order that no world size changes, and a sampler that follows it."""

from elastic.data.order import Order, places
from elastic.data.sampler import ElasticSampler

__all__ = ["ElasticSampler", "Order", "places"]
