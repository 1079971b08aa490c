"""A package, for `-m pkg.worker`."""
