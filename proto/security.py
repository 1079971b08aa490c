"""What proves that two processes belong to one job. Imports no grpc."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.proto.errors import UsageError

TOKEN_KEY = "elastic-token"
"""Of a call's metadata."""
TOKEN = "ELASTIC_JOB_TOKEN"
"""Of the environment."""
LONGEST_TOKEN = 4096


def read_token(environ: Mapping[str, str], file: str | None) -> str:
    """The job's token, from `file` where one is named; empty: none. Raises UsageError."""
    token = environ.get(TOKEN, "")
    if file:
        try:
            with open(file) as opened:
                token = opened.read(LONGEST_TOKEN + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it holds no text"
            raise UsageError(f"--token-file {file}: {why}") from error
        if not token:
            raise UsageError(f"--token-file {file}: it is empty")
        if len(token) > LONGEST_TOKEN:
            raise UsageError(f"--token-file {file}: it holds more than {LONGEST_TOKEN} characters")
    if not (token.isascii() and token.isprintable()):
        raise UsageError("the job token may have printable ASCII characters only: make another one")
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    token: str = ""
    """Shared by all of one job; empty: none."""
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def check(self) -> None:
        """Raises UsageError where a file cannot be read, or is not what its flag says."""
        for flag, path in (("cert", self.cert), ("key", self.key), ("ca", self.ca)):
            if path is None:
                return
            try:
                path.read_bytes()
            except OSError as error:
                raise UsageError(f"--tls-{flag} {path}: {error.strerror}") from error
        assert self.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # A key with a pass phrase is of no use: nobody could type it on a thousand nodes.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"--tls-cert {self.cert} and --tls-key {self.key}: they are no pair of a "
                "certificate and its key, in PEM and without a pass phrase"
            ) from error
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise UsageError(f"--tls-ca {self.ca}: it holds no certificate in PEM") from error

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self.token),) if self.token else ()
