"""Which engines exist on this host, when `commutator up` is to say?"""
