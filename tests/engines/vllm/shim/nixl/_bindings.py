"""The part of `nixl._bindings` that vLLM imports."""

# mypy: ignore-errors

from nixl_cu12._bindings import nixlXferTelemetry  # noqa: F401  for vLLM
