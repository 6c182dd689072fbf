#!/bin/sh
# Build the distributions in these directories and install them, alone, into a fresh /opt/ddpjob.
set -eu
for each in "$@"; do
    cd "$each"
    /opt/builder/bin/python -m hatchling build -t wheel -d /tmp/wheels
done
/opt/builder/bin/uv --offline venv --quiet --python python3 /opt/ddpjob
PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_NO_CACHE=1 \
    /opt/builder/bin/uv --offline pip install --quiet --no-deps --compile-bytecode \
    --python /opt/ddpjob/bin/python /tmp/wheels/*.whl
