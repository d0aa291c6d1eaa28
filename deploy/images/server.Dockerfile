# Control plane, HTTP gateway and the motet command: no torch. Build it from the repository's root:
#   make dist && docker build -f deploy/images/server.Dockerfile -t motet-server .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
COPY constraints.txt dist/*.whl /dist/
RUN python -m venv /opt/motet \
    && /opt/motet/bin/pip install --no-cache-dir --find-links /dist -c /dist/constraints.txt "motet[server,tracing,top]"

FROM python:${PYTHON}
COPY --from=build /opt/motet /opt/motet
ENV PATH=/opt/motet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 65532 --no-create-home --shell /usr/sbin/nologin motet \
    && install -d -o 65532 -g 65532 -m 0700 /var/lib/motet
USER 65532:65532
WORKDIR /var/lib/motet
VOLUME ["/var/lib/motet", "/tmp"]
STOPSIGNAL SIGTERM
# 50051 clients, 50052 workers, 8000 HTTP, 9400 metrics
EXPOSE 50051 50052 8000 9400
ENTRYPOINT ["motet"]
CMD ["control-plane", "--config", "/etc/motet/motet.toml"]
