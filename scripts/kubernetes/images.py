"""Images: every one is this machine's files, but for those whose names say otherwise. Pure."""

import re

_NAME = re.compile(r"[a-z0-9]+([._\-/:@][a-z0-9._\-]+)*")


def pull_error(image: str) -> tuple[str, str] | None:
    """What pulling it ends with, a reason and a message; None: it is there.

    `bad.invalid/denied...` needs a right that nobody has, any other `bad.invalid/...` does not
    exist, and a name with upper case or blanks is none."""
    if not _NAME.fullmatch(image):
        message = f'Failed to apply default image tag "{image}": couldn\'t parse image name: '
        return "InvalidImageName", message + "invalid reference format"
    if image.startswith("bad.invalid/denied"):
        message = "pull access denied, repository does not exist or may require authorization"
        return "ErrImagePull", f'failed to pull image "{image}": {message}'
    if image.startswith("bad.invalid/"):
        return "ErrImagePull", f'failed to pull image "{image}": not found'
    return None
