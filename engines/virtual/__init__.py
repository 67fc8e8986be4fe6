"""An engine in virtual time: the simulator's scheduler and cache, under a clock that only adds."""
