"""Megatron core's transformer."""
