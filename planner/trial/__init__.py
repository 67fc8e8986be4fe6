"""How would a plan have done?"""
