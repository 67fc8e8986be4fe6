"""How does a plan come true? One module for each way in which engines run."""
