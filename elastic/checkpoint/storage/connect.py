"""The storage of a checkpoint, by its name."""

import json
from pathlib import Path

from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.storage.objects import Objects, driver
from elastic.checkpoint.storage.protocol import URL, Storage
from elastic.proto.errors import CheckpointError


def connect(url: str, options: str = "{}") -> Storage:
    """The storage of a checkpoint, by its canonical name; options: JSON, for its driver.

    Nothing is asked of it yet. Raises `CheckpointError` where there is no driver for it.
    """
    given = json.loads(options)
    if not URL.match(url):
        if given:
            raise CheckpointError(
                f"storage_options are for URLs: {url} is a folder, and takes none"
            )
        return Folder(Path(url))
    from fsspec.core import url_to_fs  # not needed for folders

    try:
        with driver():
            fs, root = url_to_fs(url, **given)
    except OSError as error:
        cause = error.__cause__  # fsspec: "Install s3fs to access S3"
        raise CheckpointError(f"{url} cannot be used: {cause or error}") from error
    return Objects(url, fs, root.rstrip("/"))
