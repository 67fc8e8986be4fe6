"""What does the router show of itself to people? A live page on the admin listener, and the one document that it is made of."""
