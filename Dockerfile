# One image for every command: docker run --ulimit nofile=65536 IMAGE serve --engine http://HOST:8000
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[dns,docker,kubernetes,otel]'

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --no-compile --find-links /wheels 'commutator[dns,docker,kubernetes,otel]' && rm -r /wheels && useradd --system --uid 10001 commutator
USER 10001
EXPOSE 8080
# Of a command that serves elsewhere, HEALTH_URL says where.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:8080/health'), timeout=2)"]
ENTRYPOINT ["commutator"]
CMD ["--help"]
