"""Several processes on one port: who starts them, and what do they have in common?"""
