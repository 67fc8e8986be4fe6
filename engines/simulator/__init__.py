"""An engine that fakes the model, not the protocol: real HTTP, real KV events, a real prefix cache, no weights."""
