"""How does a process that is an engine come to be, and to an end?

    plan ──▶ programs: command, environment, what routers are told ──▶ engine: start, ready, drained, stop

For one host: engines listen on 127.0.0.1, on ports that the kernel chose. Nothing is imported here: plans are read by commands that start
nothing.
"""
