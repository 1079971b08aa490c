"""Megatron core's models."""
