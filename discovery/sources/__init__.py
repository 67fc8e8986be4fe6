"""Where do engine addresses come from?"""
