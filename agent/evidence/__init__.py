"""What a hang verdict rests on, collected on a node from outside of its ranks."""
