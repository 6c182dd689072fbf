#!/bin/sh
# Build the distribution in directory $1 and install it, alone, into a fresh /opt/ddpjob.
set -eu
cd "$1"
/opt/builder/bin/python -m hatchling build -t wheel -d /tmp/wheels
/opt/builder/bin/uv --offline venv --quiet --python python3 /opt/ddpjob
PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_NO_CACHE=1 \
    /opt/builder/bin/uv --offline pip install --quiet --no-deps --compile-bytecode \
    --python /opt/ddpjob/bin/python /tmp/wheels/*.whl
