"""What a rank says it is doing where it waits for no rank, for as long as that takes: the master calls it no hang. Their
beginning is ours, so that no script's own phase is one of them by chance. Pure."""

LEAVING = "elastic:leave"
"""It has saved, and waits for its end, which has a time of its own."""
PERSISTING = "elastic:persist"
"""It waits for what it has saved to be on storage."""
