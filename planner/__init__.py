"""How many engines should there be?"""
