"""Which token ids will the engine make of this prompt?"""
