"""What is a router doing, in a terminal? The live page's document, drawn with rich."""
