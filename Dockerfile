# Two images: `--target operator` and `--target trainer`. BASE_IMAGE is any Debian-like base with
# python3 >= 3.11, its venv module and CA certificates. A tag alone moves: `make base-image` writes its
# digest behind it, here and nowhere else (docs/internals/releasing.md).
#
# Two optional build secrets say how to reach the package index: `index`, a shell file that sets
# variables such as PIP_INDEX_URL and UV_DEFAULT_INDEX, and `ca`, a PEM bundle that those may name
# as /run/secrets/ca. Neither reaches a layer.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim

FROM ${BASE_IMAGE} AS base
# Some bases ship a standard library without byte code, and at run time none can be written.
RUN groupadd --gid 1000 ddpjob \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin ddpjob \
    && python3 -c "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('stdlib'), quiet=2)"
ENV PATH=/opt/ddpjob/bin:${PATH} PYTHONUNBUFFERED=1

# --- Our own code becomes a tree that is copied over the environment --------------------------
FROM base AS builder
COPY dev/requirements/install.sh dev/requirements/uv.txt dev/requirements/build.txt /opt/requirements/
RUN --mount=type=secret,id=index --mount=type=secret,id=ca \
    sh /opt/requirements/install.sh build.txt && mv /opt/ddpjob /opt/builder
COPY dev/requirements/package.sh /opt/requirements/
COPY contract /src/contract

FROM builder AS operator-code
COPY operator /src/operator
RUN sh /opt/requirements/package.sh /src/contract /src/operator

FROM builder AS trainer-code
# Its wheel holds the tools, too.
COPY tools /src/tools
COPY trainer /src/trainer
RUN sh /opt/requirements/package.sh /src/contract /src/trainer

# --- Operator --------------------------------------------------------------------------------
FROM base AS operator
COPY dev/requirements/install.sh dev/requirements/uv.txt dev/requirements/operator.txt /opt/requirements/
RUN --mount=type=secret,id=index --mount=type=secret,id=ca \
    sh /opt/requirements/install.sh operator.txt
COPY --from=operator-code /opt/ddpjob /opt/ddpjob
LABEL org.opencontainers.image.title="ddpjob operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0"
USER 1000:1000
ENTRYPOINT ["ddpjob-operator"]

# --- Trainer ---------------------------------------------------------------------------------
# torch brings the CUDA libraries, gigabytes of them. Its layer depends on the base, the installer
# and torch.txt and on nothing else, so it is built, pushed and pulled once.
FROM base AS torch
COPY dev/requirements/install.sh dev/requirements/uv.txt dev/requirements/torch.txt /opt/requirements/
RUN --mount=type=secret,id=index --mount=type=secret,id=ca \
    sh /opt/requirements/install.sh torch.txt

FROM torch AS trainer
COPY dev/requirements/trainer.txt /opt/requirements/
RUN --mount=type=secret,id=index --mount=type=secret,id=ca \
    sh /opt/requirements/install.sh trainer.txt
COPY --from=trainer-code /opt/ddpjob /opt/ddpjob
COPY examples /workspace/examples
# A script that starts there may write beside itself.
RUN chmod -R a+rX /workspace && chown 1000:1000 /workspace
# The driver's compute libraries, where a runtime injects them; which GPUs, the cluster decides.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="ddpjob trainer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0"
WORKDIR /workspace
USER 1000:1000
