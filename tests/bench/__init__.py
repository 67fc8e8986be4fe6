"""`scripts/bench`: what does the router cost, beside others under the same load?"""
