#!/bin/sh
# Install lock files into /opt/ddpjob while an image is built: install.sh FILE...
#
# Only wheels: to build a source archive would fetch and run build tools that no lock names.
# The installer itself is gone when the step ends, so that no layer holds it. Byte code is
# compiled now and never checked against its source again: the root filesystem may be read-only
# at run time, and importing torch from source each time is slow. Build secret `index` may set
# how the package index is reached and where the installer's cache is.
set -eu
here=$(dirname "$0")
set -a
UV_NO_CACHE=1 UV_LINK_MODE=copy UV_NO_PROGRESS=1 PYC_INVALIDATION_MODE=UNCHECKED_HASH
if [ -f /run/secrets/index ]; then . /run/secrets/index; fi
set +a
python3 -m venv /tmp/installer
/tmp/installer/bin/pip install --quiet --no-cache-dir --disable-pip-version-check \
    --require-hashes --only-binary=:all: --requirement "$here/uv.txt"
[ -x /opt/ddpjob/bin/python ] || /tmp/installer/bin/uv venv --quiet --python python3 /opt/ddpjob
for lock in "$@"; do
    /tmp/installer/bin/uv pip install --compile-bytecode --require-hashes --only-binary=:all: \
        --python /opt/ddpjob/bin/python --requirement "$here/$lock"
done
rm -rf /tmp/installer
