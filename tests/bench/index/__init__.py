"""`scripts/bench-index`: what do millions of cached blocks cost, in memory and in time, by themselves and end to end?"""
