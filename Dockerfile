# One image for every command: docker run IMAGE serve --engine http://HOST:8000
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels commutator && rm -r /wheels && useradd --system commutator
USER commutator
EXPOSE 8080
ENTRYPOINT ["commutator"]
CMD ["--help"]
