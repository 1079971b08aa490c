"""The shell that the operator and the master share: calls to the API server, a cache kept by list and
watch, a queue of keys, a lease, and writes that may be repeated.
"""
