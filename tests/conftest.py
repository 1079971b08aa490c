"""What every test shares."""

from hypothesis import settings

# No deadline for one example: two workers share two cores, and a slow moment is no failure.
settings.register_profile("elastic", deadline=None)
settings.load_profile("elastic")
