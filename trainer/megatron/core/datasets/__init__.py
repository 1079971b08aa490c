"""Megatron core's datasets."""
