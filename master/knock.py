"""Find out whether a node whose stream ended is dead; see proto/knock.py."""

import asyncio

from elastic.master.events import Incarnation, KnockAnswer
from elastic.proto import knock as wire
from elastic.proto.errors import ProtocolMismatch

CONNECT_TIMEOUT = 1.0
ANSWER_TIMEOUT = 1.0
LONGEST = CONNECT_TIMEOUT + ANSWER_TIMEOUT + 0.5
"""Seconds; one that took more was not waited for in time, so its silence says nothing."""


async def knock(address: str, incarnation: Incarnation) -> KnockAnswer:
    """Connect to host:port and say what the outcome tells; takes 2 s at most."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (ConnectionRefusedError, ConnectionResetError):
        return KnockAnswer.GONE
    except (OSError, TimeoutError, ValueError, OverflowError):
        return KnockAnswer.SILENT
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            line = await reader.readline()
        same = wire.parse(line[: wire.LIMIT]) == incarnation
        return KnockAnswer.ALIVE if same else KnockAnswer.RESTARTING
    except TimeoutError:
        return KnockAnswer.SILENT  # its agent is starting, or too busy to answer: time will tell
    except ConnectionError:
        return KnockAnswer.GONE
    except (ProtocolMismatch, ValueError):
        return KnockAnswer.SILENT
    finally:
        writer.close()
