"""Lets stock vLLM's MooncakeConnector run without an accelerator: it asks for the number of a device, and sets it. Outside vLLM.

vLLM imports this where its setting `kv_connector_module_path` says so.
"""

# mypy: ignore-errors

import torch
from vllm.platforms import current_platform

torch.accelerator.current_device_index = lambda: 0
torch.accelerator.set_device_index = lambda *_: None
type(current_platform).set_device = classmethod(lambda _, device: None)

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector  # noqa: E402, F401  vLLM looks for it here
