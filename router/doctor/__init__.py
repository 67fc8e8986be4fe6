"""What is wrong with this fleet? Each precondition of a cache hit and of a safe deployment, tried on engines as they run."""
