"""What is an engine, and how do we talk to one?"""
