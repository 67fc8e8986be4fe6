"""Does anything leak, hang or drift when everything that can happen does, for an hour? `scripts/soak`; a test runs twenty seconds of it."""
