"""The part of `nixl._api` that vLLM imports."""

# mypy: ignore-errors

import functools

from nixl_cu12 import _api

nixl_agent = _api.nixl_agent
nixl_agent_config = functools.partial(_api.nixl_agent_config, enable_prog_thread=False)
