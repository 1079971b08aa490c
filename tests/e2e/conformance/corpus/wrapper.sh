#!/bin/sh
# Stands in for an interpreter: PYTHON_EXEC=<here>/wrapper.sh
VIA_WRAPPER=1 exec "$PROBE_PYTHON" "$@"
