"""Give a model folder (configuration and tokenizer) fixed random weights. usage: make_weights.py MODEL_DIR

Runs in an engine's environment (torch, transformers). The spread is chosen so that the output depends on the prompt: with the engines' own
dummy weights every prompt gets the same answer, and comparing answers would show nothing.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

path = sys.argv[1]
torch.manual_seed(7)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).to(torch.bfloat16)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            std = 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5
            parameter.copy_((torch.randn(parameter.shape) * std).to(torch.bfloat16))
model.save_pretrained(path)
