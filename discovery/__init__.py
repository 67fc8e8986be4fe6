"""Which engines exist now, and what does each hold?"""
