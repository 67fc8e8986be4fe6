"""Which endpoint should take this request? Filter, score, pick: pure, and explained."""
