# A worker. Build it from the repository's root, for a CPU or for CUDA:
#   make dist && docker build -f deploy/images/worker.Dockerfile -t motet-worker:cuda .
#   docker build -f deploy/images/worker.Dockerfile -t motet-worker:cpu --build-arg TORCH_INDEX=URL .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# The package index that torch comes from, such as PyTorch's own of builds for a CPU. Empty: the usual one, whose build
# has CUDA and brings the triton that it was made with.
ARG TORCH_INDEX=
COPY constraints.txt dist/*.whl /dist/
RUN python -m venv /opt/motet \
    && /opt/motet/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch==2.13.0 \
    && /opt/motet/bin/pip install --no-cache-dir --find-links /dist -c /dist/constraints.txt "motet[worker]"

FROM python:${PYTHON}
# A compiler: the native code of a CPU is made for the machine that runs it, and triton compiles its launchers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/motet /opt/motet
ENV PATH=/opt/motet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/var/cache/motet TRITON_CACHE_DIR=/var/cache/motet/triton
RUN useradd --uid 65532 --no-create-home --shell /usr/sbin/nologin motet \
    && install -d -o 65532 -g 65532 -m 0700 /var/cache/motet
USER 65532:65532
WORKDIR /var/cache/motet
VOLUME ["/var/cache/motet", "/tmp"]
STOPSIGNAL SIGTERM
# 9401 metrics
EXPOSE 9401
ENTRYPOINT ["motet"]
CMD ["worker", "--config", "/etc/motet/motet.toml"]
