"""Which engine serves this request?"""
